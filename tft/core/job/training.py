"""
Own the progress of training, and the facts about its checkpoints.
"""

from collections import Counter
from dataclasses import dataclass, field

from tft.core.job.origin import Origin


@dataclass(slots=True, kw_only=True)
class Training:
    """
    The progress of training.
    """

    first: int
    """The step whose end the job begins with."""
    last_step: int
    """The highest completed step."""
    compared: int
    """The last step at whose end all copies of each shard were equal. Copies of later steps may
    differ."""
    untrained: bool = True
    """True until the ranks have built their wrappers for the first time. Until then one initial
    state is as good as another."""
    began: bool = False
    """True once the states that the ranks begin with were compared."""
    tails: bool = False
    """True if the loops of ranks report where their steps end."""
    trained: set[int] = field(default_factory=set)
    """The ranks that have completed a step since the last resume."""
    finished: set[int] = field(default_factory=set)
    """The ranks whose `train` has returned."""

    @classmethod
    def of(cls, origin: Origin) -> "Training":
        """
        Return the training of a job that has not begun.
        """
        first = 0 if origin.resume is None else origin.resume[1]
        return cls(first=first, last_step=first, compared=first)

    def completed(self, step: int) -> None:
        """
        Note that some rank has completed `step`.
        """
        self.last_step = max(self.last_step, step)


@dataclass(slots=True, kw_only=True)
class Checkpoints:
    """
    The checkpoints of all ranks on disk, and those that could not be written or read.
    """

    directory: str
    """The directory that last checkpoints are written to."""
    name: str
    """The name of a last checkpoint: a format string with the field `step`."""
    resumed: bool
    """True if the job has begun with a checkpoint."""
    known: dict[int, str]
    """Step to directory: the known checkpoints of all ranks."""
    unread: Counter[int] = field(default_factory=Counter)
    """By step: how many times a rank could not load the checkpoint of that step."""
    missed: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    """By rank and reason: the steps whose checkpoint could not be written."""

    @classmethod
    def of(cls, origin: Origin) -> "Checkpoints":
        """
        Return the checkpoints that are known before the job has begun.
        """
        known = origin.older if origin.resume is None else (*origin.older, origin.resume)
        return cls(
            directory=origin.checkpoints,
            name=origin.checkpoint_name,
            resumed=origin.resume is not None,
            known={step: directory for directory, step in known},
        )

    def path(self, step: int) -> str:
        """
        Return the directory for a last checkpoint of `step`.
        """
        return f"{self.directory}/{self.name.format(step=step)}"

    def add(self, step: int, directory: str, *, keep: int) -> None:
        """
        Add a checkpoint, and drop the oldest ones beyond the newest `keep` (0: keep all). Ranks
        remove these from disk once the new checkpoint is reported, so no rank can go back to them.
        """
        known = {**self.known, step: directory}
        self.known = {each: known[each] for each in sorted(known)[-keep:]}

    def drop_later(self, step: int) -> None:
        """
        Drop the checkpoints of steps after `step`, because these steps are computed again.
        """
        self.known = {each: directory for each, directory in self.known.items() if each <= step}
