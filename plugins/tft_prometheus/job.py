"""
Turns the events and heartbeats of a job into the numbers that Prometheus reads, and judges whether
the job is healthy. This module reads no clock, because the caller passes the time to each function.
It does not use the server or the package `prometheus_client`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tft.spi import RankBeat
from tft_prometheus.histogram import Counted
from tft_prometheus.incidents import REPAIRING, Incidents, count
from tft_prometheus.positions import SILENT, Counts, Positions

STATES = (
    "awaiting", "repairing", "rebuilding", "rolling back", "resuming", "healthy", "pausing",
    "paused", "confirming", "freezing", "clearing", "choosing", "dumping", "exiting", "ended",
)  # fmt: skip
"""The states of a job in the controller. The metric `tft_job_state` has one series for each."""
MOVING = frozenset({"resuming", "healthy", "pausing"})
"""The states in which ranks are expected to make progress."""
RESULTS = ("completed", "dumped", "failed", "cancelled")
"""How a job can end."""
LOOP = 5.0
"""If the controller's event loop has not run for this many seconds, the job counts as unhealthy.
The plugin records each second that the loop runs (see `SIGN` in `exporter.py`)."""
MOST_EVENTS = 100
"""The maximum number of event names that have a counter of their own. tft has about 50, and plugins
add some. Further names are counted as `other`."""
MOST_SLOW = 16
"""The maximum number of slow ranks for which there is a metric with the rank. If more ranks are
slow, only the slowest of them have such a metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """
    A rank that a plugin has found to be slow.
    """

    rank: int
    cause: str
    """The part of a step in which the rank is slow: `input`, `compute` or `update`."""
    seconds: float
    """How many seconds longer this rank needs for that part of a step than other ranks. The time in
    which a rank waits for other ranks is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """
    All numbers of a job at one moment. Times are in seconds.
    """

    info: Mapping[str, str]
    ranks: int
    """The number of ranks with which the job was started."""
    state: str
    healthy: bool
    result: str
    """How the job has ended, one of `RESULTS`. Empty while the job has not ended."""
    counts: Counts
    steps: Counted
    """The histogram of the time of a step."""
    stillness: float
    """The time in seconds since the last progress of any training rank."""
    incident_open: bool
    incident_age: float
    incidents: Mapping[str, int]
    """The number of finished incidents for each strategy."""
    faults: Mapping[str, int]
    """The number of faults for each kind of fault."""
    durations: Counted
    """The histogram of the duration of an incident."""
    steps_lost: int
    processes_started: int
    updates_refused: int
    checkpoints_missed: int
    slow: int
    """The number of slow ranks."""
    slowest: Sequence[SlowRank]
    """The slowest ranks, at most `MOST_SLOW`."""
    events: Mapping[str, int]
    """The number of entries in the controller's log for each name of an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """
    Whether a job is healthy, with a sentence that says why.
    """

    ok: bool
    why: str


@dataclass(slots=True)
class _Job:
    """
    The newest facts about the whole job, from the events of the controller.
    """

    info: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 0
    state: str = "awaiting"
    result: str = ""
    checkpoints_missed: int = 0


class JobMetrics:
    """
    The numbers of one job, since this controller leads it. All times are in seconds on the clock of
    the controller.
    """

    def __init__(self, at: float) -> None:
        self._job = _Job()
        self._positions = Positions(at)
        self._incidents = Incidents()
        self._slow: dict[int, SlowRank] = {}
        self._events: Counter[str] = Counter()
        self._turned = at

    def turned(self, at: float) -> None:
        """
        Record that the controller's event loop runs at the time `at`.
        """
        self._turned = at

    def beat(self, node: int, ranks: Sequence[RankBeat], at: float) -> None:
        """
        Update the numbers by the heartbeat of a node.
        """
        self._positions.heard(node, ranks, at)

    def event(self, event: str, facts: Mapping[str, object], at: float) -> None:
        """
        Update the numbers by an event of the controller. Facts of another form than expected are
        ignored, because other plugins may use the same names.
        """
        count(self._events, event, MOST_EVENTS)
        self._incidents.take(event, facts, at)
        match event, facts:
            case "leads", {"state": str(state), "ranks": int(ranks)}:
                names = ("job", "run", "run_dir")
                self._job.info = {name: str(facts.get(name, "")) for name in names}
                self._job.ranks = ranks
                self._enter(state, at)
            case "state", {"state": str(state)}:
                self._enter(state, at)
            case "checkpoint_missed", _:
                self._job.checkpoints_missed += 1
            case "rank_slow", {"rank": int(rank)}:
                self._is_slow(rank, facts)
            case "rank_slow_over", {"rank": int(rank)}:
                self._slow.pop(rank, None)
            case "job_ends", {"result": str(result)}:
                self._incidents.end(self._job.state, at)
                self._job.result = result
            case _:
                pass

    def _enter(self, state: str, at: float) -> None:
        self._job.state = state
        self._positions.measure(state in MOVING, at)

    def _is_slow(self, rank: int, facts: Mapping[str, object]) -> None:
        seconds = facts.get("seconds")
        self._slow[rank] = SlowRank(
            rank=rank,
            cause=str(facts.get("cause", "")),
            seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        )

    def health(self, at: float) -> Health:
        """
        Return whether the job is healthy at the time `at`, and why. A healthy job has a controller
        whose event loop runs. Its ranks make progress, or the controller is in a state in which no
        progress is expected, such as a repair.
        """
        if at - self._turned > LOOP:
            still = at - self._turned
            return _bad(f"the event loop of the controller has not turned for {still:.0f} s")
        state = self._job.state
        if state in REPAIRING and self._incidents.opened is not None:
            number, age = self._incidents.number, self._incidents.age(at)
            return _good(f"incident {number} is being handled for {age:.0f} s: {state}")
        if state not in MOVING:
            return _good(f"the job is {state}")
        if (silence := self._positions.silence(at)) > SILENT:
            return _bad(f"no node has sent a heartbeat for {silence:.0f} s")
        counts, still = self._positions.count(at), self._positions.stillness(at)
        if not counts.training:
            return _good(f"the job is {state}, and no rank is in its training loop")
        if still > (limit := self._positions.limit()):
            return _bad(f"no rank has made progress for {still:.0f} s; the limit is {limit:.0f} s")
        return _good(f"the job is {state}, and all ranks have completed step {counts.lowest}")

    def read(self, at: float) -> Reading:
        """
        Return all numbers at the time `at`.
        """
        incidents = self._incidents
        slowest = sorted(self._slow.values(), key=lambda slow: (-slow.seconds, slow.rank))
        return Reading(
            info=self._job.info,
            ranks=self._job.ranks,
            state=self._job.state,
            healthy=self.health(at).ok,
            result=self._job.result,
            counts=self._positions.count(at),
            steps=self._positions.steps(),
            stillness=self._positions.stillness(at),
            incident_open=incidents.opened is not None,
            incident_age=incidents.age(at),
            incidents=dict(incidents.strategies),
            faults=dict(incidents.faults),
            durations=incidents.durations(),
            steps_lost=incidents.steps_lost,
            processes_started=incidents.started,
            updates_refused=incidents.refused,
            checkpoints_missed=self._job.checkpoints_missed,
            slow=len(self._slow),
            slowest=slowest[:MOST_SLOW],
            events=dict(self._events),
        )


def _good(why: str) -> Health:
    return Health(ok=True, why=why)


def _bad(why: str) -> Health:
    return Health(ok=False, why=why)
