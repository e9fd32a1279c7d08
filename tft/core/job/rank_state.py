"""
Define the facts that the controller knows about each rank.
"""

from dataclasses import dataclass, field

from tft.core.job.holdings import Holdings
from tft.core.job.rank_process import STARTING, ProcessStage, RankProcess
from tft.core.plan.standing import Standing
from tft.protocol.messages import Joined, Position, Verdict

START = Position(step=0, window=False)
NOWHERE = -1
"""The value of `LocalState.page` after the page (the shared memory) of the rank was lost."""


@dataclass(slots=True, kw_only=True)
class Declared:
    """
    The facts that the process of a rank has declared about itself in the calls of `tft.init` and
    `Session.run`.
    """

    address: str = ""
    """The address from which other ranks can fetch the shards of this rank."""
    strategies: frozenset[str] = frozenset()
    """The recovery strategies that the adaptor of the rank supports."""
    derives: bool = False
    """True if the adaptor can make the rank-local state (generators, data position) of this rank
    from a step number alone."""
    shards: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By shard that this rank holds: all ranks that hold this shard."""
    column: tuple[int, ...] = ()
    """The ranks of the model replica that the rank belongs to."""
    reloads: bool = False
    """True if the rank writes checkpoints without tft, and can find the newest of these checkpoints
    itself."""
    after: float = 0.0
    """The rank may call functions after a step, such as an evaluation. This is the number of
    seconds that these functions may take. 0: the rank has no such functions."""
    inexact: tuple[str, ...] = ()
    """Sentences about things that the loop of the rank does outside the update and that tft cannot
    undo or repeat exactly after an incident."""


@dataclass(slots=True, kw_only=True)
class LocalState:
    """
    Where the rank-local state (generators, data position) of a rank can be found.
    """

    page: int | None = None
    """The node with the page (memory that the rank and its agent share) to which the rank-local
    state is written in each step. None: nothing was written yet. `NOWHERE`: the page is lost."""
    since: int = 0
    """The first step whose rank-local state can be on the page that the rank uses now. Before that
    step the rank used another page."""
    reported: dict[int, str] = field(default_factory=dict)
    """By step: the rank-local state (hexadecimal) that was reported to the controller, for example
    by the agent after it had found that the process has ended."""
    early: frozenset[int] = frozenset()
    """The steps in `reported` whose state may be out of date. The state was captured before the end
    of the step, and this rank was seen to change its rank-local state late in a step."""
    until: int | None = None
    """The step after which the job continued without the rank. Rank-local state that the rank has
    captured in later steps must not be used. None: the rank takes part in training."""

    def counts(self, step: int) -> bool:
        """
        Return True if the rank was part of the job at the end of `step`, so that the job can use
        the rank-local state that the rank captured then.
        """
        return self.until is None or step <= self.until

    def leave_behind(self, step: int) -> None:
        """
        Record that the job continues from the end of `step` without this rank. Rank-local state
        that the rank has captured in later steps must not be used.
        """
        self.until = step if self.until is None else min(step, self.until)


@dataclass(slots=True, kw_only=True)
class SaveFailures:
    """
    What a rank could not do for the last checkpoint of the job, and why. An empty text means that
    there was no failure.
    """

    write: str = ""
    """Why the rank could not write its part of the checkpoint."""
    restore: str = ""
    """Why the rank could not go back to the earlier copy of its state that it was to save. The rank
    may still write its rank-local state."""
    commit: str = ""
    """Why the rank could not commit (complete) the checkpoint. The rank may still write its own
    part of the checkpoint."""


@dataclass(slots=True, kw_only=True)
class CheckResult:
    """
    The result of the last check of links and devices on a rank.
    """

    verdict: Verdict = "pass"
    finding: str = ""
    """A sentence that says what the check has found on this rank. Empty: nothing was found."""


@dataclass(slots=True, kw_only=True)
class RankState:
    """
    What the controller knows about a rank: its node, its process, and the training state in the
    memory of that process. If a successor (a second process) is started to take a rank over, the
    successor has a `RankState` of its own.
    """

    rank: int
    node: int | None = None
    excluded_nodes: dict[int, int] = field(default_factory=dict)
    """By incarnation of a process that could not be ended and may still run: the node of the
    process. No other process of this rank is started on that node."""
    process: RankProcess = field(default_factory=RankProcess)
    declared: Declared = field(default_factory=Declared)
    holdings: Holdings = field(default_factory=Holdings)
    local_state: LocalState = field(default_factory=LocalState)
    failures: SaveFailures = field(default_factory=SaveFailures)
    check: CheckResult = field(default_factory=CheckResult)
    position: Position = START
    training: bool = False
    """True while the rank is in its training loop."""
    finished: bool = False
    """True if the training function of the rank (the argument of `Session.run`) has returned."""
    repaired: bool = False
    """True if the present process of the rank has entered the training loop. Until then the
    position of the process says nothing about the progress of the rank."""
    left: int | None = None
    """The last step of the last earlier process of the rank that had entered the training loop;
    None if there was no such process."""

    @property
    def incarnation(self) -> int:
        """
        The incarnation of the process of this rank, or -1 if no process was ordered yet.
        """
        return self.process.incarnation

    @property
    def ready(self) -> bool:
        """
        True if the rank has a process that can carry out orders.
        """
        return self.process.ready

    @property
    def able(self) -> bool:
        """
        True if the rank can write a part of the last checkpoint of the job.
        """
        return self.ready and not self.process.terminating and not self.failures.write

    def standing(self, unplaceable: str = "") -> Standing:
        """
        Return what the planner of recovery strategies must know about the rank. `unplaceable` says
        why no other process can be started for the rank, or is empty if one can be started.
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
        Reset the facts about the process of the rank, because a new process with this incarnation
        is ordered at the time `at`. Keep what belongs to the rank and not to its process: its node,
        its shards, and where its rank-local state can be found.
        """
        self.process = RankProcess(
            incarnation=incarnation, stage=ProcessStage.ORDERED, spawned=at, began=at
        )
        self.declared.inexact = ()
        self.holdings = Holdings()
        self.failures = SaveFailures()
        if self.repaired:
            self.left = self.position.step
        self.training = self.finished = self.repaired = False
        self.position = START

    def join(self, message: Joined, sender: str) -> None:
        """
        Record that the process of the rank has called `tft.init`, and what the process has declared
        in the message. `sender` is the name on the bus from which later reports of the process
        come.
        """
        self.process.join(message, sender)
        self.declared.address = message.address
        self.declared.strategies = frozenset(message.strategies)
        self.declared.derives = message.derives
