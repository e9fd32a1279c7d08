"""
Own the facts of one incident: its faults, the strategies that were tried, the step from which
training continues, and the time of each phase.
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
    """True if this fault is certainly a cause of the incident. A `network` fault without this mark
    may be only the consequence of another fault."""
    refused: bool = False
    """True if the ranks have refused to apply the update of the step because of its numbers, so no
    state was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """
    A named time span of an incident, such as `freeze` or `repair`, of one rank or (rank None) of
    the whole job. Times are in seconds.
    """

    name: str
    rank: int | None
    start: float
    end: float


@dataclass(slots=True, kw_only=True)
class Task:
    """
    An order that several ranks must answer. It stays open until all of them have answered or were
    excused. `waiting` has the ranks whose answer is missing.
    """

    orders: tuple[RankOrder, ...]
    waiting: set[int]
    issued: float
    limit: float
    """The seconds within which the ranks must answer. Infinite: no limit runs yet."""
    deadline: float
    renewed: int = 0
    """How many times the time limit was restarted because most ranks had not answered."""
    spared: bool = False
    """True if the late ranks were given `Policy.repair` more seconds, because ending them would
    lose a shard. This is done only once."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """
    The step that the ranks had reached when the incident began, and the step from which they
    continue.
    """

    furthest: int = 0
    """The highest step that some rank had completed."""
    begun: int = 0
    """The highest step whose update some rank had begun. After it has reported this position, the
    rank may still have completed the update."""
    reached: int = 0
    """The highest step whose update some rank had begun, according to the positions that were
    reported in the present round only."""
    step: int | None = None
    """The first step to be computed after the incident. None: it is not known yet, or no step
    follows."""

    def saw(self, position: Position) -> None:
        """
        Record the last known position of a rank, whose process may be alive or dead.
        """
        self.furthest = max(self.furthest, position.step)
        self.reached = max(self.reached, position.step + position.window)
        self.begun = max(self.begun, self.reached)

    @property
    def agreed(self) -> int:
        """
        The step to whose end all members return, to continue from it or to save its state.
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
    How far wrong numbers may have spread in the states of the ranks. Copies of steps later than
    `ceiling` are not used, because they may contain wrong numbers.
    """

    ceiling: int | None = None
    """The last step whose copies can be sound. None: there is no such limit."""
    by: set[int] = field(default_factory=set)
    """The ranks that may have spread wrong numbers with their last update, and for which it is not
    known yet which step that update was."""
    firm: int | None = None
    """The ceiling that the faults demand. None: they demand none. The value of `ceiling` may be
    lower, as a precaution."""
    guessed: bool = False
    """True if this incident has already tried a ceiling that is lower than its faults demand. This
    is done only once."""
    equals: set[tuple[str, int]] = field(default_factory=set)
    """One entry for each time that copies of a shard were found to differ while the ranks trained:
    the shard, and the last step at which these copies were equal. The shard is an empty text if it
    is not known."""
    undecided: bool = False
    """True if copies were found to differ while the ranks trained, and no majority shows which of
    them are right."""
    suspects: set[int] = field(default_factory=set)
    """The ranks whose copies were wrong at a periodic checkpoint."""

    @property
    def tentative(self) -> bool:
        """
        True if the ceiling is lower than the faults demand. The ceiling is raised again
        (`yield_to_need`) if otherwise nothing could be saved.
        """
        return self.ceiling != self.firm

    def lower(self, ceiling: int) -> None:
        """
        Lower the ceiling to `ceiling`, unless it is lower already, because a fault shows that no
        copy of a later step is sound.
        """
        self.firm = max(0, ceiling if self.firm is None else min(ceiling, self.firm))
        self.prefer(self.firm)

    def prefer(self, ceiling: int) -> None:
        """
        Lower the ceiling to `ceiling` as a precaution: copies of later steps may be sound, and are
        used if there are no others.
        """
        self.ceiling = ceiling if self.ceiling is None else min(ceiling, self.ceiling)

    def guess(self, ceiling: int) -> None:
        """
        Lower the ceiling below what the faults demand, to try whether the fault stays away when
        training continues from an earlier state.
        """
        self.prefer(ceiling)
        self.guessed = True

    def yield_to_need(self) -> None:
        """
        Raise the ceiling, because otherwise nothing could be saved. The first call raises it to the
        next higher step in `equals`, at which copies were still equal. If there is none, the
        ceiling becomes what the faults demand.
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
        Remove the ceiling, because all members have returned to a step that is not later than the
        ceiling. The states that they compute from now on do not contain the wrong numbers.
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
    """The strategies that were followed and did not help, or that a recovery plugin has ruled out,
    each with the reason."""
    advice: Advised | None = None
    """The advice of the recovery plugins in this round. None: there is none."""
    awaited: bool = False
    """True if the recovery plugins have asked for more time. They are asked again when the time
    that they wanted is over."""
    waited: float = 0.0
    """Seconds that the job has waited for the recovery plugins so far."""

    @property
    def strategy(self) -> str:
        """
        The name of the strategy that is followed. If a recovery plugin has advised the strategy
        under another name, this is that name. Empty: no strategy is chosen yet.
        """
        return "" if self.plan is None else self.plan.name

    def follow(self, plan: Plan) -> None:
        """
        Follow this plan from now on. If its strategy is another one than before, restart the count
        of failed attempts.
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
    """By rank: the pid and the start time of the process that it had when the incident began."""
    kept: dict[int, bool] = field(default_factory=dict)
    """By rank: True if it still has the process that it had when the incident began. Filled in when
    the incident closes."""
    started: int = 0
    """How many processes were started for this incident."""
    respawns: dict[int, int] = field(default_factory=dict)
    """By rank: how many times in this incident it has lost its process and was given another."""
    joining: frozenset[int] = frozenset()
    """The ranks that come back to the job in this incident."""
    unprotected: list[str] = field(default_factory=list)
    """Sentences for the report about rank-local state (generators, data position) that was lost
    with a node, because no other node had it."""
    counted: set[int] = field(default_factory=set)
    """The ranks against which this incident was counted already. A rank that causes too many
    incidents is not restarted any more."""

    def given_another(self, rank: int) -> None:
        """
        Record that a rank has lost its process and gets another one.
        """
        self.respawns[rank] = self.respawns.get(rank, 0) + 1


@dataclass(slots=True, kw_only=True)
class Exactness:
    """
    The reservations of an incident: the reasons why training after it may differ, bit for bit, from
    a run without the incident.
    """

    reservations: list[tuple[int, str]] = field(default_factory=list)
    """The reservations, each with the step after which training may differ, and a sentence for the
    report."""
    tails: dict[str, int] = field(default_factory=dict)
    """By sentence for the report: the step whose tail (the code between the update and the end of
    the step) was interrupted at one line. Only for shards of which no holder has ended the step."""
    marks: dict[int, int] = field(default_factory=dict)
    """By rank: the last step after which the rank is known to have called all functions that are
    registered to be called after a step, such as an evaluation."""
    skip: int = 0
    """The number of data batches that all ranks skip after the rollback."""
    skip_at: int | None = None
    """The step after which these batches are skipped. None: not known yet."""
    refused: list[RefusedStep] = field(default_factory=list)
    """The steps whose update the ranks have refused in this incident."""
    left_out: dict[int, int] = field(default_factory=dict)
    """By step: how many batches are left out before it because its update was refused."""

    def marked(self, rank: int, position: Position) -> None:
        """
        Update `marks` from the last known position of a rank, whose process may be alive or dead.
        Of several positions in one incident, the lowest counts. After a repair the rank is at
        another step, so its later positions do not show which functions it has called.
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
        Record that all members continue from the end of `step`. Drop the reservations about later
        steps, because these steps are computed again. Keep those about `step` itself and earlier
        steps.
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
    """By rank that must write or commit: the incarnation of its process when it got that order. If
    the rank has another process later, the checkpoint must be planned again."""


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
    """The number of the round (one attempt within the incident). A new round gives up the work of
    the round before, and answers to orders of an earlier round are ignored."""
    faults: list[Fault] = field(default_factory=list)
    suspicion: str = ""
    """A sentence that says for how long no rank has made progress, if this is why the ranks are
    asked for their positions. Empty: there is another reason."""
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
        Return the faults that are causes of the incident. A `network` fault is left out unless it
        is marked as certain, because ranks also report broken connections when a peer has died. If
        no other fault is left, return all faults.
        """
        causes = [fault for fault in self.faults if fault.kind != "network" or fault.certain]
        return causes or self.faults

    def numeric_step(self) -> int:
        """
        Return the last step with a numeric fault whose update was applied, not refused. Return 0 if
        there is no such step.
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
