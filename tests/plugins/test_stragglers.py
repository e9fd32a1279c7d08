"""
Which ranks the plugin names as slow, from the times of their steps.
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tft_stragglers.judge import BEHIND, CERTAIN, WINDOW, Judge

from tft.spi import RankBeat, Remark, StepWork

PARTS = {"input": 0.010, "compute": 0.100, "update": 0.020}
Slow = Callable[[int, int, str], float]
"""Returns for a rank, a step and a part by which factor it takes longer."""


def times(step: int, parts: Mapping[str, float]) -> StepWork:
    return StepWork(step=step, waited=0.1, **parts)


def beats(
    steps: Iterable[int],
    ranks: Iterable[int],
    slow: Slow,
    *,
    noise: float = 0.0,
    peers: Mapping[int, tuple[int, ...]] | None = None,
    seed: int = 1,
) -> Iterable[RankBeat]:
    """
    Yield a beat of each rank for each step. Times vary by the fraction `noise`.
    """
    draw = random.Random(seed)
    group = tuple(ranks)
    for step in steps:
        for rank in group:
            parts = {
                part: seconds * slow(rank, step, part) * (1 + noise * draw.gauss(0, 1))
                for part, seconds in PARTS.items()
            }
            yield RankBeat(
                rank=rank, incarnation=0, step=step, training=True, moved=float(step),
                work=(times(step, parts),), peers=group if peers is None else peers[rank],
            )  # fmt: skip


def judged(stream: Iterable[RankBeat], percent: float = 5.0) -> list[Remark]:
    """
    Return all remarks of a judge about these beats, each sent by a node of its own.
    """
    judge = Judge(percent / 100)
    return [remark for beat in stream for remark in judge.heard(beat.rank, [beat])]


def slowed(rank: int, part: str, factor: float, since: int = 1) -> Slow:
    """
    Return a function that makes one part of one rank take longer from the step `since` on.
    """
    return lambda r, step, p: factor if (r, p) == (rank, part) and step >= since else 1.0


ALONE = dict.fromkeys(range(4), ())
STAGES = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize(
    ("part", "factor"),
    [("input", 2.0), ("compute", 1.1), ("compute", 1.3), ("update", 1.5), ("update", 2.0)],
)
@pytest.mark.parametrize("peers", [None, STAGES, ALONE])
@pytest.mark.parametrize("rank", range(4))
def test_a_slow_rank_is_named_within_twenty_steps(
    rank: int, peers: Mapping[int, tuple[int, ...]] | None, part: str, factor: float, noise: float
) -> None:
    """When a part of a rank's work becomes slow, then the rank is named with this cause, within 20
    steps, and no other rank is."""
    stream = beats(
        range(1, 121), range(4), slowed(rank, part, factor, 90), noise=noise, peers=peers
    )
    remarks = judged(stream)
    named = [(each.facts["rank"], each.facts["cause"]) for each in remarks]
    assert named == [(rank, part)]
    facts = remarks[0].facts
    assert 90 < facts["step"] < 90 + WINDOW + CERTAIN  # type: ignore[operator]  # an int
    assert facts["seconds"] == pytest.approx(PARTS[part] * (factor - 1), rel=0.5)
    assert facts["compared_with"] == ("its own first steps" if peers is ALONE else "peers")


def test_a_rank_that_is_slow_from_the_beginning_is_named() -> None:
    """When a rank with peers is slow from its first step on, then it is named within 20 steps."""
    [remark] = judged(beats(range(1, 60), range(4), slowed(3, "compute", 1.3)))
    assert (remark.event, remark.facts["rank"], remark.facts["step"]) == ("rank_slow", 3, 19)


def test_a_rank_that_recovers_is_said_to() -> None:
    """When a slow rank is fast again, then a remark says so, once."""

    def slow(rank: int, step: int, part: str) -> float:
        return 1.5 if rank == 1 and part == "compute" and 20 <= step < 80 else 1.0

    remarks = judged(beats(range(1, 200), range(4), slow, noise=0.02))
    assert [(each.event, each.facts["rank"]) for each in remarks] == [
        ("rank_slow", 1),
        ("rank_slow_over", 1),
    ]


def everybody(rank: int, step: int, part: str) -> float:
    return 1.7 if step > 500 else 1.0


def heavier(rank: int, step: int, part: str) -> float:
    return 2.5 if rank >= 2 else 1.0


def long_sequences(rank: int, step: int, part: str) -> float:
    # another rank has a long sequence in each step, at random
    return 3.0 if random.Random(1000 * step).randrange(4) == rank and part == "compute" else 1.0


def evaluation(rank: int, step: int, part: str) -> float:
    return 50.0 if rank == 0 and part == "input" and step % 20 == 0 else 1.0


QUIET: list[tuple[str, Slow, Mapping[int, tuple[int, ...]] | None]] = [
    ("all ranks become slow", everybody, None),
    ("all ranks become slow, without peers", everybody, ALONE),
    ("a stage is heavier", heavier, STAGES),
    ("a stage is heavier, without peers", heavier, ALONE),
    ("long sequences", long_sequences, None),
    ("long sequences, without peers", long_sequences, ALONE),
    ("one rank evaluates", evaluation, None),
    ("nothing", lambda *_: 1.0, None),
]


@pytest.mark.parametrize("noise", [0.02, pytest.param(0.2, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("slow", "peers"), [row[1:] for row in QUIET], ids=[row[0] for row in QUIET]
)
def test_nobody_is_named_in_ten_thousand_steps(
    slow: Slow, peers: Mapping[int, tuple[int, ...]] | None, noise: float
) -> None:
    """When no rank is slower than others for long, then nobody is named in 10,000 steps, whatever
    the times of all ranks are and how much they vary."""
    assert judged(beats(range(1, 10_001), range(4), slow, noise=noise, peers=peers)) == []


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    """When a rank sends no more times, then the others are judged without it."""
    stream = [
        beat
        for beat in beats(range(1, 300), range(4), slowed(2, "compute", 1.5, 200))
        if beat.rank != 0 or beat.step < 50
    ]
    [remark] = judged(stream)
    assert (remark.facts["rank"], remark.facts["cause"]) == (2, "compute")


def test_a_new_process_is_judged_by_its_own_steps() -> None:
    """When a process replaces a slow one, then the times of the old process do not count against
    it, and the remark says that the rank is no longer slow."""
    slow = slowed(2, "compute", 1.5)
    stream = list(beats(range(1, 41), range(4), slow))
    fresh = beats(range(41, 100), range(4), lambda *_: 1.0)
    stream += [RankBeat(
        rank=beat.rank, incarnation=int(beat.rank == 2), step=beat.step, training=True,
        moved=beat.moved, work=beat.work, peers=beat.peers) for beat in fresh]  # fmt: skip
    assert [each.event for each in judged(stream)] == ["rank_slow", "rank_slow_over"]


def test_little_is_kept_of_a_job_that_is_not_judged() -> None:
    """When a rank sends times and its peers send none, then only the last steps are kept."""
    judge = Judge(0.05)
    quiet = RankBeat(rank=1, incarnation=0, step=0, training=True, moved=0.0, peers=(0, 1))
    judge.heard(0, [quiet])
    for beat in beats(range(1, 2000), [0], lambda *_: 1.0, peers={0: (0, 1)}):
        assert judge.heard(0, [beat]) == []
    assert len(judge._groups[0, 1].steps) <= BEHIND


# ---------------------------------------------------------------- recorded jobs

TRACES = Path(__file__).with_name("straggler_traces.json")
"""Three jobs that ByteDance has recorded and published (ByteDance-Seed/StragglerAnalysis, Apache
License 2.0): per rank, the seconds of its forward and backward passes (`compute`) and of its
optimizer (`update`), summed for each recorded step. Ranks are numbered by replica and stage."""


def recorded(name: str, steps: int) -> Iterable[RankBeat]:
    """
    Yield the beats of a recorded job. When the record ends, it begins again.
    """
    ranks = json.loads(TRACES.read_text())[name]
    stages: dict[int, tuple[int, ...]] = {
        stage: tuple(number for number, rank in enumerate(ranks) if rank["stage"] == stage)
        for stage in {rank["stage"] for rank in ranks}
    }
    for step in range(1, steps + 1):
        for number, rank in enumerate(ranks):
            at = (step - 1) % len(rank["compute"])
            parts = {"input": 0.0, "compute": rank["compute"][at], "update": rank["update"][at]}
            yield RankBeat(
                rank=number, incarnation=0, step=step, training=True, moved=float(step),
                work=(times(step, parts),), peers=stages[rank["stage"]],
            )  # fmt: skip


def test_the_slow_rank_of_a_recorded_job_is_named() -> None:
    """When one rank of 16 computes 2.4 times as long as the others of its stage, in a real job with
    four stages, then this rank is named within 20 steps, and no other rank is."""
    [remark] = judged(recorded("AR", 44))
    first = json.loads(TRACES.read_text())["AR"][remark.facts["rank"]]
    assert (first["stage"], first["replica"], remark.facts["cause"]) == (0, 0, "compute")
    assert remark.facts["step"] <= 20  # type: ignore[operator]  # an int
    assert remark.facts["percent"] == pytest.approx(136, abs=3)


@pytest.mark.parametrize("name", ["ST", "SE"])
def test_nobody_is_named_in_slow_jobs_without_a_slow_rank(name: str) -> None:
    """When a real job is slow because its last stage has more work, or because sequences differ in
    length, then nobody is named in 10,000 steps, in which the record is repeated."""
    assert judged(recorded(name, 10_000 if name == "ST" else 2000)) == []


# ---------------------------------------------------------------- processes and ranks that change


def test_a_new_process_that_is_as_slow_is_not_called_fast() -> None:
    """When a slow process is replaced by one that is as slow, then no remark says that the rank is
    fast again, with peers and without."""
    for peers in (None, ALONE):
        since = 90
        stream = [
            replace(beat, incarnation=int(beat.rank == 2 and beat.step > 130))
            for beat in beats(
                range(1, 200), range(4), slowed(2, "compute", 1.5, since), peers=peers
            )
        ]
        assert [(each.event, each.facts["rank"]) for each in judged(stream)] == [("rank_slow", 2)]


def test_a_slow_rank_that_leaves_the_job_is_no_longer_slow() -> None:
    """When a slow rank leaves, so that the others have fewer peers, or send no more times, then a
    remark says that it is no longer slow."""
    stream = list(beats(range(1, 60), range(4), slowed(2, "compute", 1.5)))
    for peers in ((0, 1, 3), (0, 1, 2, 3)):
        later = [
            replace(beat, peers=peers)
            for beat in beats(range(60, 200), range(4), lambda *_: 1.0)
            if beat.rank != 2
        ]
        named = [(each.event, each.facts["rank"]) for each in judged([*stream, *later])]
        assert named == [("rank_slow", 2), ("rank_slow_over", 2)]


def test_a_stage_is_not_named_because_another_becomes_faster() -> None:
    """When one stage was slow in the beginning, as in a compilation, and becomes faster, then the
    other stage, which has not changed, is not named."""

    def slow(rank: int, step: int, part: str) -> float:
        return 1.3 if rank == 1 and step <= 40 else 1.0

    peers = dict.fromkeys(range(2), ())
    assert judged(beats(range(1, 300), range(2), slow, noise=0.02, peers=peers)) == []


def test_ranks_are_judged_at_once_after_a_rollback() -> None:
    """When all ranks go back by hundreds of steps, then a rank that is slow since is named within
    20 steps, although the beats of the ranks come one after the other."""
    stream = list(beats(range(1, 600), range(4), lambda *_: 1.0))
    stream += beats(range(100, 140), range(4), slowed(1, "compute", 1.3))
    [remark] = judged(stream)
    assert remark.facts["rank"] == 1
    assert 100 < remark.facts["step"] < 100 + WINDOW + CERTAIN  # type: ignore[operator]  # an int
