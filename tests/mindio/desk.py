"""
What rank 0 of a program is told from outside while it trains, in files.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindio_ttp.controller_ttp import tft_notify_controller_prepare_action

from tests.mindio.stub import change


class Desk:
    """
    That of one rank. In `options`, `done` is the name of a file: when it is there, a few steps more are trained,
    in the place of `steps`.
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
        Rank 0 speaks for the cluster: a file says what to prepare, another what it chooses.
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
        Whether all is trained. Where a file says so, rank 0 says of which step, soon enough for all to read it
        before they come to it.
        """
        if not self._done:
            return step >= self._steps
        last = self._directory / "last"
        if self._rank == 0 and (self._directory / self._done).exists() and not last.exists():
            whole = self._directory / "last.part"
            whole.write_text(str(step + 3))
            whole.rename(last)
        return last.exists() and step >= int(last.read_text())
