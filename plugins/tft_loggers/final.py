"""
The file with which the controller tells the process of the loggers which steps of a job are final.
A step is final when every rank has ended it completely; then its values are sent to the loggers.
"""

from dataclasses import dataclass, field
from pathlib import Path

from tft_loggers.places import FINAL, read, write


@dataclass(slots=True, kw_only=True)
class Final:
    """
    The facts in the file `final.json`: up to which step the steps of a job are final. The file is
    used by all runs of the job with the same run directory.
    """

    step: int = -1
    """The last final step. -1 if no step is final yet."""
    backs: list[int] = field(default_factory=list)
    """One step for each time that the job went back to a step before a final step, the oldest time
    first: the step from whose end the job continued. The values of later steps are logged again."""
    result: str = ""
    """How the run has ended: `completed`, `dumped`, `failed` or `cancelled`. Empty while it goes
    on."""

    @classmethod
    def of(cls, directory: Path) -> "Final":
        """
        Read the file `final.json` in `directory`. If there is no such file, no step is final.
        """
        found = read(directory / FINAL)
        return cls(
            step=int(found.get("step", -1)),
            backs=[int(step) for step in found.get("backs", ())],
            result=str(found.get("result", "")),
        )

    def write(self, directory: Path) -> None:
        """
        Write these facts to the file `final.json` in `directory`.
        """
        write(
            directory / FINAL,
            {"step": self.step, "backs": self.backs, "result": self.result},
        )

    def reached(self, step: int) -> bool:
        """
        Record `step` as the last final step. Return True if the job has gone back, which means that
        `step` is smaller than the last final step before.
        """
        back = step < self.step
        if back:
            self.backs.append(step)
        self.step = step
        return back
