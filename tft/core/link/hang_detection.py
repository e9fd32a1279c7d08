"""
Detect silent nodes, and detect that no rank makes progress. The detector learns the step times of
the job from the beats of the nodes. A standstill that is longer than these allow is a stall. The
code is pure. There are tens of thousands of beats, so they are judged here; only the verdict
becomes an event of the job machine.
"""

import math
from collections import deque
from itertools import takewhile
from statistics import median

from tft.core.job.policy import Policy
from tft.protocol.messages import Beat

LEARNT = 5
"""The number of steps to see before their times are used. The first steps are slow, since they warm
up caches."""
ASLEEP = 1.0
"""Seconds between the sending times of two beats. After a longer gap the whole node was paused, not
one rank of it."""
REMEMBERED = 64
"""The number of step times that are remembered: enough for a median, few enough to follow a job
that changes."""


class HangDetection:
    """
    The detector. The controller passes every beat to it, and reads its verdict after each beat.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._durations: deque[float] = deque(maxlen=REMEMBERED)
        self._last: dict[int, tuple[int, int, float]] = {}  # rank: incarnation, step, moved
        self._moved = float("-inf")
        self._warming = False
        self._beats: dict[int, float] = {}  # node: time of last beat, oldest first
        self._sent: dict[int, float] = {}
        self._offsets: dict[int, float] = {}  # node: lag of its clock, at most

    @property
    def node_silence(self) -> float:
        """
        The number of seconds without a beat after which a node counts as lost.
        """
        return self._policy.node_silence

    def limit(self) -> float:
        """
        Return how many seconds may pass without progress of any rank.
        """
        if len(self._durations) < LEARNT:
            return self._policy.first_step
        learnt = max(
            self._policy.stall_floor,
            self._policy.stall_factor * median(self._durations),
            3 * max(self._durations),
        )
        return learnt * (self._policy.warming if self._warming else 1.0)

    def resumed(self, at: float) -> None:
        """
        Record that training continues from now on: silence before `at` does not count.
        """
        self._moved = max(self._moved, at)
        self._last.clear()
        self._warming = True

    def expect(self, node: int, at: float) -> None:
        """
        Note that a node is up and will send beats. From now on its silence counts, even if no beat
        of it ever arrives.
        """
        self._beats.setdefault(node, at)

    def heard(self, beat: Beat, at: float) -> float | None:
        """
        Record a beat that arrived at time `at`. Return the seconds of silence if this is a stall,
        else None.

        The silence is measured by the clock of the node: a broker that was away delays beats, and a
        delayed beat does not mean that a rank hangs. The offset between that clock and the local
        clock is taken from the beat with the shortest delivery time.
        """
        self._beats.pop(beat.node, None)
        self._beats[beat.node] = at
        before = self._sent.get(beat.node, beat.at)
        if beat.at < before:  # the node was restarted, and its clock with it
            self._offsets.pop(beat.node, None)
        offset = min(self._offsets.get(beat.node, math.inf), at - beat.at)
        self._offsets[beat.node] = offset
        if beat.at - before > ASLEEP:
            self._moved = max(self._moved, beat.at + offset)
        self._sent[beat.node] = beat.at
        training = [pulse for pulse in beat.pulses if pulse.training]
        for pulse in training:
            last = self._last.get(pulse.rank)
            step = pulse.position.step
            if last is not None and last[0] == pulse.incarnation and step > last[1]:
                self._durations.append((pulse.moved - last[2]) / (step - last[1]))
                self._warming = False
            if last is None or last[:2] != (pulse.incarnation, step):
                self._last[pulse.rank] = (pulse.incarnation, step, pulse.moved)
            self._moved = max(self._moved, pulse.moved + offset)
        silence = beat.at + offset - self._moved
        return silence if training and silence > self.limit() else None

    def silent(self, at: float) -> list[int]:
        """
        Return the nodes that have sent no beat for too long while another node still sends beats.
        Each of them is returned once.
        """
        if not self._beats or at - next(reversed(self._beats.values())) > 1.0:
            return []  # no node is heard: then the bus or this controller is the cause
        # called after every beat: stop at the first node that was heard in time
        late = takewhile(lambda beat: at - beat[1] > self._policy.node_silence, self._beats.items())
        gone = [node for node, _ in late]
        for node in gone:
            del self._beats[node]
        return sorted(gone)
