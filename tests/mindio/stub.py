"""
An orchestrator for tests, which reacts to the reports of a job's controller.

It reports no faults of its own. It chooses the last of the offered strategies, or the one planned
in `choices`. Three words in `choices` are not strategies. `raise` lets the callback raise an error.
`stop switch` cancels a hot switch. `after PATH` waits until the file exists.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindio_ttp import controller_ttp as controller

PARAMETERS = {
    "downgrade": '{"scale-in-strategy":"DP"}', "upgrade": '{"scale-out-strategy":"DP"}',
}  # fmt: skip


def change(choice: str) -> None:
    """
    Choose a strategy, with the parameters that a cluster sends.
    """
    told = PARAMETERS.get(choice, "")
    assert controller.tft_notify_controller_change_strategy(choice, told) == 0


class Stub:
    """
    The callbacks of the orchestrator.

    `note` records each report. The key of `choices` is an offer, as its strategies joined by
    commas. The value is the choice.
    """

    def __init__(self, note: Callable[..., None], choices: dict[str, str]) -> None:
        self._note = note
        self._choices = choices

    def register(self) -> None:
        """
        Register a callback for each kind of report from the controller.
        """
        for name in ("fault_ranks", "stop_complete", "strategies", "result"):
            assert (
                controller.tft_register_mindx_callback(f"report_{name}", getattr(self, name)) == 0
            )

    def fault_ranks(self, ranks: dict[int, int], codes: dict[int, str]) -> None:
        """
        Handle a report of fault ranks: stop the training for the same ranks.
        """
        self._note("report_fault_ranks", ranks=sorted(ranks.items()), codes=sorted(codes.items()))
        assert controller.tft_notify_controller_stop_train(ranks) == 0

    def stop_complete(self, code: int, message: str, ranks: dict[int, int]) -> None:
        """
        Handle the report that training has stopped: confirm the same fault ranks, without further
        ones.
        """
        self._note("report_stop_complete", code=code, ranks=sorted(ranks.items()))
        if message != "paused":
            assert controller.tft_notify_controller_on_global_rank(ranks) == 0

    def strategies(self, ranks: dict[int, int], strategies: list[str]) -> None:
        """
        Handle an offer of strategies: choose one.
        """
        self._note("report_strategies", strategies=strategies)
        choice = self._choices.get(",".join(strategies), strategies[-1])
        if choice == "raise":
            raise OSError("the cluster does not answer")
        if choice == "stop switch":
            assert controller.tft_notify_controller_prepare_action(choice) == 0
            return
        if choice.startswith("after "):
            while not Path(choice.removeprefix("after ")).exists():
                time.sleep(0.02)
            choice = strategies[-1]
        change(choice)

    def result(self, code: int, message: str, ranks: dict[int, int], strategy: str) -> None:
        """
        Handle the report of a repair's result: record it.
        """
        self._note(
            "report_result", code=code, strategy=strategy, message=message, ranks=sorted(ranks)
        )
        assert message or code, (strategy, ranks)


Heard = dict[str, Any]
"""A report that a stub has recorded. Any: JSON."""
