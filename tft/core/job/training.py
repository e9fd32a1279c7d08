"""
Define the facts about the progress of training, about rollbacks, and about checkpoints.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from tft.core.job.origin import Origin
from tft.core.job.refusals import Refusals

UNFINISHED = "ranks ended before they had written their part"
RANKS_AWAY = "ranks had left the job, and a periodic checkpoint needs the part of every rank"
CHECKPOINTS_SUSPENDED, CHECKPOINTS_RESUMED = "checkpoints_suspended", "checkpoints_resumed"
"""The names of two events for operators: from now on no periodic checkpoint can be completed, and
from now on periodic checkpoints are written again."""


@dataclass(slots=True, kw_only=True)
class Rollbacks:
    """
    The rollbacks of the job, which show whether captured rank-local state is out of date. State
    that a rank captured at a step is out of date if the rank has gone back to an earlier step
    since.
    """

    _found: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    """For each rollback, in order: its incident and round, and the step that the ranks went back
    to. A rollback is left out if the ranks went back at least as far in a later rollback."""

    def went_back(self, attempt: tuple[int, int], step: int) -> None:
        """
        Record that the ranks were ordered to go back to `step`. `attempt` is the incident and the
        round of the order.
        """
        self._found = [(at, back) for at, back in self._found if back < step]
        self._found.append((attempt, step))

    def kept(self, attempt: tuple[int, int], step: int) -> bool:
        """
        Return True if rank-local state that a rank captured at `step` may still be used, because
        the ranks have not gone back to an earlier step since. `attempt` is the incident and the
        round of the last rollback that the rank had carried out before the state was read.
        """
        return all(step <= back for at, back in self._found if at > attempt)


@dataclass(slots=True, kw_only=True)
class Equal:
    """
    The last steps at whose ends the copies of each shard were found equal.
    """

    compared: int
    """The last step at whose end the copies of each shard were found equal, either slice by slice
    or as a whole. Copies of later steps may differ."""
    whole: int
    """The last step at whose end the whole copies of each shard were found equal. Whole copies
    include module buffers; slices do not."""
    judged: int
    """The last step at whose end the copies of all holders of each shard were compared, and were
    equal or were repaired. A step does not count if a holder was lost before the comparison."""

    def reach(self, step: int) -> None:
        """
        Record that the whole copies of all holders were equal at the end of `step`.
        """
        self.whole = max(self.whole, step)
        self.judged = max(self.judged, step)
        self.compared = max(self.compared, step)

    def returned(self, step: int, *, judged: bool) -> None:
        """
        Record that all ranks have returned to the end of `step`, with equal copies. `judged` is
        True if the copies of all holders were compared before that.
        """
        self.compared = self.whole = step
        self.judged = step if judged else min(self.judged, step)

    def limit(self, step: int) -> None:
        """
        Record that copies of steps later than `step` count as not compared.
        """
        self.compared = min(self.compared, step)
        self.whole = min(self.whole, step)
        self.judged = min(self.judged, step)


@dataclass(slots=True, kw_only=True)
class Start:
    """
    What is known about the initial states (of step 0) with which the ranks begin to train.
    """

    compared: bool = False
    """True as soon as the initial states of the ranks were compared with each other, or need not be
    compared any more."""
    equal: set[str] = field(default_factory=set)
    """The shards of which several ranks held equal copies when the initial states were compared. A
    later difference between copies of step 0 is a fault."""
    unlike: dict[str, str] = field(default_factory=dict)
    """By shard: which ranks began to train with different copies of the shard, as a sentence. It is
    empty if all copies were found equal later, without a repair."""
    repaired: bool = False
    """True if a rank has fetched or loaded its state, or has left, since training began."""


@dataclass(slots=True, kw_only=True)
class Training:
    """
    How far the training of the job has come, and what is known about equal copies of shards.
    """

    first: int
    """The step from whose end the job was started. 0: the job was not started from a checkpoint."""
    last_step: int
    """The highest step that any rank has completed."""
    equal: Equal
    """Until which steps the copies of each shard were found equal."""
    sliced: bool = False
    """True if the ranks digest a slice of their copies of shards in every step, so that the copies
    are compared while the job trains."""
    untrained: bool = True
    """True until the ranks have built their wrappers (such as DDP) for the first time. Until then
    nothing is trained, and each rank may have an initial state of its own."""
    start: Start = field(default_factory=Start)
    """What is known about the initial states of the ranks."""
    tails: bool = False
    """True if the training loop of any rank reports where each step ends."""
    attempt: tuple[int, int] | None = None
    """The incident and the round in which the ranks were last ordered to resume training. The end
    of a pause does not change this pair. None: no rank has trained yet."""
    entered: float = -inf
    """The time at which a rank was last known to enter its training loop."""
    trained: set[int] = field(default_factory=set)
    """The ranks that have completed a step since all ranks were last ordered to train on, after an
    incident or a pause. Ranks that have finished training are included."""
    finished: set[int] = field(default_factory=set)
    """The ranks whose training function (the argument of `Session.run`) has returned."""
    rollbacks: Rollbacks = field(default_factory=Rollbacks)
    refusals: Refusals = field(default_factory=Refusals)
    """The updates that ranks have refused to apply, because the numbers of the update were bad
    (NaN, Inf or a spike)."""

    @classmethod
    def of(cls, origin: Origin) -> "Training":
        """
        Return the facts about training at the start of the job that `origin` describes.
        """
        first = 0 if origin.resume is None else origin.resume[1]
        return cls(
            first=first, last_step=first, equal=Equal(compared=first, whole=first, judged=first)
        )

    def completed(self, step: int) -> None:
        """
        Record that a rank has completed `step`.
        """
        self.last_step = max(self.last_step, step)

    def found_unlike(self, shard: str, why: str) -> None:
        """
        Record that ranks begin to train with different copies of a shard. `why` says which ranks.
        """
        self.start.unlike[shard] = why

    def found_equal(self, step: int) -> None:
        """
        Record that the whole copies of every shard were equal on all ranks at the end of `step`.
        """
        self.equal.reach(step)
        self.forget_unlike(step)

    def forget_unlike(self, step: int) -> None:
        """
        Forget that ranks began with different copies, because all copies were equal at the end of
        `step`. Do nothing if that is the step from which the job was started, or if a repair has
        made the copies equal.
        """
        if step > self.first and not self.start.repaired:
            self.start.unlike.clear()


@dataclass(slots=True, kw_only=True)
class Checkpoints:
    """
    The complete checkpoints on disk, and the checkpoints that could not be written or loaded.
    """

    directory: str
    """The directory to which the job writes its last checkpoint."""
    name: str
    """The name of the last checkpoint of the job: a format string with the field `step`."""
    resumed: bool
    """True if the job was started from a checkpoint."""
    known: dict[int, str]
    """By step: the directory of the checkpoint of this step. Only checkpoints that the job can
    return to are listed."""
    unread: Counter[int] = field(default_factory=Counter)
    """By step: how many times a rank could not load the checkpoint of this step."""
    missed: dict[tuple[int | None, str], list[int]] = field(default_factory=dict)
    """By rank and reason: the steps whose checkpoint could not be written. The rank is None if the
    controller itself has noticed that the checkpoint is incomplete."""
    told: set[int] = field(default_factory=set)
    """The steps of the checkpoints that were logged as missed."""
    suspended: int | None = None
    """The step after which ranks have left the job. No periodic checkpoint can be completed until
    they come back. None: all ranks take part."""
    newest: int = 0
    """The step of the newest complete checkpoint, or the step from which the job started if there
    is no such checkpoint. If the ranks return to an earlier step, the value is set to that step."""

    @classmethod
    def of(cls, origin: Origin) -> "Checkpoints":
        """
        Return the checkpoints that are known at the start of the job that `origin` describes.
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
        Return the directory that the last checkpoint of the job gets if it is a checkpoint of
        `step`.
        """
        return f"{self.directory}/{self.name.format(step=step)}"

    def add(self, step: int, directory: str, *, keep: int) -> None:
        """
        Add a complete checkpoint, and forget all but the newest `keep` checkpoints (0: forget
        none). The ranks remove the older checkpoints from disk when the new one is reported, so the
        job cannot go back to the older ones any more.
        """
        known = {**self.known, step: directory}
        self.known = {each: known[each] for each in sorted(known)[-keep:]}
        self.newest = max(self.newest, step)
        self.found(step)

    def drop_later(self, step: int) -> None:
        """
        Forget the checkpoints of steps after `step`, because the ranks return to `step` and compute
        the later steps again.
        """
        self.known = {each: directory for each, directory in self.known.items() if each <= step}
        self.newest = min(self.newest, step)

    def unfinished(self, step: int, *, every: int) -> list[int]:
        """
        Return the steps before `step` whose periodic checkpoint is incomplete although no rank has
        reported a failure. This happens because a rank that ends before it has written its part
        cannot report the failure. `every` is the number of steps between two periodic checkpoints;
        0 means that there are none. Call this when no rank will write a part of these checkpoints
        any more.
        """
        if not every:
            return []
        reported = {each for steps in self.missed.values() for each in steps}
        first = self.newest - self.newest % every + every
        return [each for each in range(first, step, every) if each not in reported]

    def found(self, step: int) -> None:
        """
        Stop counting the checkpoint of `step` as one that was left unfinished without a reported
        reason. Either the checkpoint is complete after all, or a rank has reported why the
        checkpoint failed.
        """
        unfinished = (None, UNFINISHED)
        if step in self.missed.get(unfinished, ()):
            self.missed[unfinished].remove(step)
            if not self.missed[unfinished]:
                del self.missed[unfinished]
