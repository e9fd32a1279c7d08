"""
Files through which a test gives instructions to rank 0 of a program while the program trains.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindio_ttp.controller_ttp import tft_notify_controller_prepare_action

from tests.mindio.stub import change


class Desk:
    """
    The reader of the instruction files in one rank.

    Without `done` in `options`, the program trains `steps` steps. With `done`, it trains until a
    file of that name exists, and a few steps more.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        steps: int,
        options: Mapping[str, Any],  # Any: JSON
        note: Callable[..., None],
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._steps = steps
        self._done: str = options.get("done", "")
        self._note = note

    def obey(self) -> None:
        """
        On rank 0, speak for the cluster: carry out the files `prepare.json` and `choose`, if they
        exist.

        `prepare.json` holds the action to prepare and its ranks. `choose` holds the strategy to
        choose.
        """
        wanted = self._directory / "prepare.json"
        if self._rank == 0 and wanted.exists():
            action, ranks = json.loads(wanted.read_text())
            wanted.unlink()
            assert tft_notify_controller_prepare_action(action, dict.fromkeys(ranks, 1)) == 0
            self._note("prepared", action=action)
        choice = self._directory / "choose"
        if self._rank == 0 and choice.exists():
            change(choice.read_text())
            choice.unlink()
            self._note("chosen")

    def is_last(self, step: int) -> bool:
        """
        Return whether the rank has trained its last step.

        If the job ends by a file, rank 0 announces a last step that lies three steps ahead. All
        ranks can then read the announcement before they reach that step.
        """
        if not self._done:
            return step >= self._steps
        last = self._directory / "last"
        if self._rank == 0 and (self._directory / self._done).exists() and not last.exists():
            whole = self._directory / "last.part"
            whole.write_text(str(step + 3))
            whole.rename(last)
        return last.exists() and step >= int(last.read_text())
