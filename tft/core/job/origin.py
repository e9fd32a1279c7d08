"""
Define the facts about a job that are known before its machine is created.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """
    The name of a job, its checkpoints, and the run that it resumes.
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
