"""
Own the facts that the controller knows of each rank.
"""

from dataclasses import dataclass, field

from tft.core.job.holdings import Holdings
from tft.core.job.rank_process import STARTING, ProcessStage, RankProcess
from tft.core.plan.standing import Standing
from tft.protocol.messages import Joined, Position, Verdict

START = Position(step=0, window=False)
NOWHERE = -1
"""The value of `LocalState.page` after the page of the rank has been lost."""


@dataclass(slots=True, kw_only=True)
class Declared:
    """
    What the process of a rank has declared when it joined and when it became ready.
    """

    address: str = ""
    """The address from which the shards of the rank can be fetched."""
    strategies: frozenset[str] = frozenset()
    """The strategies that the adaptor of the rank supports."""
    derives: bool = False
    """True if the adaptor can make the rank-local state of this rank from a step number alone."""
    shards: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """For each shard of the rank: all ranks that train with this shard."""
    column: tuple[int, ...] = ()
    """The ranks of the model replica that the rank belongs to."""
    reloads: bool = False
    """True if the rank writes checkpoints without tft, and can find the newest one."""
    after: float = 0.0
    """The seconds that the functions which the rank calls after a step may take."""
    inexact: tuple[str, ...] = ()
    """Sentences about what the loop of the rank does in tails that an incident cannot undo or
    repeat exactly."""


@dataclass(slots=True, kw_only=True)
class LocalState:
    """
    Where the rank-local state (generators, data position) of a rank can be found.
    """

    page: int | None = None
    """The node whose page keeps the rank-local state that the process captures. None: the process
    has captured nothing yet."""
    since: int = 0
    """The first step whose captured state this page can hold. Before that step the rank used
    another page."""
    reported: dict[int, str] = field(default_factory=dict)
    """By step: the rank-local state that the rank captured, as its agent reported it after the
    process was lost."""
    early: frozenset[int] = frozenset()
    """The steps in `reported` whose state was captured before they had ended, although the captures
    of this rank change until then."""
    until: int | None = None
    """The step after which the job continued without the rank. What the rank captured for later
    steps was given up. None: the rank takes part."""

    def counts(self, step: int) -> bool:
        """
        Return True if the job can use the rank-local state that the rank captured at the end of
        `step`.
        """
        return self.until is None or step <= self.until

    def leave_behind(self, step: int) -> None:
        """
        Record that the job continues from the end of `step` without the rank.
        """
        self.until = step if self.until is None else min(step, self.until)


@dataclass(slots=True, kw_only=True)
class SaveFailures:
    """
    The parts of the last checkpoint that a rank could not write, with the reasons. An empty reason
    means no failure.
    """

    write: str = ""
    """Why the rank could not write its part."""
    restore: str = ""
    """Why the rank could not restore the copy that it was to save. It may still write its
    rank-local state."""
    commit: str = ""
    """Why the rank could not commit the checkpoint. It may still write its own part."""


@dataclass(slots=True, kw_only=True)
class CheckResult:
    """
    The result of the last check on a rank.
    """

    verdict: Verdict = "pass"
    finding: str = ""
    """The sentence that the check returned. Empty: there is none."""


@dataclass(slots=True, kw_only=True)
class RankState:
    """
    What the controller knows of a rank: its place, its process, and the state in the memory of that
    process.
    """

    rank: int
    node: int | None = None
    excluded_nodes: dict[int, int] = field(default_factory=dict)
    """Nodes on which no process of this rank is started, by incarnation: a process of the rank
    could not be ended there, and may still run."""
    process: RankProcess = field(default_factory=RankProcess)
    declared: Declared = field(default_factory=Declared)
    holdings: Holdings = field(default_factory=Holdings)
    local_state: LocalState = field(default_factory=LocalState)
    failures: SaveFailures = field(default_factory=SaveFailures)
    check: CheckResult = field(default_factory=CheckResult)
    position: Position = START
    training: bool = False
    """True while the rank is in the loop."""
    finished: bool = False
    """True if the `train` of the rank has returned."""
    repaired: bool = False
    """True if the present process has been in the loop, so that its position is a position of the
    job."""

    @property
    def incarnation(self) -> int:
        """
        The incarnation of the process that was ordered last, or -1 if none was.
        """
        return self.process.incarnation

    @property
    def ready(self) -> bool:
        """
        True if the rank can receive orders.
        """
        return self.process.ready

    @property
    def able(self) -> bool:
        """
        True if the rank can write a part of a last checkpoint.
        """
        return self.ready and not self.process.terminating and not self.failures.write

    def standing(self, unplaceable: str = "") -> Standing:
        """
        Return the state of the rank in the form that the planner uses. `unplaceable` says why no
        other process can be started for the rank; empty: one can be started.
        """
        return Standing(
            rank=self.rank,
            address=self.declared.address,
            alive=self.ready and not self.process.terminating,
            coming=self.process.stage in STARTING and not self.process.terminating,
            held=self.holdings.held,
            sound=self.holdings.sound,
            outrun=self.holdings.outrun,
            passed_over=self.holdings.passed_over,
            tail=self.position.tail,
            backups=self.holdings.kept,
            unplaceable=unplaceable,
            strategies=self.declared.strategies,
        )

    def order(self, incarnation: int, at: float) -> None:
        """
        Reset the state for a new process, which was ordered at time `at`. What belongs to the rank
        itself is kept: its place, its shards, and where its rank-local state is.
        """
        self.process = RankProcess(
            incarnation=incarnation, stage=ProcessStage.ORDERED, spawned=at, began=at
        )
        self.declared.inexact = ()
        self.holdings = Holdings()
        self.failures = SaveFailures()
        self.training = self.finished = self.repaired = False
        self.position = START

    def join(self, message: Joined, sender: str) -> None:
        """
        Record that the ordered process has called `tft.init`.
        """
        self.process.join(message, sender)
        self.declared.address = message.address
        self.declared.strategies = frozenset(message.strategies)
        self.declared.derives = message.derives
