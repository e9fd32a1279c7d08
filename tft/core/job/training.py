"""
Own the facts about the progress of training, the rollbacks, and the checkpoints.
"""

from collections import Counter
from dataclasses import dataclass, field

from tft.core.job.origin import Origin
from tft.core.job.refusals import Refusals

UNFINISHED = "ranks ended before they had written their part"


@dataclass(slots=True, kw_only=True)
class Rollbacks:
    """
    The rollbacks of the job. They show which captured rank-local state is out of date: the state of
    a step that was computed before a rollback to an earlier step.
    """

    _found: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    """For each rollback, in order: its incident and round, and the step that it went back to. A
    rollback is left out if a later one went back at least as far."""

    def went_back(self, attempt: tuple[int, int], step: int) -> None:
        """
        Record that the ranks were ordered to go back to `step`. `attempt` is the incident and the
        round of the order.
        """
        self._found = [(at, back) for at, back in self._found if back < step]
        self._found.append((attempt, step))

    def kept(self, attempt: tuple[int, int], step: int) -> bool:
        """
        Return True if rank-local state that was captured at `step` may still be used, because no
        rollback since then went back to an earlier step. `attempt` is the incident and the round of
        the last rollback of the rank before the state was read.
        """
        return all(step <= back for at, back in self._found if at > attempt)


@dataclass(slots=True, kw_only=True)
class Training:
    """
    The progress of training.
    """

    first: int
    """The step from whose end the job starts."""
    last_step: int
    """The highest completed step."""
    compared: int
    """The last step at whose end the copies of each shard were found equal, either slice by slice
    or as a whole. Copies of later steps may differ."""
    whole: int
    """The last step at whose end the whole copies of each shard were found equal. Whole copies
    include module buffers; slices do not."""
    sliced: bool = False
    """True if the ranks digest a slice of their copies in every step, so that copies are compared
    while the job trains."""
    untrained: bool = True
    """True until the ranks have built their wrappers (such as DDP) for the first time. Until then
    nothing is trained, and each rank may use its own initial state."""
    began: bool = False
    """True once the initial states of the ranks were compared. This is done once in a job."""
    tails: bool = False
    """True if the training loops report where their steps end."""
    attempt: tuple[int, int] | None = None
    """The incident and the round in which the ranks were last ordered to resume. A pause does not
    change it. None: no rank has trained yet."""
    trained: set[int] = field(default_factory=set)
    """The ranks that have completed a step since the last order to resume, or have finished."""
    finished: set[int] = field(default_factory=set)
    """The ranks whose training function (the argument of `Session.run`) has returned."""
    rollbacks: Rollbacks = field(default_factory=Rollbacks)
    refusals: Refusals = field(default_factory=Refusals)
    """The updates that the ranks have refused because of their numbers."""

    @classmethod
    def of(cls, origin: Origin) -> "Training":
        """
        Return the facts about training at the start of a job.
        """
        first = 0 if origin.resume is None else origin.resume[1]
        return cls(first=first, last_step=first, compared=first, whole=first)

    def completed(self, step: int) -> None:
        """
        Record that some rank has completed `step`.
        """
        self.last_step = max(self.last_step, step)

    def found_equal(self, step: int) -> None:
        """
        Record that the whole copies of every shard were equal on all ranks at the end of `step`.
        """
        self.whole = max(self.whole, step)
        self.compared = max(self.compared, step)


@dataclass(slots=True, kw_only=True)
class Checkpoints:
    """
    The complete checkpoints on disk, and the checkpoints that could not be written or read.
    """

    directory: str
    """The directory that last checkpoints are written to."""
    name: str
    """The name of a last checkpoint: a format string with the field `step`."""
    resumed: bool
    """True if the job was started from a checkpoint."""
    known: dict[int, str]
    """By step: the directory of the known checkpoint of this step."""
    unread: Counter[int] = field(default_factory=Counter)
    """By step: how many times a rank could not load the checkpoint of this step."""
    missed: dict[tuple[int | None, str], list[int]] = field(default_factory=dict)
    """By rank and reason: the steps whose checkpoint could not be written. The rank is None if the
    controller itself has noticed that the checkpoint is incomplete."""
    newest: int = 0
    """The step of the newest checkpoint that was completed. Before the first one: the step from
    which the job started."""

    @classmethod
    def of(cls, origin: Origin) -> "Checkpoints":
        """
        Return the checkpoints that are known at the start of a job.
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
        Add a checkpoint, and forget all but the newest `keep` checkpoints (0: forget none). The
        ranks remove older ones from disk once the new one is reported, so the job cannot go back to
        them.
        """
        known = {**self.known, step: directory}
        self.known = {each: known[each] for each in sorted(known)[-keep:]}
        self.newest = max(self.newest, step)
        self.found(step)

    def drop_later(self, step: int) -> None:
        """
        Forget the checkpoints of steps after `step`, because these steps are computed again.
        """
        self.known = {each: directory for each, directory in self.known.items() if each <= step}
        self.newest = min(self.newest, step)

    def unfinished(self, step: int, *, every: int) -> list[int]:
        """
        Return the steps before `step` whose periodic checkpoint is incomplete although no rank has
        reported a failure: a rank that ends before it has written its part cannot report that.
        `every` is the number of steps between two checkpoints; 0 means that there are none. Call
        this when no rank will write a part of a checkpoint before `step` any more.
        """
        if not every:
            return []
        reported = {each for steps in self.missed.values() for each in steps}
        first = self.newest - self.newest % every + every
        return [each for each in range(first, step, every) if each not in reported]

    def found(self, step: int) -> None:
        """
        Stop counting the checkpoint of `step` as unfinished, because it is complete after all, or
        because a rank has reported why it failed.
        """
        unfinished = (None, UNFINISHED)
        if step in self.missed.get(unfinished, ()):
            self.missed[unfinished].remove(step)
            if not self.missed[unfinished]:
                del self.missed[unfinished]
