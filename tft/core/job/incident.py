"""
Own the facts of one incident: its faults, the strategies that were tried, and the time of each
phase.
"""

from dataclasses import dataclass, field

from tft.core.job.refusals import RefusedStep
from tft.core.plan.plan import Plan
from tft.core.plan.savers import SavePlan
from tft.protocol.messages import Advised, FaultKind, OrderName, Position, RankOrder, SavedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """
    One observed fault.
    """

    kind: FaultKind
    rank: int | None
    """None if no single rank could be named."""
    step: int
    """The step that was being computed. 0 until the ranks have reported their positions."""
    seen: float
    """The time of the first evidence, in seconds (CLOCK_MONOTONIC)."""
    evidence: str
    """The traceback, the stacks, or a sentence that says how the fault was noticed."""
    certain: bool = False
    """True if this fault is a cause even where other faults of its kind are only consequences of
    another fault."""
    refused: bool = False
    """True if the ranks have refused the update of the step, so no state was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """
    A time span of an incident, for one rank or for the whole job. Times are in seconds.
    """

    name: str
    rank: int | None
    start: float
    end: float


@dataclass(slots=True, kw_only=True)
class Task:
    """
    An order that several ranks must answer. It stays open until the last of them has answered.
    """

    orders: tuple[RankOrder, ...]
    waiting: set[int]
    issued: float
    limit: float
    """Seconds that the order may take."""
    deadline: float
    renewed: int = 0
    """How many times the order was given this limit again."""
    spared: bool = False
    """True if the ranks that owe the answer were given the time of a repair, because a shard would
    be lost with them."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """
    The step that the ranks had reached when the incident began, and the step from which they
    continue.
    """

    furthest: int = 0
    """The highest step that some rank had completed."""
    begun: int = 0
    """The highest step whose update some rank had begun. Such a rank may have finished the update
    while it left the loop."""
    reached: int = 0
    """The same as `begun`, but only from the positions that are known in this round."""
    step: int | None = None
    """The first step to be computed after the incident. None: not known yet, or never."""

    def saw(self, position: Position) -> None:
        """
        Record the position of a rank, alive or dead.
        """
        self.furthest = max(self.furthest, position.step)
        self.reached = max(self.reached, position.step + position.window)
        self.begun = max(self.begun, self.reached)

    @property
    def agreed(self) -> int:
        """
        The step to whose end all members are brought, to continue from it or to save it.
        """
        return (self.step or 1) - 1

    @property
    def steps_lost(self) -> int:
        """
        The number of completed steps that have to be computed again.
        """
        return 0 if self.step is None else max(0, self.furthest - (self.step - 1))


@dataclass(slots=True, kw_only=True)
class Spread:
    """
    How far an error may have spread: copies of steps later than the ceiling are not sound.
    """

    ceiling: int | None = None
    """The last step whose copies can be sound. None: no limit."""
    by: set[int] = field(default_factory=set)
    """Ranks whose last update may have spread wrong numbers, and which have not yet reported the
    step of that update."""
    tentative: bool = False
    """True if the ceiling is a guess after a fault that came back. The ceiling is dropped if with
    it nothing could be saved."""
    guessed: bool = False
    """True if a ceiling lower than the fault demanded was tried once."""

    def lower(self, ceiling: int) -> None:
        """
        Lower the ceiling: no copy of a step later than `ceiling` is sound.
        """
        known = ceiling if self.ceiling is None else self.ceiling
        self.ceiling, self.tentative = max(0, min(ceiling, known)), False

    def guess(self, ceiling: int) -> None:
        """
        Try a ceiling that is lower than the faults demand.
        """
        self.ceiling, self.tentative, self.guessed = ceiling, True, True

    def lift(self) -> None:
        """
        Drop the ceiling. Either it was a guess that leaves no sound copy, or all members were
        brought to a step that is not later. In the second case every later state of the members is
        computed after the error.
        """
        self.ceiling, self.tentative = None, False


@dataclass(slots=True, kw_only=True)
class Decision:
    """
    The strategy that is followed, the strategies that were not possible, and the advice of the
    recovery plugins.
    """

    forced: str = ""
    """Why only `dump` or `exit` is possible. Empty: every strategy may be."""
    plan: Plan | None = None
    """What is done about the incident. None: not decided yet."""
    base: str = "retry"
    """The built-in strategy that was followed last."""
    attempts: int = 0
    """How many attempts of the present strategy have failed. A new fault sets this to 0."""
    tried: list[tuple[str, str]] = field(default_factory=list)
    """The strategies that were passed over when the present one was chosen, and why."""
    failed: dict[str, str] = field(default_factory=dict)
    """The strategies that were followed and did not help, and why."""
    advice: Advised | None = None
    """The answer of the recovery plugins to the present offers."""
    awaited: bool = False
    """True if the recovery plugins have asked for time. They are consulted again when it is
    over."""
    waited: float = 0.0
    """Seconds that the job has waited for the recovery plugins so far."""

    @property
    def strategy(self) -> str:
        """
        The name of the strategy that is followed: the name in the advice if a recovery plugin has
        advised it. Empty: no strategy is chosen yet.
        """
        return "" if self.plan is None else self.plan.name

    def follow(self, plan: Plan) -> None:
        """
        Follow a plan from now on.
        """
        if plan.strategy != self.base:
            self.attempts = 0
        self.plan, self.base = plan, plan.strategy


@dataclass(slots=True, kw_only=True)
class Turnover:
    """
    The processes that the ranks had when the incident began, and the processes started for them
    since.
    """

    began_with: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By rank: pid and start time of its process when the incident began."""
    kept: dict[int, bool] = field(default_factory=dict)
    """By rank: whether it still has the process that it began the incident with. Filled in when the
    incident ends."""
    started: int = 0
    """How many processes were started for this incident."""
    respawns: dict[int, int] = field(default_factory=dict)
    """By rank: how many times it has lost its process and was given another."""
    joining: frozenset[int] = frozenset()
    """The ranks that come back to the job in this incident."""
    counted: set[int] = field(default_factory=set)
    """The ranks that this incident was held against already."""

    def given_another(self, rank: int) -> None:
        """
        Record that a rank has lost its process and gets another one.
        """
        self.respawns[rank] = self.respawns.get(rank, 0) + 1


@dataclass(slots=True, kw_only=True)
class Exactness:
    """
    The reservations of an incident: reasons why training may not continue bit for bit.
    """

    reservations: list[tuple[int, str]] = field(default_factory=list)
    """The step from whose end on a reservation holds, and its sentence."""
    tails: dict[str, int] = field(default_factory=dict)
    """Shards of which no holder came to the end of a step's tail: for each line at which the tail
    was cut off, the sentence and the step."""
    marks: dict[int, int] = field(default_factory=dict)
    """By rank: the last step after which all functions that are to be called were called, at
    least."""
    skip: int = 0
    """How many batches are left out after the rollback."""
    skip_at: int | None = None
    """The step after which these batches are left out. None: not known yet."""
    refused: list[RefusedStep] = field(default_factory=list)
    """The steps whose update the ranks have refused in this incident."""
    left_out: dict[int, int] = field(default_factory=dict)
    """By step: how many batches are left out before it because its update was refused."""

    def marked(self, rank: int, position: Position) -> None:
        """
        Update `marks` from the position of a rank, alive or dead. The lowest step counts. A
        position that a rank reports after it was brought to another step says nothing about its
        calls before that.
        """
        step = position.step - (position.tail or position.after)
        self.marks[rank] = min(step, self.marks.get(rank, step))

    @property
    def sentences(self) -> list[str]:
        """
        Return the sentences that say why training may not continue bit for bit as without the
        incident.
        """
        left_out = [
            f"batches left out on all ranks before step {step}, because its update was refused "
            f"twice: {batches}"
            for step, batches in self.left_out.items()
        ]
        return list(dict.fromkeys([*self.tails, *(why for _, why in self.reservations), *left_out]))

    def returns_to(self, step: int) -> None:
        """
        Record that all members continue from the end of `step`. Reservations about later steps are
        dropped, because these steps are computed again. Reservations about `step` from an earlier
        round are kept.
        """
        self.reservations = [(since, why) for since, why in self.reservations if since <= step]
        self.left_out = {each: n for each, n in self.left_out.items() if each <= step + 1}


@dataclass(slots=True, kw_only=True)
class LastCheckpoint:
    """
    The plan of the last checkpoint of a job that cannot continue.
    """

    plan: SavePlan | None = None
    """Who writes what. None: no last checkpoint was planned."""
    files: dict[str, SavedFile] = field(default_factory=dict)
    """By name: the files that were written so far."""
    incarnations: dict[int, int] = field(default_factory=dict)
    """By rank that writes or commits: the process that was asked to."""


@dataclass(slots=True, kw_only=True)
class Incident:
    """
    One incident, from its first fault until the job runs again or ends. Number 0 is the start of
    the job itself.
    """

    number: int
    opened: float
    closed: float | None = None
    round: int = 0
    """A new round gives up whatever was under way. Answers to orders of an earlier round do not
    count."""
    faults: list[Fault] = field(default_factory=list)
    suspicion: str = ""
    """Why the ranks are asked for their positions while no fault is known."""
    tasks: dict[OrderName, Task] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    store: tuple[str, int] | None = None
    """The address of the rendezvous store where the process groups are formed."""
    progress: Progress = field(default_factory=Progress)
    spread: Spread = field(default_factory=Spread)
    decision: Decision = field(default_factory=Decision)
    turnover: Turnover = field(default_factory=Turnover)
    exactness: Exactness = field(default_factory=Exactness)
    last_checkpoint: LastCheckpoint = field(default_factory=LastCheckpoint)

    def roots(self) -> list[Fault]:
        """
        Return the faults that are causes. If a process has ended, the broken connections that its
        peers report are its consequences, not causes.
        """
        causes = [fault for fault in self.faults if fault.kind != "network" or fault.certain]
        return causes or self.faults

    def numeric_step(self) -> int:
        """
        Return the last step with a numeric fault whose update was not refused. 0: there is none.
        """
        steps = (f.step for f in self.faults if f.kind == "numeric" and not f.refused)
        return max(steps, default=0)

    def faulty(self) -> set[int]:
        """
        Return the ranks that are named in the faults that are causes.
        """
        return {fault.rank for fault in self.roots() if fault.rank is not None}

    @property
    def is_open(self) -> bool:
        """
        True while the incident is being handled. The start of the job (number 0) does not count as
        an incident while it has no fault.
        """
        return self.number > 0 and self.closed is None
