"""
Marker files in the run directory. With these files each rank tells the other ranks how far it has
come in a step. Chaos (the plugin that makes deliberate faults) needs them to make a fault at the
right moment.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """
    The facts that a rank has written when it entered its last collective of a step.
    """

    pid: int
    on_device: bool
    """True if the model of the rank is on a device. While the device waits in a collective for
    other ranks, the process of the rank may be awake. So nobody can tell from the process whether
    the rank is inside a collective."""


class BarrierFiles:
    """
    The marker files with which the ranks tell each other how far they have come in a step. A rank
    writes only its own files, and reads those of all ranks.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._directory = run_dir / "chaos"
        self._rank = rank

    def enter(self, step: int, *, on_device: bool) -> None:
        """
        Record that this process is about to enter its last collective of `step`, and whether a
        device computes for it.
        """
        mark = {"step": step, "pid": os.getpid(), "on_device": on_device}
        self._write(f"inside-rank{self._rank}", mark)

    def leave(self) -> None:
        """
        Remove the marker files of this rank that the methods `enter` and `wait` have written,
        because the attempt to compute the step is over.
        """
        for name in ("inside", "waits"):
            (self._directory / f"{name}-rank{self._rank}").unlink(missing_ok=True)

    def wait(self, firing: str) -> None:
        """
        Record that this process has reached the place where the fault with the name `firing` is to
        be made, and waits there for the other ranks that get the same fault.
        """
        self._write(f"waits-rank{self._rank}", firing)

    def waits(self, rank: int) -> str | None:
        """
        Return the name of the fault for which the process of `rank` waits, as that process has
        passed the name to the method `wait`. Return None if the process does not wait.
        """
        try:
            return str(json.loads((self._directory / f"waits-rank{rank}").read_text()))
        except FileNotFoundError:
            return None

    def inside(self, rank: int, step: int) -> Entry | None:
        """
        Return what the process of `rank` has told by calling `enter` for this step. Return None if
        no process of `rank` has called `enter` for this step.
        """
        try:
            mark = json.loads((self._directory / f"inside-rank{rank}").read_text())
        except FileNotFoundError:
            return None
        if mark["step"] != step:
            return None
        return Entry(pid=int(mark["pid"]), on_device=bool(mark["on_device"]))

    def met(self, incident: int, step: int) -> None:
        """
        Record the step that this rank had reached when the incident with the number `incident`
        stopped the rank.
        """
        self._write(f"met-{incident}-rank{self._rank}", step)

    def furthest(self, incident: int) -> int:
        """
        Return the highest step that any rank has recorded with `met` for an incident. Return 0 if
        no rank has recorded a step.
        """
        met = self._directory.glob(f"met-{incident}-rank*")
        return max((int(path.read_text()) for path in met), default=0)

    def _write(self, name: str, mark: object) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        draft = self._directory / f".{name}.{os.getpid()}"
        draft.write_text(json.dumps(mark))
        draft.replace(self._directory / name)
