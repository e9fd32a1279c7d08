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
    """The rank at fault. None: no single rank could be named."""
    step: int
    """The step that was being computed when the fault occurred. 0: not known until the ranks have
    reported their positions."""
    seen: float
    """The time of the first evidence, in seconds (CLOCK_MONOTONIC)."""
    evidence: str
    """The traceback, the stacks of all threads, or a sentence that says how the fault was noticed.
    """
    certain: bool = False
    """True if this fault is certainly a cause. Other `network` faults may be mere consequences of
    another fault."""
    refused: bool = False
    """True if the ranks have refused the update of the step, so no state was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """
    A named time span of an incident, of one rank or of the whole job. Times are in seconds.
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
    """How many times the limit of the order was restarted."""
    spared: bool = False
    """True if the late ranks were given more time (the limit of a repair), because a shard would be
    lost with them."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """
    The step that the ranks had reached when the incident began, and the step from which they
    continue.
    """

    furthest: int = 0
    """The highest step that some rank had completed."""
    begun: int = 0
    """The highest step whose update some rank had begun. The rank may have completed this update
    while it left the loop."""
    reached: int = 0
    """The same as `begun`, but only from positions that were reported in this round."""
    step: int | None = None
    """The first step to be computed after the incident. None: not known yet, or never."""

    def saw(self, position: Position) -> None:
        """
        Record the position of a rank, whether its process is alive or dead.
        """
        self.furthest = max(self.furthest, position.step)
        self.reached = max(self.reached, position.step + position.window)
        self.begun = max(self.begun, self.reached)

    @property
    def agreed(self) -> int:
        """
        The step from whose end all members continue, or whose state they save.
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
    How far an error may have spread: copies of steps later than `ceiling` are not sound.
    """

    ceiling: int | None = None
    """The last step whose copies can be sound. None: no limit."""
    by: set[int] = field(default_factory=set)
    """The ranks whose last update may have spread wrong numbers, and whose step of that update is
    not known yet."""
    firm: int | None = None
    """The ceiling that the faults demand. None: they demand none. `ceiling` may be lower."""
    guessed: bool = False
    """True if the incident has already tried once a ceiling lower than its faults demand."""
    equals: set[tuple[str, int]] = field(default_factory=set)
    """For each time that copies of a shard were found to differ while the ranks trained: the shard
    and the last step at which these copies were equal. The name is empty where the shard is not
    known."""
    undecided: bool = False
    """True if no majority says which of these copies are right."""
    suspects: set[int] = field(default_factory=set)
    """The ranks whose copies were wrong at a periodic checkpoint."""

    @property
    def tentative(self) -> bool:
        """
        True if the ceiling is lower than the faults demand. The difference is dropped if with it
        nothing could be saved.
        """
        return self.ceiling != self.firm

    def lower(self, ceiling: int) -> None:
        """
        Lower the ceiling, if it is not lower already: no copy of a step later than `ceiling` is
        sound.
        """
        self.firm = max(0, ceiling if self.firm is None else min(ceiling, self.firm))
        self.prefer(self.firm)

    def prefer(self, ceiling: int) -> None:
        """
        Use only copies of steps up to `ceiling`, as long as there are any.
        """
        self.ceiling = ceiling if self.ceiling is None else min(ceiling, self.ceiling)

    def guess(self, ceiling: int) -> None:
        """
        Set a ceiling that is lower than the faults demand, to try whether an earlier state helps.
        """
        self.prefer(ceiling)
        self.guessed = True

    def yield_to_need(self) -> None:
        """
        Allow later copies, because else nothing could be saved: first those from before the copies
        differed, then all that the faults allow.
        """
        later = [
            step
            for _, step in self.equals
            if self.ceiling is not None and self.ceiling < step
            if self.firm is None or step < self.firm
        ]
        self.ceiling = min(later, default=self.firm)

    def lift(self) -> None:
        """
        Remove the ceiling: all members have returned to a step that is not later than the ceiling,
        so the states that they compute from now on do not contain the error.
        """
        self.ceiling = self.firm = None
        self.equals, self.undecided, self.suspects = set(), False, set()


@dataclass(slots=True, kw_only=True)
class Decision:
    """
    The strategy that is followed, the strategies that were not possible, and the advice of the
    recovery plugins.
    """

    forced: str = ""
    """Why only the strategies `dump` and `exit` are possible. Empty: every strategy may be chosen.
    """
    plan: Plan | None = None
    """The plan that is carried out. None: no strategy is chosen yet."""
    base: str = "retry"
    """The built-in strategy that was followed last. A plugin may have advised it under another
    name."""
    attempts: int = 0
    """How many attempts of the present strategy have failed. A new fault sets this to 0."""
    tried: list[tuple[str, str]] = field(default_factory=list)
    """The strategies that were not possible when the present one was chosen, each with the reason.
    """
    failed: dict[str, str] = field(default_factory=dict)
    """The strategies that were followed and did not help, each with the reason."""
    advice: Advised | None = None
    """The answer of the recovery plugins to the offers of this round."""
    awaited: bool = False
    """True if the recovery plugins have asked for more time. They are asked again when that time is
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
    The processes that the ranks had when the incident began, and the processes that were started
    during it.
    """

    began_with: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By rank: pid and start time of its process when the incident began."""
    kept: dict[int, bool] = field(default_factory=dict)
    """By rank: True if it still has the process with which it began the incident. Filled in when
    the incident closes."""
    started: int = 0
    """How many processes were started for this incident."""
    respawns: dict[int, int] = field(default_factory=dict)
    """By rank: how many times it has lost its process and was given another."""
    joining: frozenset[int] = frozenset()
    """The ranks that come back to the job in this incident."""
    unprotected: list[str] = field(default_factory=list)
    """Sentences about rank-local state that was lost with a node, because no other node had it."""
    counted: set[int] = field(default_factory=set)
    """The ranks that this incident was already counted against."""

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
    """Each reservation is a sentence, with the first step after which training may differ."""
    tails: dict[str, int] = field(default_factory=dict)
    """Interrupted tails, for shards of which no holder has run the tail of a step to its end. For
    each line at which a tail was interrupted: a sentence, and the step."""
    marks: dict[int, int] = field(default_factory=dict)
    """By rank: the last step for which it is known that all functions to be called after the step
    were called."""
    skip: int = 0
    """The number of batches that are skipped after the rollback."""
    skip_at: int | None = None
    """The step after which these batches are skipped. None: not known yet."""
    refused: list[RefusedStep] = field(default_factory=list)
    """The steps whose update the ranks have refused in this incident."""
    left_out: dict[int, int] = field(default_factory=dict)
    """By step: how many batches are left out before it because its update was refused."""

    def marked(self, rank: int, position: Position) -> None:
        """
        Update `marks` from the position of a rank, alive or dead. The lowest step counts: a later
        report of a rank that was brought to another step does not show which functions it had
        called before.
        """
        step = position.step - (position.tail or position.after)
        self.marks[rank] = min(step, self.marks.get(rank, step))

    @property
    def sentences(self) -> list[str]:
        """
        Return the sentences that say why training may differ, bit for bit, from a run without the
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
    The plan of the checkpoint that the survivors write before a job ends.
    """

    plan: SavePlan | None = None
    """The plan of which rank writes which files. None: no last checkpoint is planned."""
    files: dict[str, SavedFile] = field(default_factory=dict)
    """By name: the files that were written so far."""
    incarnations: dict[int, int] = field(default_factory=dict)
    """By rank that must write or commit: the incarnation of the process that got the order."""


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
    """The number of the round. A new round gives up what was under way, and answers to orders of an
    earlier round do not count."""
    faults: list[Fault] = field(default_factory=list)
    suspicion: str = ""
    """Why all ranks are asked for their positions although no fault is known. Empty: a fault is
    known."""
    tasks: dict[OrderName, Task] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    store: tuple[str, int] | None = None
    """The address (host, port) of the rendezvous store with which the process groups are formed."""
    progress: Progress = field(default_factory=Progress)
    spread: Spread = field(default_factory=Spread)
    decision: Decision = field(default_factory=Decision)
    turnover: Turnover = field(default_factory=Turnover)
    exactness: Exactness = field(default_factory=Exactness)
    last_checkpoint: LastCheckpoint = field(default_factory=LastCheckpoint)

    def roots(self) -> list[Fault]:
        """
        Return the faults that are causes. The broken connections that ranks report when a peer has
        died are consequences, not causes.
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
