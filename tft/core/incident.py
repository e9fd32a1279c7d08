"""
What is known of one incident: its faults, what was tried, when each part of it took place.
"""

from dataclasses import dataclass, field

from tft.protocol.messages import Advised, FaultKind, OrderName, Position, RankOrder

COMPARED: frozenset[OrderName] = frozenset({"stop", "fetch", "restore", "reload"})
"""Orders after which a rank says digests of what it holds."""
PHASES: dict[OrderName, str] = {
    "stop": "clear",
    "load": "repair",
    "fetch": "repair",
    "restore": "repair",
    "reload": "repair",
    "regroup": "rebuild",
    "commit": "save",
}
"""The phase of the report an order's time is counted under, where it is not the order's own name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """
    One observed wrong.
    """

    kind: FaultKind
    rank: int | None
    """None where no rank could be singled out."""
    step: int
    """The step that was being computed; 0 until the ranks have said where they are."""
    seen: float
    """When its first evidence was (CLOCK_MONOTONIC)."""
    evidence: str
    """The traceback, the stacks, or the sentence that says how it was noticed."""
    certain: bool = False
    """It is a cause, even if others of its kind are only seen from the other side of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """
    A stretch of an incident, of one rank or of the whole job.
    """

    name: str
    rank: int | None
    start: float
    end: float


@dataclass(slots=True, kw_only=True)
class Task:
    """
    One order to several ranks, until the last of them has answered.
    """

    orders: tuple[RankOrder, ...]
    waiting: set[int]
    issued: float
    limit: float
    """Seconds it may take."""
    deadline: float
    renewed: int = 0
    """How often it was given that time again."""
    spared: bool = False
    """Who owes the answer was given the time of a repair, since a shard would be lost with it."""


@dataclass(slots=True, kw_only=True)
class Incident:
    """
    From the first fault until the job runs again or ends. Number 0 is the job's own start.
    """

    number: int
    opened: float
    faults: list[Fault] = field(default_factory=list)
    suspicion: str = ""
    """Why ranks are being asked where they are, while no fault is known."""
    forced: str = ""
    """Why nothing but `dump` or `exit` comes into question."""
    ceiling: int | None = None
    """No copy of a later step is sound: what is wrong may have spread."""
    spread_by: set[int] = field(default_factory=set)
    """Ranks whose last update may have spread what is wrong, and who have yet to say which."""
    tentative: bool = False
    """The ceiling is a guess, after a fault that came back: better none than to save nothing."""
    guessed: bool = False
    """Going back further than the fault demanded was tried once."""
    joining: frozenset[int] = frozenset()
    """The ranks that come back with it, after having been away."""
    skip: int = 0
    """How many batches are left out after going back."""
    skip_at: int | None = None
    """The step after which they are left out; None: that is not known yet."""
    advice: Advised | None = None
    """What the recovery plugins said to the present offers."""
    awaited: bool = False
    """They have asked for time, and are asked again when it is over."""
    waited: float = 0.0
    """Seconds for which they have had everyone wait."""
    strategy: str = ""
    """The one that is followed, under the name it was advised by; empty: none yet."""
    base: str = "retry"
    """The one of ours that was followed last."""
    tried: list[tuple[str, str]] = field(default_factory=list)
    """The strategies passed over when the present one was chosen, and why."""
    failed: dict[str, str] = field(default_factory=dict)
    """The strategies that were followed and did not help, and why."""
    round: int = 0
    attempts: int = 0
    """How often the present strategy was begun."""
    furthest: int = 0
    """The highest step that some rank had completed."""
    begun: int = 0
    """The highest step whose update some rank had begun: whoever had may have finished it on its way
    out."""
    reached: int = 0
    """The same, as far as is known in this round."""
    step: int | None = None
    """The first step to be computed after the incident; None: that is not known, yet or ever."""
    store: tuple[str, int] | None = None
    """Where its groups are formed."""
    tasks: dict[OrderName, Task] = field(default_factory=dict)
    spare: bool = False
    """The last checkpoint had to be planned anew: no more is written than it takes."""
    writers: set[int] = field(default_factory=set)
    """Who has a part in the last checkpoint as it was planned."""
    phases: list[Phase] = field(default_factory=list)
    processes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Pid and start time of each rank when the incident began."""
    kept: dict[int, bool] = field(default_factory=dict)
    """Filled at the end: whether each of these ranks still has the process it began with."""
    started: int = 0
    """How many processes were started for it."""
    respawns: dict[int, int] = field(default_factory=dict)
    """How often each rank has lost its process and was given another."""
    counted: set[int] = field(default_factory=set)
    """The ranks whose part in it has been held against them."""
    reservations: list[tuple[int, str]] = field(default_factory=list)
    """Why training does not go on bit for bit as it would have without the incident, and from the end of which
    step on."""
    tails: dict[str, int] = field(default_factory=dict)
    """For each line in the tail of a step that nobody has come further than who holds a shard: the sentence, and the
    step."""
    marks: dict[int, int] = field(default_factory=dict)
    """By rank: the last step after which all was called that is to be, at least."""
    closed: float | None = None

    def marked(self, rank: int, position: Position) -> None:
        """
        A rank stands, or stood when it died, at this position. What it says later, when it was brought to another step,
        says nothing of that.
        """
        step = position.step - (position.tail or position.after)
        self.marks[rank] = min(step, self.marks.get(rank, step))

    def saw(self, position: Position) -> None:
        """
        Some rank stands, or stood when it died, at this position.
        """
        self.furthest = max(self.furthest, position.step)
        self.reached = max(self.reached, position.step + position.window)
        self.begun = max(self.begun, self.reached)

    def given_another(self, rank: int) -> None:
        """
        A rank has lost its process, and another takes its place.
        """
        self.respawns[rank] = self.respawns.get(rank, 0) + 1

    @property
    def inexact(self) -> list[str]:
        """
        Why training does not go on bit for bit as it would have without the incident.
        """
        return list(dict.fromkeys([*self.tails, *(why for _, why in self.reservations)]))

    def returns_to(self, step: int) -> None:
        """
        All go on from the end of this step: what was inexact about later ones is computed again. What an earlier
        round has done to this one stays.
        """
        self.reservations = [(since, why) for since, why in self.reservations if since <= step]

    def lower(self, ceiling: int) -> None:
        """
        No copy of a later step than this is sound.
        """
        known = ceiling if self.ceiling is None else self.ceiling
        self.ceiling, self.tentative = max(0, min(ceiling, known)), False

    def gone_back(self) -> None:
        """
        Everyone has been brought to a step below the ceiling: what is held from now on is newer
        than what was wrong.
        """
        self.ceiling, self.tentative = None, False

    def roots(self) -> list[Fault]:
        """
        The faults that are causes: when a process is gone, the broken connections its peers
        report are the same fault seen from the other side.
        """
        causes = [fault for fault in self.faults if fault.kind != "network" or fault.certain]
        return causes or self.faults

    def numeric_step(self) -> int:
        """
        The last step at which numbers went wrong; 0: at none.
        """
        return max((fault.step for fault in self.faults if fault.kind == "numeric"), default=0)

    def faulty(self) -> set[int]:
        """
        The ranks named in the faults.
        """
        return {fault.rank for fault in self.roots() if fault.rank is not None}

    @property
    def is_open(self) -> bool:
        """
        Something is being done about it. The job's own start is none while it has no fault.
        """
        return self.number > 0 and self.closed is None

    @property
    def steps_lost(self) -> int:
        """
        Completed steps that have to be computed again.
        """
        return 0 if self.step is None else max(0, self.furthest - (self.step - 1))
