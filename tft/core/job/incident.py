"""
Define the facts of one incident: its faults, the recovery strategies that were tried, the step from
which training continues, and the time that each phase of the incident took.
"""

from dataclasses import dataclass, field

from tft.core.job.refusals import RefusedStep
from tft.core.plan.plan import Plan
from tft.core.plan.savers import SavePlan
from tft.protocol.messages import Advised, FaultKind, OrderName, Position, RankOrder, SavedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """
    One fault that was observed in the job.
    """

    kind: FaultKind
    rank: int | None
    """The rank at fault. None: no single rank could be named."""
    step: int
    """The step that was being computed when the fault occurred. 0: the step is not known until the
    ranks have reported their positions."""
    seen: float
    """The time of the first evidence, in seconds (CLOCK_MONOTONIC)."""
    evidence: str
    """The traceback, the stacks of all threads, or a sentence that says how the fault was noticed.
    """
    certain: bool = False
    """True if this fault is certainly a cause of the incident. A `network` fault that is not
    certain may be only the consequence of another fault."""
    refused: bool = False
    """True if ranks have refused to apply the update of the step, because the numbers of the update
    were bad (NaN, Inf or a spike). Then the update has not changed the state of these ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """
    A named time span of an incident, such as `freeze` or `repair`. It is the span of the rank
    `rank` or, if `rank` is None, of the whole job. Times are in seconds.
    """

    name: str
    rank: int | None
    start: float
    end: float


@dataclass(slots=True, kw_only=True)
class Task:
    """
    An order that several ranks must answer. The task stays open until the job waits for no further
    answer. `waiting` has the ranks whose answers are missing.
    """

    orders: tuple[RankOrder, ...]
    waiting: set[int]
    issued: float
    limit: float
    """The seconds within which the ranks must answer. Infinite: the time limit does not run yet."""
    deadline: float
    renewed: int = 0
    """The number of times that the time limit of the order was restarted, because most ranks had
    not answered."""
    spared: bool = False
    """True if late ranks were given `Policy.repair` more seconds to answer, because ending them
    would lose a shard. More time is given only once."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """
    The step that the ranks had reached before the incident, and the step from which training
    continues after the incident.
    """

    furthest: int = 0
    """The highest step that any rank had completed before the incident."""
    told: int = 0
    """The highest step that any rank had completed when a node was lost, according to heartbeats.
    This is needed if all nodes are lost, because then no rank reports its position."""
    begun: int = 0
    """The highest step whose update any rank had begun when the rank reported its position. The
    rank may have completed this update since."""
    reached: int = 0
    """The highest step whose update any rank had begun, according to the positions that the ranks
    have reported in the present round. (`begun` is the same for all rounds of the incident
    together.)"""
    step: int | None = None
    """The first step to be computed after the incident. None: this step is not known yet, or the
    job ends without a further step."""

    digesting: bool = False
    """True if ranks may still have been digesting their copies when a round began, and have not
    stopped since. Ranks cannot stop before they have finished digesting, so they get more time to
    stop."""
    groups_failed: str = ""
    """The ranks form process groups while they digest their copies. If these groups cannot be
    formed, this is the reason. Empty: no such reason is known."""

    def saw(self, position: Position) -> None:
        """
        Update the highest steps of the job with the last known position of a rank. The process of
        the rank may have ended since.
        """
        self.furthest = max(self.furthest, position.step)
        self.reached = max(self.reached, position.step + position.window)
        self.begun = max(self.begun, self.reached)

    @property
    def agreed(self) -> int:
        """
        The step to whose end all members (the ranks that take part in training) return, either to
        continue training from there or to save the state of this step.
        """
        return (self.step or 1) - 1

    @property
    def steps_lost(self) -> int:
        """
        The number of completed steps that the ranks have to compute again after the incident.
        """
        reached = max(self.furthest, self.told)
        return 0 if self.step is None else max(0, reached - (self.step - 1))


@dataclass(slots=True, kw_only=True)
class Spread:
    """
    How far wrong numbers may have spread in the states of the ranks. Copies of the training state
    after step `ceiling` are not used, because they may contain wrong numbers.
    """

    ceiling: int | None = None
    """The last step whose copies of the training state may be used. None: there is no limit."""
    by: set[int] = field(default_factory=set)
    """The ranks that may have spread wrong numbers with their last update, as long as the step of
    that update is not known."""
    firm: int | None = None
    """The ceiling (last step whose copies may be used) that the faults of the incident demand.
    None: the faults demand no ceiling. The value of `ceiling` may be lower than this, as a
    precaution."""
    guessed: bool = False
    """True if the ceiling (last step whose copies may be used) was already set lower than the
    faults demand, to try an earlier state against a repeated fault. This is tried only once."""
    equals: set[tuple[str, int]] = field(default_factory=set)
    """One entry for each time that copies of a shard were found to differ while the ranks trained.
    An entry has the name of the shard and the last step at which its copies were equal. The name is
    an empty text if the shard is not known."""
    undecided: bool = False
    """True if copies of a shard were found to differ while the ranks trained, and no majority shows
    which of the copies are right."""
    suspects: set[int] = field(default_factory=set)
    """The ranks whose copies of shards were found wrong at a periodic checkpoint."""

    @property
    def tentative(self) -> bool:
        """
        True if the ceiling (the last step whose copies may be used) is lower than the faults
        demand. The method `yield_to_need` raises it again if no usable copies are left otherwise.
        """
        return self.ceiling != self.firm

    def lower(self, ceiling: int) -> None:
        """
        Lower the ceiling (the last step whose copies may be used) to the step `ceiling`, unless it
        is lower already. Call this if a fault shows that copies of later steps may be wrong.
        """
        self.firm = max(0, ceiling if self.firm is None else min(ceiling, self.firm))
        self.prefer(self.firm)

    def prefer(self, ceiling: int) -> None:
        """
        Lower the ceiling (the last step whose copies may be used) to the step `ceiling`, unless it
        is lower already. This is a precaution: copies of later steps are used after all if there
        are no other copies.
        """
        self.ceiling = ceiling if self.ceiling is None else min(ceiling, self.ceiling)

    def guess(self, ceiling: int) -> None:
        """
        Lower the ceiling (the last step whose copies may be used) to the step `ceiling`, although
        no fault demands this. The job tries in this way whether a fault that has come back stays
        away if training continues from an earlier state.
        """
        self.prefer(ceiling)
        self.guessed = True

    def yield_to_need(self) -> None:
        """
        Raise the ceiling (the last step whose copies may be used), because otherwise no usable
        copies are left. Each call raises it to the next higher step in `equals`, at which copies
        were still equal. If `equals` has no higher step, set the ceiling to what the faults demand.
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
        Remove the ceiling (the last step whose copies may be used), because all ranks that train
        have returned to a step that is not later than the ceiling. The states that these ranks
        compute from now on do not contain the wrong numbers.
        """
        self.ceiling = self.firm = None
        self.equals, self.undecided, self.suspects = set(), False, set()


@dataclass(slots=True, kw_only=True)
class Decision:
    """
    The recovery strategy that the job follows in an incident, the strategies that were not
    possible, and the advice of the recovery plugins.
    """

    forced: str = ""
    """Why the job must end, so that only the strategies `dump` (last checkpoint) and `exit` (no
    checkpoint) are possible. Empty: every strategy may be chosen."""
    plan: Plan | None = None
    """The recovery plan that the job carries out. None: no strategy is chosen yet."""
    base: str = "retry"
    """The name of the built-in strategy that was followed last. A recovery plugin may have advised
    this strategy under another name."""
    attempts: int = 0
    """The number of attempts of the present strategy that have failed. A new fault sets this number
    to 0."""
    repeated: list[str] = field(default_factory=list)
    """Why attempts of strategies have failed and were repeated, each with the name of the strategy.
    """
    tried: list[tuple[str, str]] = field(default_factory=list)
    """The strategies that were passed over when the present strategy was chosen, each with the
    reason."""
    failed: dict[str, str] = field(default_factory=dict)
    """By strategy that must not be chosen: the reason. The strategy was followed and did not help,
    or a recovery plugin has ruled it out."""
    doubtful: tuple[str, str] = ("", "")
    """The strategy that the method `fail` has ruled out last, and the reason, if the reason is a
    repeated network fault. If it turns out later that a process was lost, the loss has caused the
    network fault, and the strategy may be chosen again. Empty texts: there is no such strategy."""
    advice: Advised | None = None
    """The advice of the recovery plugins in this round. None: there is no advice."""
    awaited: bool = False
    """True if the recovery plugins have asked for more time. When that time is over, the job asks
    the plugins for advice again."""
    waited: float = 0.0
    """Seconds that the job has waited for the recovery plugins so far."""

    @property
    def strategy(self) -> str:
        """
        The name of the recovery strategy that the job follows. If a recovery plugin has advised the
        strategy under a name of its own, this is that name. Empty: no strategy is chosen yet.
        """
        return "" if self.plan is None else self.plan.name

    def fail(self, why: str, *, network: bool) -> None:
        """
        Record that the strategy that was followed last must not be chosen again in this incident.
        `why` is the reason. `network` is True if the reason is a network fault.
        """
        self.doubtful = (self.base, why) if network else ("", "")
        self.failed[self.base] = why

    def excuse(self) -> None:
        """
        Allow a strategy again that was ruled out because of a network fault. Call this when a
        process was lost: the network fault was only a consequence of the loss.
        """
        strategy, why = self.doubtful
        # keep the strategy ruled out if it has failed again since, for another reason
        if self.failed.get(strategy) == why:
            del self.failed[strategy]
        self.doubtful = ("", "")

    def follow(self, plan: Plan) -> None:
        """
        Follow this recovery plan from now on. If the plan has another strategy than the plan
        before, set the count of failed attempts to 0.
        """
        if plan.strategy != self.base:
            self.attempts = 0
        self.plan, self.base = plan, plan.strategy


@dataclass(slots=True, kw_only=True)
class Turnover:
    """
    The processes that the ranks had when the incident began, and the processes that were started
    during the incident.
    """

    began_with: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By rank: the pid and the start time of the process that held the rank when the incident
    began."""
    kept: dict[int, bool] = field(default_factory=dict)
    """By rank: True if the rank still has the process that it had when the incident began. This is
    filled in when the incident closes."""
    at_fault: dict[tuple[int, float], tuple[int, str]] = field(default_factory=dict)
    """By rank and time of the first evidence of a fault: the pid of the process that held the rank
    then (0: the rank had none), and the host of its node. Entries are only for the report."""
    started: int = 0
    """How many processes were started for this incident."""
    respawns: dict[int, int] = field(default_factory=dict)
    """By rank: how many times the rank has lost its process in this incident and has got another
    process."""
    joining: frozenset[int] = frozenset()
    """The ranks that had left the job before and come back to it in this incident."""
    unprotected: list[str] = field(default_factory=list)
    """Sentences for the report about rank-local state (generators, data position) that was lost
    with a node, because no other node had a copy of this state."""
    counted: set[int] = field(default_factory=set)
    """The ranks against which this incident must not be counted again: it is counted already, or
    the rank is not at fault. Incidents are counted because a rank that causes too many of them is
    not restarted any more."""

    def given_another(self, rank: int) -> None:
        """
        Record that a rank has lost its process and gets another process.
        """
        self.respawns[rank] = self.respawns.get(rank, 0) + 1


@dataclass(slots=True, kw_only=True)
class Exactness:
    """
    The reservations of an incident: the reasons why training after the incident may not be equal,
    bit for bit, to a run without the incident.
    """

    reservations: list[tuple[int, str]] = field(default_factory=list)
    """The reasons why training may differ from a run without the incident. Each entry is a pair:
    the step that the reason is about, and a sentence for the report."""
    tails: dict[str, int] = field(default_factory=dict)
    """The interrupted tails: ranks were stopped in the code between the update and the end of a
    step, and no holder of a shard has ended this step. The key is a sentence for the report, the
    value is the step."""
    marks: dict[int, int] = field(default_factory=dict)
    """By rank: the last step after which the rank is known to have called all functions that the
    script has registered to be called after a step, such as an evaluation."""
    skip: int = 0
    """The number of data batches that all ranks skip when they continue after step `skip_at`."""
    skip_at: int | None = None
    """The step after which the `skip` data batches are skipped. None: this step is not known
    yet."""
    refused: list[RefusedStep] = field(default_factory=list)
    """The steps whose update ranks have refused in this incident because of its numbers."""
    left_out: dict[int, int] = field(default_factory=dict)
    """By step: how many batches are left out before the step, because its update was refused."""

    def marked(self, rank: int, position: Position) -> None:
        """
        Update the entry of a rank in `marks` (the last step after which the rank has called all
        registered functions) from the last known position of the rank. The process of the rank may
        have ended since. If a rank reports several positions in one incident, the lowest counts.
        After a repair the rank is at another step, and its position no longer shows which functions
        the rank has called.
        """
        step = position.step - (position.tail or position.after)
        self.marks[rank] = min(step, self.marks.get(rank, step))

    @property
    def sentences(self) -> list[str]:
        """
        The sentences that say why training may differ, bit for bit, from a run without the
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
        Record that all ranks continue from the end of `step`. Drop the reservations (reasons why
        training may differ) about later steps, because these steps are computed again. Keep the
        reservations about `step` itself and about earlier steps.
        """
        self.reservations = [(since, why) for since, why in self.reservations if since <= step]
        self.left_out = {each: n for each, n in self.left_out.items() if each <= step + 1}


@dataclass(slots=True, kw_only=True)
class LastCheckpoint:
    """
    The last checkpoint, which the remaining ranks write before a job ends. This object has the plan
    of the checkpoint, and the files that are written already.
    """

    plan: SavePlan | None = None
    """The plan that says which rank writes which files. None: no last checkpoint is planned."""
    files: dict[str, SavedFile] = field(default_factory=dict)
    """By file name: the files of the checkpoint that ranks have written so far."""
    incarnations: dict[int, int] = field(default_factory=dict)
    """By rank that must write or commit the checkpoint: the incarnation of the rank's process when
    the checkpoint was planned. If the rank gets another process, the checkpoint must be planned
    again."""


@dataclass(slots=True, kw_only=True)
class Incident:
    """
    One incident, from its first fault until the job trains again or ends. The incident with number
    0 is the start of the job itself.
    """

    number: int
    opened: float
    closed: float | None = None
    round: int = 0
    """The number of the round (one attempt within the incident). A new round gives up the work of
    the round before, and answers to orders of an earlier round are ignored."""
    faults: list[Fault] = field(default_factory=list)
    suspicion: str = ""
    """A sentence that says for how long no rank has made progress, while the ranks are asked for
    their positions because of such a stall. Empty: there is no stall."""
    tasks: dict[OrderName, Task] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    store: tuple[str, int] | None = None
    """The address (host, port) of the rendezvous store with which the ranks form their process
    groups. None: the ranks have not begun to form process groups in this incident."""
    progress: Progress = field(default_factory=Progress)
    spread: Spread = field(default_factory=Spread)
    decision: Decision = field(default_factory=Decision)
    turnover: Turnover = field(default_factory=Turnover)
    exactness: Exactness = field(default_factory=Exactness)
    last_checkpoint: LastCheckpoint = field(default_factory=LastCheckpoint)

    def roots(self) -> list[Fault]:
        """
        Return the faults that are causes of the incident. Leave out `network` faults that are not
        marked as certain, because ranks also report broken connections when a peer has died. If the
        incident has no other faults, return all faults.
        """
        causes = [fault for fault in self.faults if fault.kind != "network" or fault.certain]
        return causes or self.faults

    def forgive(self, rank: int) -> None:
        """
        Remove the last fault `hang` of a rank: its process did not hang, but was lost with its
        node.
        """
        hangs = [fault for fault in self.faults if (fault.kind, fault.rank) == ("hang", rank)]
        self.faults = [fault for fault in self.faults if fault not in hangs[-1:]]

    def numeric_step(self) -> int:
        """
        Return the last step that has a numeric fault and whose update the ranks have not refused.
        Return 0 if there is no such step.
        """
        steps = (f.step for f in self.faults if f.kind == "numeric" and not f.refused)
        return max(steps, default=0)

    def faulty(self) -> set[int]:
        """
        Return the ranks that are at fault according to the causes of the incident (see the method
        `roots`).
        """
        return {fault.rank for fault in self.roots() if fault.rank is not None}

    @property
    def is_open(self) -> bool:
        """
        True while the incident is being handled. The start of the job has the number 0 and does not
        count as an open incident until it has a fault, which gives it another number.
        """
        return self.number > 0 and self.closed is None
