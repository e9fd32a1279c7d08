"""
Decides which ranks are slow, from the times that the ranks themselves have measured. The code is
pure: it reads no clock and does no I/O.

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
"""The parts of a rank's own work in a step. They are also the causes that are named."""
WINDOW = 16
"""The number of last steps from which a rank is judged."""
CERTAIN = 4
"""A rank is named when it was found slow after so many steps in a row. So a rank that becomes slow
is named within `WINDOW` + `CERTAIN` steps."""
MOST = 13
"""The number of steps of a window in which the excess of a slow rank must be more than half of the
limit. So a rank is not named for some very long steps. The number is less than `WINDOW`, because in
some steps other ranks may be slow too."""
NOISE = 1.5
"""The smallest excess of a slow rank, as a multiple of the standard deviation of its excess. Over 16
steps this is about five times the error of the median."""
VARIED = 64
"""The number of last steps from which the deviation is computed. It is larger than `WINDOW`, because
a deviation of few steps is sometimes far too small."""
BASELINE = 32
"""The number of steps from which the usual times of a rank without peers are learnt."""
FEW = 8
"""Up to so many ranks, a rank is compared with the median of the others. With more, it is compared
with the median of all, which is nearly the same and is computed only once."""
BEHIND = 64
"""A rank whose newest step is so many steps older than that of others is not waited for. It has
left the job, or its heartbeats are lost."""
_NORMAL = 1.0484
"""In a normal distribution, the standard deviation is the median of the differences between
successive values times this factor."""

Times = Mapping[str, float]
"""The seconds of each part of a step."""


@dataclass(slots=True)
class _Rank:
    """
    What is known about the present process of a rank.
    """

    incarnation: int
    node: int
    peers: tuple[int, ...] = ()
    steps: dict[int, Times] = field(default_factory=dict)
    """The times of the steps that are not judged yet."""
    newest: int = 0
    """The newest step whose times are known."""
    excess: dict[str, deque[float]] = field(
        default_factory=lambda: {part: deque(maxlen=WINDOW) for part in PARTS}
    )
    """For each part: by how many seconds it took longer than on other ranks, in the last steps."""
    changes: dict[str, deque[float]] = field(
        default_factory=lambda: {part: deque(maxlen=VARIED) for part in PARTS}
    )
    """For each part: by how many seconds the excess has changed from step to step. Changes show how
    much the times vary, even if the rank has become slow meanwhile."""
    first: list[Times] = field(default_factory=list)
    """The first steps of a rank without peers, until its usual times are learnt from them."""
    usual: Times | None = None
    """The usual times of a rank without peers. None until they are learnt."""
    found: tuple[str, int] = ("", 0)
    """The part that was found slow last, and after how many steps in a row."""
    named: str = ""
    """The cause for which the rank was named as slow; empty if it is not slow."""

    def add(self, work: StepWork) -> None:
        self.newest = max(self.newest, work.step)
        self.steps[work.step] = {part: getattr(work, part) for part in PARTS}
        self.steps.pop(work.step - 2 * BEHIND, None)

    def note(self, part: str, seconds: float) -> None:
        """
        Note by how many seconds a part took longer than on other ranks in a step.
        """
        if self.excess[part]:
            self.changes[part].append(abs(seconds - self.excess[part][-1]))
        self.excess[part].append(seconds)

    def learn(self, times: Times) -> None:
        """
        Learn the usual times of a rank without peers from its first steps.
        """
        if self.usual is None:
            self.first.append(times)
            if len(self.first) == BASELINE:
                self.usual = _medians(self.first)
                self.first.clear()


class Judge:
    """
    Finds the slow ranks of one job.

    A rank is compared with its peers, which do the same work because they hold copies of the same
    shards. A rank without peers, such as the only copy of a pipeline stage, is compared with its own
    first steps, and with how the times of all other such ranks have changed since. So nobody is
    named when all ranks become slow, or when one stage has more work than others.
    """

    def __init__(self, excess: float) -> None:
        """
        A rank is slow if it takes longer than others by more than the fraction `excess` of the work
        of a step.
        """
        self._excess = excess
        self._ranks: dict[int, _Rank] = {}

    def heard(self, node: int, ranks: Sequence[RankBeat]) -> list[Remark]:
        """
        Take the times of the ranks of a node from a heartbeat. Return a remark for each rank that
        is slow from now on (`rank_slow`), and for each rank that no longer is (`rank_slow_over`).
        """
        groups = set()
        for beat in ranks:
            known = self._ranks.get(beat.rank)
            if known is None or known.incarnation != beat.incarnation:
                named = "" if known is None else known.named
                known = self._ranks[beat.rank] = _Rank(beat.incarnation, node, named=named)
            known.node, known.peers = node, beat.peers
            for work in beat.work:
                known.add(work)
            if beat.work:
                groups.add(beat.peers)
        return [remark for peers in groups for remark in self._judge(peers)]

    def _judge(self, peers: tuple[int, ...]) -> Iterator[Remark]:
        """
        Judge the ranks with these peers by the steps that all of them have computed since the last
        judgement.
        """
        if not self._ranks.keys() >= set(peers):
            return  # some ranks have not begun yet
        members = {
            rank: self._ranks[rank]
            for rank in peers or self._ranks
            if self._ranks[rank].peers == peers
        }
        newest = max(known.newest for known in members.values())
        members = {r: known for r, known in members.items() if known.newest > newest - BEHIND}
        complete = min(known.newest for known in members.values())
        common = set.intersection(*(set(known.steps) for known in members.values()))
        for step in sorted(common):
            times = {rank: known.steps[step] for rank, known in members.items()}
            for rank, expected in _expected(members, times, alone=not peers).items():
                yield from self._judge_step(rank, step, times[rank], expected)
        for known in members.values():
            known.steps = {step: each for step, each in known.steps.items() if step > complete}

    def _judge_step(self, rank: int, step: int, times: Times, expected: Times) -> Iterator[Remark]:
        """
        Judge a rank after a step. `expected` has the times that others have needed for this step.
        """
        known = self._ranks[rank]
        for part in PARTS:
            known.note(part, times[part] - expected[part])
        work = sum(expected.values())
        cause = max(PARTS, key=lambda part: median(known.excess[part]))
        if not self._is_slow(known, cause, work):
            cause = ""
        known.found = cause, known.found[1] + 1 if cause == known.found[0] else 1
        if known.found[1] < CERTAIN or known.named == cause:
            return
        if not cause and self._is_slow(known, known.named, work, 0.5):
            return
        known.named = cause
        facts: dict[str, object] = {"rank": rank, "node": known.node, "step": step}
        if cause:
            seconds = median(known.excess[cause])
            facts |= {
                "cause": cause,
                "seconds": round(seconds, 6),
                "percent": round(100 * seconds / work, 1),
                "compared_with": "peers" if known.peers else "its own first steps",
            }
        yield Remark(event="rank_slow" if cause else "rank_slow_over", facts=facts)

    def _is_slow(self, known: _Rank, part: str, work: float, share: float = 1.0) -> bool:
        """
        Return whether a rank is slow because of this part. `work` is the time of a whole step. With
        `share` 0.5, half of the limits apply.
        """
        excess = known.excess[part]
        if len(excess) < WINDOW:
            return False
        deviation = _NORMAL * median(known.changes[part])
        limit = share * max(self._excess * work, NOISE * deviation)
        return median(excess) > limit and sum(each > limit / 2 for each in excess) >= MOST


def _medians(times: Iterable[Times]) -> Times:
    every = list(times)
    return {part: median(each[part] for each in every) for part in PARTS}


def _expected(
    members: Mapping[int, _Rank], times: Mapping[int, Times], *, alone: bool
) -> dict[int, Times]:
    """
    Return for each rank the times that the others let expect for a step. If the ranks have no peers
    (`alone`), these are the usual times of the rank itself, longer or shorter by as much as those of
    other ranks. Ranks whose usual times are not known yet are left out.
    """
    if not alone:
        if len(members) > FEW:
            everybody = _medians(times.values())
            return dict.fromkeys(members, everybody)
        # without the rank itself: with it, the median of few ranks would hide half of its excess
        return {
            rank: _medians(each for other, each in times.items() if other != rank)
            for rank in members
            if len(members) > 1
        }
    for rank, known in members.items():
        known.learn(times[rank])
    known_times = {rank: known.usual for rank, known in members.items() if known.usual is not None}
    if not known_times:
        return {}
    changes = {
        rank: sum(times[rank].values()) / max(1e-9, sum(usual.values()))
        for rank, usual in known_times.items()
    }
    expected: dict[int, Times] = {}
    for rank, usual in known_times.items():
        others = [change for other, change in changes.items() if other != rank]
        change = median(others) if 0 < len(others) < FEW else median(changes.values())
        expected[rank] = {part: change * seconds for part, seconds in usual.items()}
    return expected
