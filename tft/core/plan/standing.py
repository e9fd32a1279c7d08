"""
Define the input of the planner, which chooses how an incident is handled: what every rank has
reported about itself (`Standing`), and the conditions of the incident (`Terms`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """
    A rank as the planner sees it: the condition of its process, and the copies of the training
    state that it has reported.
    """

    rank: int
    address: str = ""
    """The address from which the shards of the rank can be fetched."""
    alive: bool = True
    """True if the rank can receive orders. For the planner, a rank that cannot receive orders holds
    no state."""
    coming: bool = False
    """True if the rank cannot receive orders yet, because its process is starting."""
    held: int | None = None
    """The step of the complete state with which the rank trains. None: the rank is in the middle of
    an update, or new, and has no complete state."""
    sound: bool = True
    """True if no fault has touched the state with which the rank trains."""
    outrun: frozenset[str] = frozenset()
    """The shards of which other ranks have a more complete copy, because those ranks came further
    in the tail of step `held`. The copies of these shards with which this rank trains do not
    count."""
    passed_over: Mapping[str, int] = field(default_factory=dict)
    """By shard: the last step whose copy on this rank may be used. The copies that this rank has of
    later steps differ from the copies of another rank, which are used instead."""
    tail: bool = False
    """True if the rank left its loop in the tail of step `held`, so a part of the code after the
    update may not have run for this step."""
    backups: tuple[int, ...] = ()
    """The earlier steps of which the rank keeps a sound copy in memory."""
    unplaceable: str = ""
    """A sentence that says why no new process can be started for the rank. Empty: a process can be
    started."""
    strategies: frozenset[str] = frozenset()
    """The strategies (`retry`, `recover`, …) that the adaptor of the rank supports."""

    def copies(self, ceiling: int | None) -> frozenset[int]:
        """
        Return the steps of which this rank can provide the complete state. Steps later than
        `ceiling` are left out; None means that there is no limit.
        """
        if not self.alive:
            return NOTHING
        steps = self.backups
        if self.held is not None and self.sound:
            steps = (*steps, self.held)
        if ceiling is None:
            return frozenset(steps)
        return frozenset([step for step in steps if step <= ceiling])

    def has(self, shard: str, step: int, ceiling: int | None) -> bool:
        """
        Return True if the rank can provide this shard as it was at the end of `step`.
        """
        outrun = shard in self.outrun and step not in self.backups
        passed_over = step > self.passed_over.get(shard, step)
        return not outrun and not passed_over and step in self.copies(ceiling)

    def uses(self, step: int, ceiling: int | None) -> bool:
        """
        Return True if the rank trains with the state of `step` and that state is sound. An earlier
        copy that the rank only keeps in memory does not count here.
        """
        sound = self.alive and self.sound and (ceiling is None or step <= ceiling)
        return sound and self.held == step


Standings = Mapping[int, Standing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """
    The conditions of an incident that the plan for this incident must respect.
    """

    enabled: frozenset[str]
    ceiling: int | None = None
    """The last step whose state can be sound. None: there is no such limit."""
    checkpoints: Mapping[int, str] = field(default_factory=dict)
    """By step: the directory of a checkpoint of all ranks. While no step was trained, the only
    entry is step 0 with an empty name: each rank can start from its own initial state."""
    trained: bool = True
    """True if some step may have been trained, so that there is something to save."""
    faulty: frozenset[int] = frozenset()
    """The ranks that are at fault according to the faults of the incident."""
    replaced: frozenset[int] = frozenset()
    """The ranks that have lost their process in this incident. A rank stays in this set when it
    gets another process."""
    flapping: Mapping[int, str] = field(default_factory=dict)
    """For each rank that has caused too many incidents lately: a sentence that says this."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """By strategy that was followed and did not help, or that a plugin has excluded: the reason why
    the strategy is not possible any more."""
    forced: str = ""
    """Why the job must end, so that only the strategies `dump` (save and end) and `exit` (end) are
    possible. Empty: every strategy may be chosen."""
    without_local_state: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """By rank that has lost its rank-local state of some steps, for example with its node: the
    steps whose rank-local state is still known."""
    excluded: frozenset[int] = frozenset()
    """The ranks that are ready to come back to the job, but whose adaptor cannot compute their
    rank-local state for the step at which the other ranks are."""
    strangers: frozenset[int] = frozenset()
    """The ranks that have never reported which shards they hold."""
    successors: frozenset[int] = frozenset()
    """The ranks for which a successor (a second process) is ready to take over."""
    returning: frozenset[int] = frozenset()
    """The ranks that have left the job and are ready to come back to it."""
    reloads: bool = False
    """True if all ranks of the world take part in the job, and each of them writes checkpoints
    without tft and can find the newest checkpoint itself."""
