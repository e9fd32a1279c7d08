"""
Detect silent nodes, and detect that no rank makes progress. A standstill longer than the step times
of the job allow is a stall. The code is pure: it reads no clock and does no I/O.

A job sends tens of thousands of heartbeats, so they are not events of the job machine (the state
machine that makes the decisions of the controller). Only a stall or a silent node is such an event.
"""

import math
from itertools import takewhile

from tft.core.job.policy import Policy
from tft.core.link.newest_move import NEVER, NewestMove
from tft.core.link.step_times import Moves, StepTimes
from tft.protocol.messages import Beat

ASLEEP = 1.0
"""The longest time in seconds between two heartbeats of a running node. A longer gap means that the
whole node was paused, so the gap does not count as a stall of its ranks."""


class HangDetection:
    """
    Detects silent nodes and stalls of one job. The controller passes every heartbeat to this
    object, and learns in return whether the job stands still. `times` are the step times of the
    job.
    """

    def __init__(self, policy: Policy, times: StepTimes) -> None:
        self._policy = policy
        self._times = times
        self._moved = NewestMove()
        self._warming = False
        self._training: set[int] = set()
        """The nodes of which a rank is in its training loop."""
        self._unheard: set[int] = set()
        """The nodes that are up and have sent no heartbeat yet to this controller."""
        # for each node: the local time at which its last heartbeat arrived. The node that has been
        # silent longest comes first
        self._beats: dict[int, float] = {}
        self._sent: dict[int, float] = {}
        self._looked: float | None = None
        """The last time at which silent nodes were looked for. None: never yet."""
        # for each node: the smallest difference seen between the local time at which a heartbeat
        # arrived and the time in the heartbeat, which the node has taken from its own clock
        self._offsets: dict[int, float] = {}

    @property
    def node_silence(self) -> float:
        """
        The number of seconds without a heartbeat after which a node counts as lost.
        """
        return self._policy.node_silence

    @property
    def out(self) -> bool:
        """
        True if no rank is in its training loop. False while a node has sent no heartbeat to this
        controller yet: a controller that has just started does not know what the ranks of that node
        do.
        """
        return not (self._training or self._unheard)

    def limit(self) -> float:
        """
        Return how many seconds the job may stand still before this counts as a stall. The job
        stands still while no rank makes progress. If `out` is True, because no rank is in its
        training loop, the step times are not used.
        """
        learnt = self._policy.stall_floor
        if not self.out:
            if not self._times.known:
                return self._policy.first_step
            learnt = max(
                learnt, self._policy.stall_factor * self._times.median, 3 * self._times.longest
            )
        return learnt * (self._policy.warming if self._warming else 1.0)

    def resumed(self, at: float) -> None:
        """
        Record that training continues at time `at`. The time before `at` does not count as a stall,
        and the first step afterwards may take longer than others.
        """
        self._moved.not_before(at)
        self._times.resumed()
        self._warming = True

    def expect(self, node: int, at: float) -> None:
        """
        Record that a node is up and will send heartbeats. From now on the node counts as lost when
        it is silent for too long, even if no heartbeat of the node has ever arrived.
        """
        self._beats.setdefault(node, at)
        self._unheard.add(node)

    def forget(self, node: int) -> None:
        """
        Record that a node is known to be lost. From now on, the method `silent` does not return it.
        """
        self._beats.pop(node, None)
        self._unheard.discard(node)
        self._training.discard(node)
        self._moved.leave(node)

    def heard(self, beat: Beat, moves: Moves, at: float) -> float | None:
        """
        Record a heartbeat that arrived at time `at`, with its `moves`. Return the seconds since the
        last progress of any rank if they are more than `limit` allows, otherwise None. Leaving the
        training loop counts as progress. Also return None if some ranks train, but no rank of this
        node.

        The time of the heartbeat is taken from the clock of the node, not from its arrival, because
        a restarted broker may deliver heartbeats late although no rank hangs. The offset between
        the node's clock and the local clock is taken from the heartbeat that was delivered fastest.
        """
        self._beats.pop(beat.node, None)
        self._beats[beat.node] = at
        self._unheard.discard(beat.node)
        before = self._sent.get(beat.node, beat.at)
        if beat.at < before:  # the node was rebooted, and its clock began again
            self._offsets.pop(beat.node, None)
        offset = min(self._offsets.get(beat.node, math.inf), at - beat.at)
        self._offsets[beat.node] = offset
        if beat.at - before > ASLEEP:
            self._moved.not_before(beat.at + offset)
        self._sent[beat.node] = beat.at
        if moves.completed:
            self._warming = False
        self._moved.heard(beat.node, moves.newest + offset)
        if moves.training:
            self._training.add(beat.node)
        elif beat.node in self._training:
            self._training.remove(beat.node)
            self._moved.not_before(beat.at + offset)
        if self._moved.at == NEVER:  # no progress was seen yet: count from the first heartbeat
            self._moved.not_before(beat.at + offset)
        silence = beat.at + offset - self._moved.at
        return silence if (moves.training or self.out) and silence > self.limit() else None

    def silent(self, at: float) -> list[int]:
        """
        Return the nodes that have sent no heartbeat for longer than `node_silence` while another
        node still sends heartbeats. Each silent node is returned by one call only.
        """
        blocked = self._looked is not None and at - self._looked > ASLEEP
        self._looked = at
        if blocked:
            # this controller has not run, so heartbeats may have come that it has not read yet
            self._beats = dict.fromkeys(self._beats, at)
        if not self._beats or at - next(reversed(self._beats.values())) > 1.0:
            return []  # no node is heard, so probably the bus or this controller is the cause
        # this method is called after every heartbeat and must be fast. The nodes are sorted by the
        # time of their last heartbeat, so the search stops at the first node that is not late
        late = takewhile(lambda beat: at - beat[1] > self._policy.node_silence, self._beats.items())
        gone = [node for node, _ in late]
        for node in gone:
            self.forget(node)
        return sorted(gone)
