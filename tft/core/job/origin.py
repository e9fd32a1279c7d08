"""
Define the facts about a job that are known before its job machine is created.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """
    The facts with which a job machine starts: the name of the job, its checkpoints, and the
    checkpoint from which the job is resumed.
    """

    job: str
    """The name of the job. The names of the job's process groups begin with it."""
    checkpoints: str
    """The directory in which the job creates its last checkpoint."""
    checkpoint_name: str = "step-{step:08d}"
    """The name of the last checkpoint of a job: a format string with the field `step`."""
    resume: tuple[str, int] | None = None
    """The checkpoint from which the job starts: its directory, and the step after which it was
    written. None: the job starts anew."""
    older: tuple[tuple[str, int], ...] = ()
    """Checkpoints of earlier steps to which the job can return. Each is a pair of its directory and
    its step."""
    first_incident: int = 1
    """The number of the first incident of this run. The number is greater than 1 if earlier runs of
    a resumed job have had incidents."""
