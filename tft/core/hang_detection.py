"""
Notices that nobody moves: learns the job's own step times from the beats and says when the
silence is longer than they allow. Pure; beats come by the ten thousand, so they are judged here
and only the verdict becomes an event of the job machine.
"""

import math
from collections import deque
from statistics import median

from tft.core.policy import Policy
from tft.protocol.messages import Beat

LEARNT = 5
"""Steps seen before their times are believed: the first ones warm caches up."""
ASLEEP = 1.0
"""Seconds between two beats as sent: after more, the whole node was paused, not one rank of it."""
REMEMBERED = 64
"""Steps remembered: enough for a median, few enough to follow a job that changes."""


class HangDetection:
    """
    Fed with every beat; asked for its verdict after each.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._durations: deque[float] = deque(maxlen=REMEMBERED)
        self._last: dict[int, tuple[int, int, float]] = {}  # rank: incarnation, step, moved
        self._moved = float("-inf")
        self._warming = False
        self._beats: dict[int, float] = {}  # node: when it was heard last, the longest silent first
        self._sent: dict[int, float] = {}
        self._offsets: dict[int, float] = {}  # node: what its clock lacks of ours, at most

    def limit(self) -> float:
        """
        How long nobody may move, in seconds.
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
        Training goes on from here: silence before `at` is not held against it.
        """
        self._moved = max(self._moved, at)
        self._last.clear()
        self._warming = True

    def expect(self, node: int, at: float) -> None:
        """
        A node is up, and will beat: from now on its silence counts, even if it was never heard.
        """
        self._beats.setdefault(node, at)

    def heard(self, beat: Beat, at: float) -> float | None:
        """
        Takes a beat that arrived `at`; returns the seconds of silence when it is a stall.

        The silence is taken from the node's own clock: a broker that was away delays beats, and
        a delayed beat is not a rank that hangs. What lies between that clock and ours is known
        from the beat that took the shortest time to come.
        """
        self._beats.pop(beat.node, None)
        self._beats[beat.node] = at
        before = self._sent.get(beat.node, beat.at)
        if beat.at < before:  # the node was started anew, and its clock with it
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
            if last is None or step != last[1] or pulse.incarnation != last[0]:
                self._last[pulse.rank] = (pulse.incarnation, step, pulse.moved)
            self._moved = max(self._moved, pulse.moved + offset)
        silence = beat.at + offset - self._moved
        return silence if training and silence > self.limit() else None

    def silent(self, at: float) -> list[int]:
        """
        The nodes without a beat for too long while another one beats.
        """
        if not self._beats or at - next(reversed(self._beats.values())) > 1.0:
            return []  # nobody is heard: that is the bus, or us
        gone = []
        for node, last in self._beats.items():
            if at - last <= self._policy.node_silence:
                break  # it is asked after every beat: no further than to the first that was heard
            gone.append(node)
        for node in gone:
            del self._beats[node]
        return sorted(gone)
