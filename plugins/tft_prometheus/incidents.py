"""
Counts the incidents of a job, their faults and their cost, from the events of the controller.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import get_args

from tft.spi import FaultKind
from tft_prometheus.histogram import Counted, Histogram

DURATION_BOUNDS = (
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0
)  # fmt: skip
"""The bounds of the buckets for the duration of an incident, in seconds. A process is replaced in
less than a second in a small job; a node that has to be booted takes many minutes."""
STRATEGIES = ("start", "migrate", "scale_out", "retry", "recover", "scale_in", "dump", "exit")
"""The strategies of tft. `start` stands for the handling of a fault before the first step. Each
strategy has a counter from the beginning, with the value 0. Prometheus would not see the increase
if the counter first appeared with the value 1."""
KINDS: tuple[str, ...] = get_args(FaultKind)
"""The kinds of faults. Each has a counter from the beginning, for the same reason as the
strategies."""
REPAIRING = frozenset(
    {"freezing", "clearing", "choosing", "awaiting", "repairing", "rebuilding", "rolling back"}
)
"""The states of the job in which an incident is open. The start of a job passes through some of
these states too, but it has the incident number 0 and is not counted."""
MOST_NAMES = 32
"""The maximum number of strategy names that have a counter of their own. Recovery plugins can add
names without limit. Further names are counted as `other`."""
OTHER = "other"


def count(counter: Counter[str], name: str, most: int) -> None:
    """
    Count `name`. If `most` names are counted already, count a new name as `other`.
    """
    counter[name if name in counter or len(counter) < most else OTHER] += 1


class Incidents:
    """
    The incidents of one job since this controller leads it.
    """

    def __init__(self) -> None:
        self.strategies: Counter[str] = Counter(dict.fromkeys(STRATEGIES, 0))
        """The number of finished incidents for each strategy."""
        self.faults: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        """The number of faults for each kind of fault."""
        self.steps_lost = 0
        self.started = 0
        """The number of processes that were started because of incidents."""
        self.refused = 0
        """How often the update of a step was refused."""
        self.number = 0
        """The number of the open incident, or of the last one."""
        self.opened: float | None = None
        """The time at which the open incident began. None if no incident is open."""
        self._chosen = ""
        self._durations = Histogram(DURATION_BOUNDS)

    def take(self, event: str, facts: Mapping[str, object], at: float) -> None:
        """
        Update the counts by an event of the controller that happened at the time `at`.
        """
        match event, facts:
            case "fault", {"kind": str(kind), "incident": int(number)}:
                count(self.faults, kind, len(KINDS))
                # a numeric fault without a rank can only be a refused update, so count it here too
                self.refused += kind == "numeric" and facts.get("rank") is None
                self._open(number, at)
            case "strategy_chosen", {"strategy": str(strategy), "incident": int(number)}:
                self._chosen = strategy
                self._open(number, at)
            case (("state" | "leads"), {"state": str(state), "incident": int(number)}):
                if state in REPAIRING:
                    self._open(number, at)
            case "incident_closed", {"strategy": str(strategy), "seconds": int() | float() as took}:
                self.steps_lost += _whole(facts.get("steps_lost"))
                self.started += _whole(facts.get("processes_started"))
                self._close(strategy, float(took))
            case _:
                pass

    def end(self, state: str, at: float) -> None:
        """
        Close the open incident, because the job ends. `state` is the last state of the job. In the
        state `dumping` a last checkpoint was written, so the incident counts for the chosen
        strategy. In any other state there is no last checkpoint, and the incident counts for the
        strategy `exit`.
        """
        if self.opened is not None:
            self._close(self._chosen if state == "dumping" else "exit", at - self.opened)

    def age(self, at: float) -> float:
        """
        Return for how many seconds an incident has been open, or 0.0 if no incident is open.
        """
        return 0.0 if self.opened is None else max(0.0, at - self.opened)

    def durations(self) -> Counted:
        """
        Return the histogram of the duration of an incident.
        """
        return self._durations.read()

    def _open(self, number: int, at: float) -> None:
        # the start of the job has the number 0 and is no incident
        if number > 0 and self.opened is None:
            self.number, self.opened = number, at

    def _close(self, strategy: str, seconds: float) -> None:
        if math.isfinite(seconds):
            self._durations.add(seconds)
        count(self.strategies, strategy or "exit", MOST_NAMES)
        self.opened, self._chosen = None, ""


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
