"""
Define what the controller knows about which ranks take part in a job, about the processes of
the ranks, and about successors: processes that will replace processes that still train.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tft.core.job.rank_process import ProcessStage
from tft.core.job.rank_state import RankState
from tft.core.plan.topology import Topology
from tft.protocol.messages import Refused

Claim = tuple[int, int]
"""The rank and the incarnation of a process. Together these two numbers identify the process."""


@dataclass(slots=True, kw_only=True)
class Ranks:
    """
    All ranks of the job, and which of these ranks are members. Members take part in training.
    """

    states: dict[int, RankState]
    """By rank: what is known about the rank and the process that holds it."""
    members: frozenset[int]
    """The ranks that take part in training. After the strategy `scale_in`, some ranks of the job
    are no members."""
    _topology: Topology | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, world: int) -> "Ranks":
        """
        Return the ranks at the start of a job of `world` ranks. No rank has a process yet, and all
        ranks are members.
        """
        states = {rank: RankState(rank=rank) for rank in range(world)}
        return cls(states=states, members=frozenset(states))

    @property
    def whole(self) -> bool:
        """
        True if all ranks of the job take part in training.
        """
        return len(self.members) == len(self.states)

    def member_states(self) -> list[RankState]:
        """
        Return what is known about each rank that is a member (takes part in training).
        """
        return [rank_state for rank, rank_state in self.states.items() if rank in self.members]

    def every(self, holds: Callable[[RankState], bool]) -> bool:
        """
        Return True if the function `holds` returns True for every rank that takes part in training.
        """
        return all(holds(self.states[rank]) for rank in self.members)

    def holds_rank(self, rank_state: RankState) -> bool:
        """
        Return True if `rank_state` is about the process that holds the rank now. Return False if
        `rank_state` is about a successor or about an earlier process of the rank.
        """
        return self.states.get(rank_state.rank) is rank_state

    def is_current(self, rank: int, incarnation: int) -> bool:
        """
        Return True if the rank takes part in training and the process with this incarnation holds
        the rank.
        """
        return rank in self.members and self.states[rank].incarnation == incarnation

    def placeless(self) -> list[int]:
        """
        Return the ranks that take part in training and for which no process was ordered yet. These
        ranks wait for a node that has a place for them.
        """
        return [s.rank for s in self.member_states() if s.process.stage is ProcessStage.ABSENT]

    def present(self) -> list[RankState]:
        """
        Return the states of all ranks whose process has called `tft.init` and has not ended. Ranks
        that do not take part in training are included. Successors (second processes that will take
        a rank over) are not included.
        """
        there = (ProcessStage.JOINED, ProcessStage.READY)
        return [
            rank_state for rank_state in self.states.values() if rank_state.process.stage in there
        ]

    def shared(self) -> dict[str, tuple[int, ...]]:
        """
        Return each shard that several members (ranks that take part in training) hold, with these
        members.
        """
        held = {
            shard: tuple(rank for rank in ranks if rank in self.members)
            for shard, ranks in self.topology().groups.items()
        }
        return {shard: ranks for shard, ranks in held.items() if len(ranks) > 1}

    def only_on(self, ranks: Iterable[int]) -> list[str]:
        """
        Return the shards that would be lost if the processes of `ranks` ended: no other rank that
        can carry out orders holds a trusted copy of them.
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
        Return which ranks hold each shard, which ranks belong to each model replica, and on which
        node each rank is, as the ranks have reported it.
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
        Drop the cached result of the method `topology`. Call this when a rank has reported its
        shards, has moved to another node, or has another process.
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
    """The ranks that an operator or a program has asked to move to other processes. All these ranks
    are moved at the same time."""
    why: str = ""
    """The reason that was given with the request to move the ranks in `switch`."""
    gathering: bool = False
    """True while all ranks train on to the same step boundary, to wait there until successors take
    over."""

    def warm(self) -> list[RankState]:
        """
        Return the successors that are ready to take over their ranks. The ranks in `switch` must
        move at the same time. So the successors of these ranks are returned only when all of them
        are ready.
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
    Which processes of a job are starting, running, or being ended.
    """

    joined: bool = False
    """True as soon as any rank has called `tft.init`, even if its process has ended since."""
    handed: dict[int, int] = field(default_factory=dict)
    """By rank: the highest incarnation number that a process of the rank has got. The process may
    hold the rank or be a successor."""
    starting: dict[Claim, RankState] = field(default_factory=dict)
    """The processes that are starting and cannot carry out orders yet. The first process is the one
    whose time limit for the start ends first."""
    running: set[Claim] = field(default_factory=set)
    """The processes that are known to run."""
    displaced: list[RankState] = field(default_factory=list)
    """The processes that hold a rank and are being ended: an agent was ordered to end the process,
    and has not reported the end yet."""
    retiring: list[RankState] = field(default_factory=list)
    """The processes whose ranks a successor has taken over. A process is in this list until it has
    ended."""
    refused: dict[str, tuple[Refused, float]] = field(default_factory=dict)
    """By name on the bus of a process whose claim to a rank was refused: the refusal, and the time
    of the refusal."""

    def terminating(self) -> list[RankState]:
        """
        Return the processes that held or hold a rank, are being ended, and have not ended yet.
        Until all of them have ended, it is not known which training state is left in the job.
        """
        return [*self.displaced, *self.retiring]

    def starts(self, rank_state: RankState, now: float) -> None:
        """
        Record that a process is starting. The limit `policy.join` for the start of the process is
        counted from the time `now`.
        """
        claim = (rank_state.rank, rank_state.incarnation)
        self.starting.pop(claim, None)
        rank_state.process.spawned = now
        self.starting[claim] = rank_state
