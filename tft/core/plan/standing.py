"""
Define the input of the planner: the standing of every rank, and the terms of the incident.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """
    A rank as the planner sees it, with the copies that the rank has reported.
    """

    rank: int
    address: str = ""
    """The address from which the shards of the rank can be fetched."""
    alive: bool = True
    """True if the rank takes orders. A rank that takes no orders holds nothing."""
    coming: bool = False
    """True if the rank takes no orders yet because its process is starting."""
    held: int | None = None
    """The step whose whole state the rank has in use. None while the state is torn or new."""
    sound: bool = True
    """True if no fault has touched the state in use."""
    outrun: frozenset[str] = frozenset()
    """The shards of which the copy in use does not count: other ranks have come further in the tail
    of that step."""
    tail: bool = False
    """True if the rank has left the loop in the tail of step `held`: a part of that tail may not be
    done."""
    backups: tuple[int, ...] = ()
    """Earlier steps of which the rank keeps a sound copy."""
    unplaceable: str = ""
    """Why no other process can be started for the rank. Empty: one can."""
    strategies: frozenset[str] = frozenset()
    """The strategies that the adaptor of the rank can take part in."""

    def copies(self, ceiling: int | None) -> frozenset[int]:
        """
        Return the steps of which this rank can give its whole state, none later than `ceiling`.
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
        Return whether the rank can give this shard as it was at the end of `step`.
        """
        outrun = shard in self.outrun and step not in self.backups
        return not outrun and step in self.copies(ceiling)

    def uses(self, step: int, ceiling: int | None) -> bool:
        """
        Return whether the rank has the state of this step in use and that state is sound.
        """
        sound = self.alive and self.sound and (ceiling is None or step <= ceiling)
        return sound and self.held == step


Standings = Mapping[int, Standing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """
    The conditions that a plan must respect.
    """

    enabled: frozenset[str]
    ceiling: int | None = None
    """No copy of a later step is sound. None: no such limit."""
    checkpoints: Mapping[int, str] = field(default_factory=dict)
    """Step to directory: the checkpoints of all ranks. The directory is empty if nothing was
    trained yet: then the initial state of each rank is enough."""
    trained: bool = True
    """True if some step may have been trained, so that there is something to save."""
    faulty: frozenset[int] = frozenset()
    """The ranks that are the cause of the incident."""
    replaced: frozenset[int] = frozenset()
    """The ranks that have lost their process in this incident, including those that have another
    process now."""
    flapping: Mapping[int, str] = field(default_factory=dict)
    """Ranks that have failed too often, with the sentence that says so."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Strategies that were followed and did not help, or were ruled out, and why."""
    forced: str = ""
    """Why only `dump` or `exit` is possible. Empty: every strategy may be."""
    without_local_state: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Ranks whose rank-local state (RNG, data position) is lost with their node. For each of them:
    the steps of which that state is known nevertheless."""
    excluded: frozenset[int] = frozenset()
    """Of the ranks that are ready to come back, those that could not go on from the step of the
    other ranks."""
    strangers: frozenset[int] = frozenset()
    """Ranks that have never reported what they hold."""
    successors: frozenset[int] = frozenset()
    """The ranks for which another process is ready to take over."""
    returning: frozenset[int] = frozenset()
    """The non-members that are ready to come back."""
    reloads: bool = False
    """True if all ranks of the world take part and each can find the newest checkpoint that it
    keeps itself."""
