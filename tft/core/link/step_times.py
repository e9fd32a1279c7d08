"""
Learn how long the steps of a job take, from the heartbeats (`Beat`) of its nodes. The code is pure.
"""

from collections import deque
from collections.abc import Set
from dataclasses import dataclass
from statistics import median

from tft.core.link.newest_move import NEVER
from tft.protocol.messages import Beat

LEARNT = 5
"""The number of step times that must be measured before they count as known. The first steps are
slow, because caches are cold."""
REMEMBERED = 64
"""The number of the latest step times that are remembered. The number is large enough for a stable
median, and small enough to follow a job whose steps become faster or slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """
    What one heartbeat says about the progress of the ranks of its node.
    """

    training: bool
    """True if a rank of the node is in its training loop."""
    completed: bool
    """True if a rank has completed a step since its last heartbeat."""
    newest: float
    """The time of the newest progress, by the clock of the node. A time in the future announces a
    long phase. Minus infinity: no rank of the node is in its training loop."""


class StepTimes:
    """
    The latest step times of a job, and the ranks that train.
    """

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=REMEMBERED)
        self._last: dict[int, tuple[int, int, float]] = {}
        """For each rank that trains: its incarnation, its step, and when it completed this step, by
        the clock of its node."""

    @property
    def known(self) -> bool:
        """
        True if enough steps were measured.
        """
        return len(self._durations) >= LEARNT

    @property
    def median(self) -> float:
        """
        The median of the latest step times in seconds.
        """
        return median(self._durations)

    @property
    def longest(self) -> float:
        """
        The longest of the latest step times in seconds.
        """
        return max(self._durations)

    @property
    def ranks(self) -> Set[int]:
        """
        The ranks that train.
        """
        return self._last.keys()

    @property
    def furthest(self) -> int:
        """
        The highest step that any of the ranks has completed; 0 if none trains.
        """
        return max((step for _, step, _ in self._last.values()), default=0)

    def resumed(self) -> None:
        """
        Record that training begins or continues. The time between the last step that a rank
        completed before and its next completed step is not measured as a step time.
        """
        self._last.clear()

    def heard(self, beat: Beat) -> Moves:
        """
        Learn from a heartbeat. Return what it says about the progress of its ranks.
        """
        training = completed = False
        newest = NEVER
        for pulse in beat.pulses:
            if not pulse.training:
                self._last.pop(pulse.rank, None)
                continue
            training = True
            newest = max(newest, pulse.moved)
            step, last = pulse.position.step, self._last.get(pulse.rank)
            # `pulse.moved` is in the future if the rank has announced a phase without progress. Do
            # not count a future time into the time of the step
            moved = min(pulse.moved, beat.at)
            if last is not None and last[0] == pulse.incarnation and step > last[1]:
                self._durations.append((moved - last[2]) / (step - last[1]))
                completed = True
            if last is None or last[:2] != (pulse.incarnation, step):
                self._last[pulse.rank] = pulse.incarnation, step, moved
        return Moves(training=training, completed=completed, newest=newest)
