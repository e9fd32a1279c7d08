"""
An orchestrator that sees what the job sees, and chooses the last of what is offered, or what it was told to
choose from a list. Told `raise`, it fails there; told `stop switch`, it calls a switch off instead; told
`after` a path, it waits until that is there.
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
    As clusters say it.
    """
    told = PARAMETERS.get(choice, "")
    assert controller.tft_notify_controller_change_strategy(choice, told) == 0


class Stub:
    """
    `note` gets what it hears; `choices` says for an offer, its words joined by commas, what to choose.
    """

    def __init__(self, note: Callable[..., None], choices: dict[str, str]) -> None:
        self._note = note
        self._choices = choices

    def register(self) -> None:
        """
        Hear all that the controller reports.
        """
        for name in ("fault_ranks", "stop_complete", "strategies", "result"):
            assert (
                controller.tft_register_mindx_callback(f"report_{name}", getattr(self, name)) == 0
            )

    def fault_ranks(self, ranks: dict[int, int], codes: dict[int, str]) -> None:
        """
        Stop the training for the same.
        """
        self._note("report_fault_ranks", ranks=sorted(ranks.items()), codes=sorted(codes.items()))
        assert controller.tft_notify_controller_stop_train(ranks) == 0

    def stop_complete(self, code: int, message: str, ranks: dict[int, int]) -> None:
        """
        The cluster knows of nothing else.
        """
        self._note("report_stop_complete", code=code, ranks=sorted(ranks.items()))
        if message != "paused":
            assert controller.tft_notify_controller_on_global_rank(ranks) == 0

    def strategies(self, ranks: dict[int, int], strategies: list[str]) -> None:
        """
        Choose.
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
        What has come of it.
        """
        self._note(
            "report_result", code=code, strategy=strategy, message=message, ranks=sorted(ranks)
        )
        assert message or code, (strategy, ranks)


Heard = dict[str, Any]
"""What a stub has noted. Any: JSON."""
