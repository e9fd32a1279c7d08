"""
Collects from the heartbeats of the nodes how far the ranks of a job have come: their steps, the
duration of a step, and the time of the last progress. Facts are stored for each node, not for each
rank. This module reads no clock, because the caller passes the time to each function.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tft.spi import RankBeat
from tft_prometheus.histogram import Counted, Histogram

SILENT = 10.0
"""A node that has sent no heartbeat for this many seconds is left out of all numbers. After this
time the controller counts a node as lost."""
STEP_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
"""The bounds of the buckets for the time of a step, in seconds: from small tests to the steps of
large models."""
FLOOR = 60.0
"""The smallest limit for the time without progress, in seconds."""
FACTOR = 40.0
"""The limit for the time without progress is this factor times the longest of the last steps. It is
at least twice the limit of the controller, which is 20 times the median step or 3 times the longest
step, whichever is longer. So the controller handles a standstill before the limit is reached."""
FIRST = 660.0
"""The smallest limit for the first step after a start or an incident, in seconds. The controller
waits 600 s for the first step of a job."""
WARMING = 10.0
"""The factor by which the first step after an incident may take longer. The controller uses the
same factor."""
LEARNT = 5
"""The number of steps that must be measured before the limit depends on step times. The controller
uses the same number."""
RECENT = 64
"""The number of last step times from which the limit is computed. The controller uses the same
number."""
ANNOUNCED = 1.0
"""A rank announces a phase without progress, such as a checkpoint, by reporting a time of progress
in the future. A time counts as in the future if it is more than this many seconds later than the
arrival of the heartbeat."""
STEPS_AHEAD = 3
"""If the reported time of progress seems to be in the future in this many steps in a row, no phase
was announced. Then the difference of the clocks (`_Node.lead`) was estimated wrongly, from
heartbeats that came late or from ranks that stood still, so it is estimated anew."""
REBOOTED = 3600.0
"""If the clock of a node has gone back by more than this many seconds, the node was rebooted, so
the difference of the clocks is estimated anew."""


@dataclass(slots=True)
class _Node:
    """
    The last heartbeat of one node.
    """

    at: float = -math.inf
    """The time at which the last heartbeat of the node arrived, on the clock of the controller."""
    ranks: int = 0
    training: int = 0
    """The number of ranks of the node that are inside the user's function `train`."""
    lowest: int = 0
    highest: int = 0
    """`lowest` and `highest`: the last completed step of the slowest and of the fastest training
    rank."""
    moved: float = -math.inf
    """The time of the last progress of any training rank of the node, on the clock of the node."""
    seen: float = -math.inf
    """The time at which the heartbeat that reported the progress in `moved` arrived, on the clock
    of the controller."""
    progress: float = -math.inf
    """The time of the last progress, on the clock of the controller. Normally this is the time in
    `seen`. It is a time in the future if a rank has announced a phase without progress, such as a
    checkpoint."""
    lead: float | None = None
    """How many seconds the clock of the node is ahead of the clock of the controller. The estimate
    comes from the heartbeat that was delivered fastest. None while there is no estimate."""
    jumps: int = 0
    """How many steps in a row had a time of progress in the future, which normally announces a
    phase without progress. Many such steps mean that `lead` is wrong (see `STEPS_AHEAD`)."""
    jumped: int = -1
    """The newest step that is counted in `jumps`, so that no step is counted twice."""

    def move(self, moved: float, step: int, at: float) -> None:
        """
        Record progress that a heartbeat has reported. The progress happened at the time `moved` on
        the node's clock. The heartbeat arrived at the time `at` on the controller's clock. `step`
        is the last completed step.
        """
        self.moved, self.seen, lead = moved, at, moved - at
        if self.lead is not None and lead > self.lead + ANNOUNCED:
            self.jumps += step != self.jumped
            self.jumped = step
            if self.jumps < STEPS_AHEAD:
                self.progress = at + lead - self.lead
                return
        self.progress, self.jumps, self.jumped = at, 0, -1
        if self.lead is None or lead > self.lead or lead < self.lead - REBOOTED:
            self.lead = lead


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """
    The numbers of nodes and ranks that sent a heartbeat within the last `SILENT` seconds, and the
    steps of the ranks that train.
    """

    nodes: int
    ranks: int
    training: int
    lowest: int | None
    """The last step that all training ranks have completed. None if no rank has trained yet."""
    highest: int | None
    """The last step that the fastest rank has completed. None if no rank has trained yet."""


class Positions:
    """
    How far the ranks of one job have come. All times are in seconds on the clock of the controller.
    """

    def __init__(self, at: float) -> None:
        self._nodes: dict[int, _Node] = {}
        self._heard = self._resumed = at
        self._front: tuple[int, float] | None = None
        """The highest step that a rank has completed, and the time at which the controller learnt
        of it. The duration of the next step is measured from this time. None if the measurement
        begins anew with the next heartbeat."""
        self._measures = False
        self._first = True
        """True until the first step after a start or an incident was measured. This step is slow,
        so another limit applies to it."""
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._steps = Histogram(STEP_BOUNDS)
        self._span: tuple[int, int] | None = None

    def measure(self, on: bool, at: float) -> None:
        """
        With `on=True`, measure the duration of steps from the time `at`, because the ranks train
        from now on. With `on=False`, stop measuring.
        """
        if on and not self._measures:
            self._resumed, self._first = at, True
        self._measures = on
        if not on:
            self._front = None

    def heard(self, node: int, ranks: Sequence[RankBeat], at: float) -> None:
        """
        Update the positions by the heartbeat of a node. The cost grows only with the number of
        ranks of this node.
        """
        training, lowest, highest, moved = 0, 1 << 62, -1, -math.inf
        for rank in ranks:
            if rank.training:
                training += 1
                step = rank.step
                if step < lowest:
                    lowest = step
                if step > highest:
                    highest = step
                if rank.moved > moved:
                    moved = rank.moved
        known = self._nodes.get(node)
        if known is None:
            known = self._nodes[node] = _Node()
        self._heard = known.at = at
        known.ranks, known.training = len(ranks), training
        if not training:
            return
        known.lowest, known.highest = lowest, highest
        if moved != known.moved:
            known.move(moved, highest, at)
        if self._measures:
            self._advance(highest, at)

    def _advance(self, step: int, at: float) -> None:
        """
        Measure the duration of the steps that were completed since the last increase of the highest
        step. `step` is the highest step of a node. Do nothing if another node is already further.
        """
        if self._front is None:
            self._front = step, at
        elif step > self._front[0]:
            before, since = self._front
            duration = (at - since) / (step - before)
            self._steps.add(duration, step - before)
            if not self._first:  # the first step is slow, so the limit must not depend on it
                self._durations.append(duration)
            self._front, self._first = (step, at), False

    def silence(self, at: float) -> float:
        """
        Return the seconds since the last heartbeat of any node.
        """
        return max(0.0, at - self._heard)

    def stillness(self, at: float) -> float:
        """
        Return the seconds since the last progress of any training rank. The time before the ranks
        could begin to train does not count. An announced phase without progress, such as a
        checkpoint, does not count either.
        """
        nodes = self._nodes.values()
        # `progress` is the time of the last progress. It lies in the future while a rank has
        # announced a long phase, so it counts only for nodes with a rank that trains.
        last = [node.progress if node.training else node.seen for node in nodes]
        return max(0.0, at - max([self._resumed, *last]))

    def limit(self) -> float:
        """
        Return how many seconds the ranks may train without progress before the job counts as
        unhealthy.
        """
        if len(self._durations) < LEARNT:
            return FIRST
        usual = max(FLOOR, FACTOR * max(self._durations))
        return max(FIRST, WARMING * usual) if self._first else usual

    def count(self, at: float) -> Counts:
        """
        Return how many nodes and ranks there are, and the steps of the ranks that train. While no
        rank trains, the steps are those of the time when ranks last trained.
        """
        present = [node for node in self._nodes.values() if at - node.at <= SILENT]
        training = [node for node in present if node.training]
        if training:
            lowest = min(node.lowest for node in training)
            self._span = lowest, max(node.highest for node in training)
        return Counts(
            nodes=len(present),
            ranks=sum(node.ranks for node in present),
            training=sum(node.training for node in training),
            lowest=None if self._span is None else self._span[0],
            highest=None if self._span is None else self._span[1],
        )

    def steps(self) -> Counted:
        """
        Return the histogram of the time of a step.
        """
        return self._steps.read()
