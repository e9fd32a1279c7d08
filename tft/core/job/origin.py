"""
Define what is given about a job when its machine is made.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """
    Where a job comes from: its name, its checkpoints, and the run that it goes on from.
    """

    job: str
    """The name of the job."""
    checkpoints: str
    """The directory for last checkpoints."""
    checkpoint_name: str = "step-{step:08d}"
    """The name of a last checkpoint: a format string with the field `step`."""
    resume: tuple[str, int] | None = None
    """The directory of a checkpoint to start from, and the step whose end it holds."""
    older: tuple[tuple[str, int], ...] = ()
    """Checkpoints of earlier steps, to go back to: directory and step."""
    first_incident: int = 1
    """The number of the next incident."""
