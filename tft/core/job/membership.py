"""
Own the ranks that take part in a job, their processes, and the processes that will replace others.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tft.core.job.rank_process import ProcessStage
from tft.core.job.rank_state import RankState
from tft.core.plan.topology import Topology
from tft.protocol.messages import Refused

Claim = tuple[int, int]
"""The rank and the incarnation of a process, which together identify it."""


@dataclass(slots=True, kw_only=True)
class Ranks:
    """
    All ranks of the job, and which of them are members: the ranks that take part in training.
    """

    states: dict[int, RankState]
    """By rank: what is known about the rank and the process that holds it."""
    members: frozenset[int]
    """The ranks that take part in training. After the strategy `scale_in` they are fewer than the
    world."""
    _topology: Topology | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, world: int) -> "Ranks":
        """
        Return `world` ranks without processes. All of them are members.
        """
        states = {rank: RankState(rank=rank) for rank in range(world)}
        return cls(states=states, members=frozenset(states))

    @property
    def whole(self) -> bool:
        """
        True if all ranks of the world take part.
        """
        return len(self.members) == len(self.states)

    def member_states(self) -> list[RankState]:
        """
        Return the states of the ranks that are members.
        """
        return [rank_state for rank, rank_state in self.states.items() if rank in self.members]

    def every(self, holds: Callable[[RankState], bool]) -> bool:
        """
        Return True if `holds` is true for every member.
        """
        return all(holds(self.states[rank]) for rank in self.members)

    def holds_rank(self, rank_state: RankState) -> bool:
        """
        Return True if this is the state of the process that holds the rank, and not of a successor
        or an earlier process.
        """
        return self.states.get(rank_state.rank) is rank_state

    def is_current(self, rank: int, incarnation: int) -> bool:
        """
        Return True if the rank is a member and this process holds it.
        """
        return rank in self.members and self.states[rank].incarnation == incarnation

    def placeless(self) -> list[int]:
        """
        Return the members for which no process was ordered yet, because no node with a place for
        them has joined.
        """
        return [s.rank for s in self.member_states() if s.process.stage is ProcessStage.ABSENT]

    def present(self) -> list[RankState]:
        """
        Return the states of all ranks whose process has called `tft.init` and has not ended. Ranks
        that are no members are included, successors are not.
        """
        there = (ProcessStage.JOINED, ProcessStage.READY)
        return [
            rank_state for rank_state in self.states.values() if rank_state.process.stage in there
        ]

    def shared(self) -> dict[str, tuple[int, ...]]:
        """
        Return the shards that several members hold, each with these members.
        """
        held = {
            shard: tuple(rank for rank in ranks if rank in self.members)
            for shard, ranks in self.topology().groups.items()
        }
        return {shard: ranks for shard, ranks in held.items() if len(ranks) > 1}

    def only_on(self, ranks: Iterable[int]) -> list[str]:
        """
        Return the shards that would be lost with `ranks`: no other rank that can carry out orders
        holds a sound copy of them.
        """
        going = set(ranks)
        staying = {
            rank
            for rank, rank_state in self.states.items()
            if rank_state.ready
            and rank_state.holdings.trusted
            and not rank_state.process.terminating
            and rank not in going
        }
        return [s for s, held in self.topology().groups.items() if staying.isdisjoint(held)]

    def topology(self) -> Topology:
        """
        Return the shard groups, the model replicas and the nodes, as the ranks have reported them.
        """
        if self._topology is None:
            states = self.states.values()
            self._topology = Topology(
                groups={
                    shard: ranks
                    for rank_state in states
                    for shard, ranks in rank_state.declared.shards.items()
                },
                columns={rank_state.rank: rank_state.declared.column for rank_state in states},
                nodes={
                    rank_state.rank: rank_state.node
                    for rank_state in states
                    if rank_state.node is not None
                },
            )
        return self._topology

    def placed(self) -> None:
        """
        Drop the cached topology. Call this when a rank has reported its shards, has moved to
        another node, or has another process.
        """
        self._topology = None


@dataclass(slots=True, kw_only=True)
class Succession:
    """
    The successors: processes that are started to replace processes that still train.
    """

    successors: dict[int, RankState] = field(default_factory=dict)
    """By rank: the process that prepares to take over the rank from a process that still trains."""
    switch: frozenset[int] = frozenset()
    """The ranks that an operator or a program has requested to move to other processes. All of them
    are moved at the same time."""
    why: str = ""
    """The reason that was given with the request for `switch`."""
    gathering: bool = False
    """True while all members train on to one step boundary, at which successors will take over."""

    def warm(self) -> list[RankState]:
        """
        Return the successors that are ready to take over their ranks. The successors of the ranks
        in `switch` are returned all together, or none of them.
        """
        ready = {
            rank: successor
            for rank, successor in self.successors.items()
            if successor.ready and not successor.process.terminating
        }
        partly = frozenset() if self.switch <= ready.keys() else self.switch
        return [successor for rank, successor in ready.items() if rank not in partly]


@dataclass(slots=True, kw_only=True)
class Processes:
    """
    The processes of a job that start, run or end.
    """

    joined: bool = False
    """True once some rank has called `tft.init`, even if its process has ended since."""
    handed: dict[int, int] = field(default_factory=dict)
    """By rank: the incarnation number that was given out last, to any process of the rank."""
    starting: dict[Claim, RankState] = field(default_factory=dict)
    """The processes that are starting and cannot carry out orders yet, in the order in which their
    time limits end."""
    running: set[Claim] = field(default_factory=set)
    """The processes that are known to run."""
    displaced: list[RankState] = field(default_factory=list)
    """The processes that hold a rank and are being ended: the agent has the order, and their end is
    not reported yet."""
    retiring: list[RankState] = field(default_factory=list)
    """The processes whose ranks a successor has taken over. They are listed until they have ended.
    """
    refused: dict[str, tuple[Refused, float]] = field(default_factory=dict)
    """By sender on the bus: the refusal of its claim to a rank, and the time of the refusal."""

    def terminating(self) -> list[RankState]:
        """
        Return the processes that were ordered to end and have not ended yet. Until they have, it is
        not known which training state is left.
        """
        return [*self.displaced, *self.retiring]

    def starts(self, rank_state: RankState, now: float) -> None:
        """
        Record that a process is starting. Its limit for the start (`policy.join`) begins at `now`.
        """
        claim = (rank_state.rank, rank_state.incarnation)
        self.starting.pop(claim, None)
        rank_state.process.spawned = now
        self.starting[claim] = rank_state
