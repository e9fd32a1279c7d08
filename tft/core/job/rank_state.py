"""
Own what the controller knows of each rank.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from tft.core.plan.planner import Standing
from tft.protocol.messages import Joined, Position, Verdict


class Process(StrEnum):
    """
    How far the process of a rank has come.
    """

    ABSENT = "absent"
    """No process was ordered yet."""
    ORDERED = "ordered"
    """The agent has the order to start a process."""
    SPAWNED = "spawned"
    """The process runs. It is not known whether it will ever call `tft.init`."""
    JOINED = "joined"
    """The process has called `tft.init`."""
    READY = "ready"
    """The process has adopted its state and takes orders."""
    GONE = "gone"
    """The process has ended."""


STARTING = frozenset({Process.ORDERED, Process.SPAWNED, Process.JOINED})
START = Position(step=0, window=False)
NOWHERE = -1
"""Stands in `page` instead of a node number: the page on that node is gone."""


@dataclass(slots=True, kw_only=True)
class RankState:
    """
    What the controller knows of a rank: its place, the process that holds it, and the state in the
    memory of that process.
    """

    rank: int
    node: int | None = None
    incarnation: int = -1
    """The incarnation of the process that was ordered last."""
    process: Process = Process.ABSENT
    pid: int = 0
    started: int = 0
    sender: str = ""
    """The sender whose reports count for this rank: the process whose claim to the rank was
    accepted."""
    address: str = ""
    strategies: frozenset[str] = frozenset()
    derives: bool = False
    """True if the adaptor can make the rank-local state of this rank from a step number alone."""
    shards: dict[str, tuple[int, ...]] = field(default_factory=dict)
    position: Position = START
    held: int | None = None
    backups: tuple[int, ...] = ()
    digests: dict[str, dict[str, str]] | None = field(default_factory=dict)
    """Digests of the state of step `held`, by shard and part. Empty: the rank has not read its
    state, or could not. None: the state comes from a checkpoint that all ranks have loaded."""
    after: float = 0.0
    """Seconds that the functions which the rank calls after a step may take."""
    line: str = ""
    """The line in the tail of step `held` at which the rank has left the loop."""
    inexact: tuple[str, ...] = ()
    """What the loop of the rank does in tails that an incident cannot undo or repeat exactly:
    sentences."""
    outrun: frozenset[str] = frozenset()
    """The shards of which the copy of this rank does not count. Other ranks have come further in
    the tail of step `held`, though none to its end: their copies count."""
    brought: bool = False
    """True if the copy was fetched from other ranks in this incident. It is then no evidence for
    the copies of those ranks."""
    disputed: bool = False
    """True if another rank holds another copy of step `held` and it is not known which copy is
    right."""
    column: tuple[int, ...] = ()
    reloads: bool = False
    """True if the rank keeps checkpoints itself and can find its newest one."""
    trusted: bool = True
    """True if no fault has touched the state that the rank has in use."""
    damaged: bool = False
    """True if a fault has touched the memory of the rank: the copies that it keeps are not trusted
    either."""
    doubted: int = -1
    """Kept copies of this step and of earlier steps may be from before the memory of the rank was
    repaired."""
    searching: bool = False
    """True while the rank loads a checkpoint, a known one or one that it finds itself. Its state
    and its position do not count for the job until all ranks have loaded the same checkpoint."""
    training: bool = False
    finished: bool = False
    unable: str = ""
    """Why the rank could not write its part of a checkpoint."""
    no_restore: str = ""
    """Why the rank could not restore the copy that it was to save. It can still write its
    rank-local state."""
    no_commit: str = ""
    """Why the rank could not commit a checkpoint. It can still write its own part."""
    repaired: bool = False
    """True if this process has been in the loop: its position is the position of the job."""
    terminating: str = ""
    """Why the agent was ordered to end the process. Empty: it was not."""
    terminating_since: float = 0.0
    excluded_nodes: dict[int, int] = field(default_factory=dict)
    """By incarnation: the node on which this process of the rank could not be ended, and may still
    run."""
    blame: str = ""
    """The kind of fault that the end of the process is reported as. Empty: `process`."""
    spawned: float = 0.0
    """The time at which the process was ordered or first heard of, by the clock of the
    controller."""
    began: float = 0.0
    """The time at which the process was started, by the clock of its node."""
    straggles: str = ""
    """Why another process is to take over from this one."""
    invited: bool = False
    """True if the process was ready to take over or to come back, and the job has already stopped
    once for that."""
    verdict: Verdict = "pass"
    """The verdict of the last check on this rank."""
    finding: str = ""
    page: int | None = None
    """The node whose page keeps the rank-local state that the process captures. None: the process
    has captured nothing yet."""
    since: int = 0
    """The first step whose captured state this page can hold. Before that step the rank used
    another page."""
    private: dict[int, str] = field(default_factory=dict)
    """By step: the rank-local state that a lost process had captured last."""

    @property
    def ready(self) -> bool:
        """
        True if the rank takes orders.
        """
        return self.process is Process.READY

    @property
    def able(self) -> bool:
        """
        True if the rank can take part in a last checkpoint.
        """
        return self.ready and not self.terminating and not self.unable

    @property
    def kept(self) -> tuple[int, ...]:
        """
        The earlier steps of which the rank keeps a copy that is not known to be wrong.
        """
        if self.damaged or self.searching:
            return ()
        return tuple(s for s in self.backups if s > self.doubted)

    def standing(self, unplaceable: str) -> Standing:
        """
        Return the state of the rank as the planner sees it. `unplaceable` says why no other process
        can be started for the rank; empty: one can.
        """
        return Standing(
            rank=self.rank,
            address=self.address,
            alive=self.ready and not self.terminating,
            coming=self.process in STARTING and not self.terminating,
            held=self.held,
            sound=self.trusted and not (self.searching or self.disputed),
            outrun=self.outrun,
            tail=self.position.tail,
            backups=self.kept,
            unplaceable=unplaceable,
            strategies=self.strategies,
        )

    def holds_another(self, *, brought: bool = False) -> None:
        """
        Forget what comparisons found about the earlier copies: the rank has other copies now.
        `brought`: the rank has fetched them from other ranks.
        """
        self.outrun = frozenset()
        self.disputed, self.brought = False, brought

    def order(self, incarnation: int, at: float) -> None:
        """
        Reset the state for a new process, which was ordered at time `at`.
        """
        self.incarnation = incarnation
        self.process = Process.ORDERED
        self.pid = self.started = 0
        self.sender = ""
        self.held, self.backups = None, ()
        self.digests, self.line = {}, ""
        self.holds_another()
        self.inexact = ()
        self.trusted, self.damaged, self.doubted = True, False, -1
        self.training = self.finished = self.repaired = self.searching = False
        self.terminating = self.blame = self.unable = self.no_restore = self.no_commit = ""
        self.invited = False
        self.position = START
        self.spawned = self.began = at

    def join(self, message: Joined, sender: str) -> None:
        """
        Note that the ordered process has called `tft.init`.
        """
        self.process = Process.JOINED
        self.pid, self.started, self.sender = message.pid, message.started, sender
        self.address = message.address
        self.strategies = frozenset(message.strategies)
        self.derives = message.derives
