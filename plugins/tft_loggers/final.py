"""
The file with which the controller says up to which step the steps of a job are final.
"""

from dataclasses import dataclass, field
from pathlib import Path

from tft_loggers.places import FINAL, read, write


@dataclass(slots=True, kw_only=True)
class Final:
    """
    Up to which step the steps of a job are final, in all runs with one run directory.
    """

    step: int = -1
    """The last final step. -1: no step is final yet."""
    backs: list[int] = field(default_factory=list)
    """The returns of the job to a step before a final step, in their order. Each entry is the step
    from whose end the job continued."""
    result: str = ""
    """How the run has ended: `completed`, `dumped`, `failed` or `cancelled`. Empty: it goes on."""

    @classmethod
    def of(cls, directory: Path) -> "Final":
        """
        Return what the file in `directory` says.
        """
        found = read(directory / FINAL)
        return cls(
            step=int(found.get("step", -1)),
            backs=[int(step) for step in found.get("backs", ())],
            result=str(found.get("result", "")),
        )

    def write(self, directory: Path) -> None:
        """
        Write the file in `directory`.
        """
        write(
            directory / FINAL,
            {"step": self.step, "backs": self.backs, "result": self.result},
        )

    def reached(self, step: int) -> bool:
        """
        Record `step` as the last final step. Return True if the job has gone back to an earlier
        step than before.
        """
        back = step < self.step
        if back:
            self.backs.append(step)
        self.step = step
        return back
