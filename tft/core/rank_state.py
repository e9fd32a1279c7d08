"""
The ranks as the controller knows them.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from tft.core.planner import Standing
from tft.protocol.messages import Joined, Position, Verdict


class Process(StrEnum):
    """
    How far the process of a rank has come.
    """

    ABSENT = "absent"
    """None was asked for yet."""
    ORDERED = "ordered"
    """The agent was told to start one."""
    SPAWNED = "spawned"
    """It runs; whether it will ever call `tft.init` is not known."""
    JOINED = "joined"
    """It has called `tft.init`."""
    READY = "ready"
    """It has adopted its state and takes orders."""
    GONE = "gone"
    """It has ended."""


STARTING = frozenset({Process.ORDERED, Process.SPAWNED, Process.JOINED})
START = Position(step=0, window=False)
NOWHERE = -1
"""In the place of a node: what was there is gone."""


@dataclass(slots=True, kw_only=True)
class RankState:
    """
    What the controller knows of a rank: where it is placed, which process holds it, what that has in memory.
    """

    rank: int
    node: int | None = None
    incarnation: int = -1
    """Of the process that was ordered last."""
    process: Process = Process.ABSENT
    pid: int = 0
    started: int = 0
    sender: str = ""
    """Who speaks for it: the process whose claim to the rank was accepted."""
    address: str = ""
    strategies: frozenset[str] = frozenset()
    derives: bool = False
    """Its adaptor can make its private state from a step alone."""
    shards: dict[str, tuple[int, ...]] = field(default_factory=dict)
    position: Position = START
    held: int | None = None
    backups: tuple[int, ...] = ()
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of the state of step `held`, by shard and part."""
    after: float = 0.0
    """Seconds that what it calls after a step may take."""
    line: str = ""
    """Where in the tail of step `held` it has left the loop."""
    inexact: tuple[str, ...] = ()
    """What its loop does in tails that an incident cannot undo or do again as it was."""
    outrun: frozenset[str] = frozenset()
    """The shards of which others have come further in the tail of step `held`, and none to its end: their copies count."""
    brought: bool = False
    """It was fetched from others in this incident: its copy says nothing of theirs."""
    disputed: bool = False
    """Another rank holds another copy of step `held`, and nobody can say which is right."""
    column: tuple[int, ...] = ()
    reloads: bool = False
    """It finds the newest checkpoint that it keeps itself."""
    trusted: bool = True
    """No fault has touched what it has in use."""
    damaged: bool = False
    """A fault has touched its memory: what it keeps besides is not trusted either."""
    doubted: int = -1
    """Copies it keeps of this step and earlier ones may be from before its memory was repaired."""
    searching: bool = False
    """It loads a checkpoint, one that is known or what it finds of its own: what it holds, and where it
    stands, is not the job's until all have loaded the same."""
    training: bool = False
    finished: bool = False
    unable: str = ""
    """Why it could not write its part of a checkpoint."""
    no_restore: str = ""
    """Why it could not take back the copy it was to save; what is its own it can write all the same."""
    no_commit: str = ""
    """Why it could not commit one; its own part it can write all the same."""
    repaired: bool = False
    """This process has been in the loop: its position is the job's."""
    terminating: str = ""
    """Why the agent was told to end it; empty while it was not."""
    terminating_since: float = 0.0
    excluded_nodes: frozenset[int] = frozenset()
    """Nodes on which a process of this rank could not be ended."""
    blame: str = ""
    """The kind of fault its end will be reported as; empty: `process`."""
    spawned: float = 0.0
    """When it was asked for, or heard of first: the controller's clock."""
    began: float = 0.0
    """When it was started: the clock of its node."""
    straggles: str = ""
    """Why it is to be taken over from."""
    invited: bool = False
    """It was ready to take over or to come back, and the job has stopped for that once."""
    verdict: Verdict = "pass"
    """What the last check said of it."""
    finding: str = ""
    page: int | None = None
    """The node where what it captures is kept; None: it has captured nothing yet."""
    since: int = 0
    """The first step of which its page can hold what it captured: before that it had another page."""
    private: dict[int, str] = field(default_factory=dict)
    """What a lost process had captured last, by step."""

    @property
    def ready(self) -> bool:
        """
        The rank takes orders.
        """
        return self.process is Process.READY

    @property
    def able(self) -> bool:
        """
        The rank can take part in a last checkpoint.
        """
        return self.ready and not self.terminating and not self.unable

    @property
    def kept(self) -> tuple[int, ...]:
        """
        The earlier steps of which it keeps a copy that nothing is known against.
        """
        if self.damaged or self.searching:
            return ()
        return tuple(s for s in self.backups if s > self.doubted)

    def standing(self, unplaceable: str) -> Standing:
        """
        The rank as the planner sees it; `unplaceable` says why no other process can be started.
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
        Forget what comparisons found about the copies before: the rank has other copies now. `brought`: it has fetched
        them from other ranks.
        """
        self.outrun = frozenset()
        self.disputed, self.brought = False, brought

    def order(self, incarnation: int, at: float) -> None:
        """
        A new process was asked for.
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
        The process that was asked for has called `tft.init`.
        """
        self.process = Process.JOINED
        self.pid, self.started, self.sender = message.pid, message.started, sender
        self.address = message.address
        self.strategies = frozenset(message.strategies)
        self.derives = message.derives
