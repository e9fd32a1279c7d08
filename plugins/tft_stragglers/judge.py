"""
Decides which ranks are slow, from the times that the ranks themselves have measured. This module
reads no clock and does no I/O.

A step takes equally long on all ranks, because all ranks wait for the slowest one in its
collectives. So ranks are compared by their own work: the step without the time in which they
waited.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from tft.spi import RankBeat, Remark, StepWork

PARTS = ("input", "compute", "update")
"""The parts of a rank's own work in a step. A remark about a slow rank names one of them as the
cause."""
WINDOW = 16
"""The number of last steps from which a rank is judged."""
CERTAIN = 4
"""A rank is reported as slow when this many judgements in a row have found it slow. There is one
judgement in each step, so a rank that becomes slow is reported within `WINDOW` + `CERTAIN`
steps."""
MOST = 13
"""The excess of a rank is the time by which its work takes longer than that of other ranks. A rank
is slow only if its excess is more than half of the limit in this many of the last `WINDOW` steps.
So a few very long steps do not make a rank slow. The number is less than `WINDOW`, because in some
steps other ranks may be slow too."""
NOISE = 1.5
"""The median excess of a slow rank must be at least this multiple of the standard deviation of its
excess from step to step. Over 16 steps this multiple is about five times the error of the
median."""
VARIED = 64
"""The number of last steps from which the standard deviation of the excess is computed. It is
larger than `WINDOW`, because a deviation that is computed from few steps is sometimes far too
small."""
BASELINE = 32
"""The number of first steps from which the usual times of a rank without peers are computed. Peers
are the ranks that do the same work."""
FEW = 8
"""In a group of at most this many ranks, a rank is compared with the median of the others. In a
larger group, it is compared with the median of all, which is nearly the same and is computed only
once."""
BEHIND = 64
"""If other ranks are this many steps further than the newest step of a rank, the judgement of a
step no longer waits for that rank: the rank has left the job, or its heartbeats are lost."""
_NORMAL = 1.0484
"""The factor that converts the median of the differences between successive values to the standard
deviation of the values, for a normal distribution."""

Times = tuple[float, ...]
"""The seconds of each part of a step, in the order of `PARTS`."""


class _Part:
    """
    How long one part of a rank's work (such as `input`) takes in the last steps, compared with
    other ranks.
    """

    __slots__ = ("changes", "count", "excess", "over")

    def __init__(self) -> None:
        self.excess: deque[float] = deque(maxlen=WINDOW)
        """How many seconds longer the part took than on other ranks, for each of the last steps."""
        self.changes: deque[float] = deque(maxlen=VARIED)
        """By how many seconds the excess has changed since the previous step, for each of the last
        steps. From these changes the standard deviation is computed. They show how much the times
        vary even if the rank has become slow meanwhile."""
        self.over: deque[bool] = deque(maxlen=WINDOW)
        """Whether the excess may be more than half of the limit, for each of the last steps. This
        is a cheap first test, with the lowest limit that can apply."""
        self.count = 0
        """The number of values True in `over`. The median, which takes time, is computed only if
        the number is at least `MOST`, which is rare."""

    def note(self, seconds: float, least: float) -> None:
        """
        Record that the part took `seconds` longer than on other ranks in a step. `least` is the
        lowest limit for the excess in seconds.
        """
        if self.excess:
            self.changes.append(abs(seconds - self.excess[-1]))
        self.excess.append(seconds)
        over = seconds > least / 4
        if len(self.over) == WINDOW:
            self.count -= self.over[0]
        self.count += over
        self.over.append(over)

    def is_slow(self, least: float, share: float = 1.0) -> bool:
        """
        Return whether the rank is slow in this part. `least` is the lowest limit for the excess in
        seconds. All limits are multiplied by `share`. With a `share` below 1, a rank that was
        reported as slow must become clearly faster before it counts as fast again.
        """
        if self.count < MOST or len(self.excess) < WINDOW:
            return False
        limit = share * max(least, NOISE * _NORMAL * median(self.changes))
        return median(self.excess) > limit and sum(each > limit / 2 for each in self.excess) >= MOST


@dataclass(slots=True)
class _Rank:
    """
    The facts that are known about the present process of a rank.
    """

    incarnation: int
    node: int
    peers: tuple[int, ...] | None = None
    """The ranks with which the rank is compared, from its last heartbeat. None until its first
    heartbeat was handled."""
    group: "_Group | None" = None
    """The group to which the rank belongs. None until its first heartbeat was handled."""
    parts: tuple[_Part, ...] = field(default_factory=lambda: tuple(_Part() for _ in PARTS))
    first: list[Times] = field(default_factory=list)
    """The times of the first steps of a rank without peers. `usual` is computed from these
    times."""
    usual: Times | None = None
    """The median times of the first `BASELINE` steps of a rank without peers, with which its later
    steps are compared. None until these steps were measured."""
    found: tuple[int | None, int] = (None, 0)
    """The result of the last judgement, and the number of judgements in a row with this result. The
    result is the index of the part in which the rank was slow, or None if the rank was not slow."""
    judged: int = 0
    """The newest step after which it was decided whether the rank is slow."""
    named: int | None = None
    """The index of the part for which the rank was reported as slow. None if the rank is not
    reported as slow now."""

    def learn(self, times: Times) -> None:
        """
        Record the times of a step of a rank without peers. After `BASELINE` steps, compute the
        usual times of the rank.
        """
        if self.usual is None:
            self.first.append(times)
            if len(self.first) == BASELINE:
                self.usual = _medians(self.first)
                self.first.clear()


@dataclass(slots=True)
class _Group:
    """
    Ranks that are compared with each other.
    """

    peers: tuple[int, ...]
    """All ranks of the group, also ranks that have sent no heartbeat yet. Empty for the one group
    that consists of all ranks without peers."""
    members: dict[int, _Rank] = field(default_factory=dict)
    """The ranks of the group that have sent heartbeats."""
    steps: dict[int, dict[int, Times]] = field(default_factory=dict)
    """The times of the ranks in each step that is not judged yet, by step and rank."""
    absent: set[int] = field(default_factory=set)
    """The ranks for which a judgement no longer waits, because they have left the job or their
    heartbeats are lost."""

    def add(self, rank: int, work: StepWork) -> Iterator[int]:
        """
        Add the times of `rank` in a step. Yield the steps that can be judged now, because the times
        of all ranks are known (except those in `absent`).
        """
        self.absent.discard(rank)
        times = self.steps.setdefault(work.step, {})
        times[rank] = (work.input, work.compute, work.update)
        if self._is_complete(times):
            yield work.step
        elif len(self.steps) > BEHIND:
            there = self.steps[min(self.steps)]
            self.absent.update(r for r in self.peers or self.members if r not in there)
            yield from sorted(s for s, times in self.steps.items() if self._is_complete(times))

    def _is_complete(self, times: Mapping[int, Times]) -> bool:
        return len(times) >= len(self.peers or self.members) - len(self.absent)

    def take(self, step: int) -> Mapping[int, Times]:
        """
        Return the times of all ranks in `step`, by rank. Forget the times of this step and of all
        earlier steps.
        """
        times = self.steps[step]
        self.steps = {s: each for s, each in self.steps.items() if s > step}
        return times

    def leave(self, rank: int) -> None:
        """
        Remove a rank that belongs to another group from now on.
        """
        del self.members[rank]
        self.absent.discard(rank)


class Judge:
    """
    Finds the slow ranks of one job.

    A rank is compared with its peers, which do the same work because they hold copies of the same
    shards. A rank without peers, such as the only copy of a pipeline stage, is compared with its own
    first steps, and with how the times of all other such ranks have changed since. So no rank is
    reported when all ranks become slow, or when one stage has more work than others.
    """

    def __init__(self, excess: float) -> None:
        """
        `excess` is the limit as a fraction of the work of a step: a rank is slow if a part of its
        work takes longer than on other ranks by more than this fraction.
        """
        self._excess = excess
        self._ranks: dict[int, _Rank] = {}
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._gone: list[int] = []
        """Ranks that were peers of another rank until the peers of that rank changed. They have
        probably left the job, so `heard` returns the remark that they are no longer slow."""

    def heard(self, node: int, ranks: Sequence[RankBeat]) -> list[Remark]:
        """
        Record the times of the ranks of a node from a heartbeat. Return a remark `rank_slow` for
        each rank that has become slow, and a remark `rank_slow_over` for each rank that is no
        longer slow.
        """
        remarks: list[Remark] = []
        for beat in ranks:
            group = self._group(node, beat)
            for work in beat.work:
                for step in group.add(beat.rank, work):
                    remarks.extend(self._judge(group, step))
            for rank in [*self._gone, *group.absent]:
                remarks.extend(self._left(rank))
            self._gone.clear()
        return remarks

    def _left(self, rank: int) -> Iterator[Remark]:
        """
        Yield a remark that `rank` is no longer slow, because its heartbeats have stopped or it has
        left the job. Yield nothing if the rank was not reported as slow.
        """
        known = self._ranks.get(rank)
        if known is not None and known.named is not None:
            known.named = None
            facts = {"rank": rank, "node": known.node, "step": known.judged}
            yield Remark(event="rank_slow_over", facts=facts)

    def _group(self, node: int, beat: RankBeat) -> _Group:
        """
        Return the group of the rank that has sent `beat`. If the rank has a new process, forget the
        times of its earlier process, except its usual times. If the rank has other peers than
        before, move it to another group.
        """
        known = self._ranks.get(beat.rank)
        # `beat.peers` is the same object until the peers change. So compare with `is`: comparing or
        # hashing thousands of peers for each rank would take long.
        if (
            known is not None
            and known.group is not None
            and known.incarnation == beat.incarnation
            and known.peers is beat.peers
        ):
            return known.group
        if known is None or known.incarnation != beat.incarnation:
            before, known = known, _Rank(beat.incarnation, node)
            if before is not None:
                known.named, known.peers, known.usual = before.named, before.peers, before.usual
            self._ranks[beat.rank] = known
        known.node = node
        if known.peers is not None and known.peers != beat.peers:
            old = self._groups[known.peers]
            old.leave(beat.rank)
            # Ranks of the old group that are no longer peers of this rank have probably left the
            # job. If they have not, their next heartbeats name their new peers.
            gone = [rank for rank in old.members if beat.peers and rank not in beat.peers]
            self._gone.extend(gone)
            self._groups = {peers: each for peers, each in self._groups.items() if each.members}
        known.peers = beat.peers
        group = self._groups.get(beat.peers)
        if group is None:
            group = self._groups[beat.peers] = _Group(beat.peers)
        group.members[beat.rank] = known
        known.group = group
        return group

    def _judge(self, group: _Group, step: int) -> Iterator[Remark]:
        """
        Decide for each rank of a group whether it is slow, after all of them have computed `step`.
        """
        times = {r: each for r, each in group.take(step).items() if r in group.members}
        for rank, expected in _expected(group, times).items():
            yield from self._judge_rank(rank, step, times[rank], expected)

    def _judge_rank(self, rank: int, step: int, times: Times, expected: Times) -> Iterator[Remark]:
        """
        Decide after a step whether a rank is slow. Yield a remark if the rank has become slow or is
        no longer slow. `times` are the times of the rank in this step. `expected` are the times
        that are expected of the rank in this step (see `_expected`).
        """
        known, work = self._ranks[rank], sum(expected)
        known.judged = step
        least = self._excess * work
        for part, seconds, usual in zip(known.parts, times, expected, strict=True):
            part.note(seconds - usual, least)
        cause = None
        if any(part.count >= MOST for part in known.parts):
            slow = [index for index, part in enumerate(known.parts) if part.is_slow(least)]
            cause = max(slow, key=lambda index: median(known.parts[index].excess), default=None)
        elif known.named is None:
            known.found = None, 0
            return
        if len(known.parts[0].excess) < WINDOW:
            return  # too few steps are known to decide, for example after the process is replaced
        known.found = cause, known.found[1] + 1 if cause == known.found[0] else 1
        if known.found[1] < CERTAIN or known.named == cause:
            return
        if (
            cause is None
            and known.named is not None
            and known.parts[known.named].is_slow(least, 0.5)
        ):
            return
        known.named = cause
        facts: dict[str, object] = {"rank": rank, "node": known.node, "step": step}
        if cause is not None:
            seconds = median(known.parts[cause].excess)
            facts |= {
                "cause": PARTS[cause],
                "seconds": round(seconds, 6),
                "percent": round(100 * seconds / work, 1),
                "compared_with": "peers" if known.peers else "its own first steps",
            }
        yield Remark(event="rank_slow" if cause is not None else "rank_slow_over", facts=facts)


def _medians(times: Iterable[Times]) -> Times:
    return tuple(map(median, zip(*times, strict=True)))


def _expected(group: _Group, times: Mapping[int, Times]) -> Mapping[int, Times]:
    """
    Return the times that are expected of each rank in a step, by rank. `times` has the measured
    times of each rank.

    The expected times of a rank with peers are the median times of its peers. The expected times of
    a rank without peers are its own usual times, multiplied by a factor. If other ranks without
    peers have become slower, the factor says by how much. Otherwise it is 1. Ranks whose usual
    times are not known yet are left out.
    """
    if not group.peers:
        return _expected_alone(group, times)
    if len(times) > FEW:
        return dict.fromkeys(times, _medians(times.values()))
    # leave out the rank itself, because in a median of few ranks it would hide half of its excess
    return {
        rank: _medians(each for other, each in times.items() if other != rank)
        for rank in times
        if len(times) > 1
    }


def _expected_alone(group: _Group, times: Mapping[int, Times]) -> Mapping[int, Times]:
    for rank, each in times.items():
        group.members[rank].learn(each)
    known = {r: usual for r in times if (usual := group.members[r].usual) is not None}
    changes = {r: sum(times[r]) / max(1e-9, sum(usual)) for r, usual in known.items()}
    everybody = median(changes.values()) if changes else 1.0
    expected: dict[int, Times] = {}
    for rank, usual in known.items():
        change = everybody
        if 1 < len(changes) <= FEW:
            change = median(each for other, each in changes.items() if other != rank)
        # do not expect a rank to become faster only because other ranks have become faster
        expected[rank] = tuple(max(1.0, change) * seconds for seconds in usual)
    return expected
