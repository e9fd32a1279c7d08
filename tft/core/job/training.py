"""
Own the progress of training, and the facts about its checkpoints.
"""

from collections import Counter
from dataclasses import dataclass, field

from tft.core.job.origin import Origin
from tft.core.job.refusals import Refusals

UNFINISHED = "ranks ended before they had written their part"


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
    refusals: Refusals = field(default_factory=Refusals)
    """The updates that the ranks have refused because of their numbers."""

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
    missed: dict[tuple[int | None, str], list[int]] = field(default_factory=dict)
    """By rank and reason: the steps whose checkpoint could not be written. Rank None: no rank has
    reported the reason."""
    newest: int = 0
    """The step of the newest checkpoint that was complete, or the first step of the job."""

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
            newest=0 if origin.resume is None else origin.resume[1],
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
        self.newest = max(self.newest, step)
        self.found(step)

    def drop_later(self, step: int) -> None:
        """
        Drop the checkpoints of steps after `step`, because these steps are computed again.
        """
        self.known = {each: directory for each, directory in self.known.items() if each <= step}
        self.newest = min(self.newest, step)

    def unfinished(self, step: int, *, every: int) -> list[int]:
        """
        Return the steps before `step` whose periodic checkpoint is not complete, although no rank
        has reported a failure. A rank that ends before it has written its part cannot report it. No
        rank writes its part of an older checkpoint once the one of `step` is complete.
        """
        if not every:
            return []
        reported = {each for steps in self.missed.values() for each in steps}
        first = self.newest - self.newest % every + every
        return [each for each in range(first, step, every) if each not in reported]

    def found(self, step: int) -> None:
        """
        Note that the checkpoint of `step` is complete, or that the reason why it is not has been
        reported, after it was counted as unfinished.
        """
        unfinished = (None, UNFINISHED)
        if step in self.missed.get(unfinished, ()):
            self.missed[unfinished].remove(step)
            if not self.missed[unfinished]:
                del self.missed[unfinished]
