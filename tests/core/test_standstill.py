"""
When ranks are asked where they stand, and which rank is named by their answers.
"""

from collections.abc import Sequence

import pytest

from tft.core.link.standstill import ANSWER, LONGER, MARGIN, STEPS, Standstill, odd_ranks
from tft.core.link.step_times import StepTimes
from tft.protocol.messages import Beat, GroupStanding, Position, Pulse, Whereabouts

BEAT = 0.1


def pulse(rank: int, step: int, moved: float, *, training: bool = True) -> Pulse:
    return Pulse(
        rank=rank,
        incarnation=0,
        position=Position(step=step, window=False),
        training=training,
        moved=moved,
    )


def beat(at: float, step: int, moved: float, *, ranks: int = 2, training: bool = True) -> Beat:
    pulses = tuple(pulse(rank, step, moved, training=training) for rank in range(ranks))
    return Beat(node=0, pulses=pulses, at=at)


def standing(
    rank: int, *groups: GroupStanding, waiting: bool = True, inquiry: int = 1
) -> Whereabouts:
    return Whereabouts(
        rank=rank,
        incarnation=0,
        inquiry=inquiry,
        position=Position(step=9, window=False),
        waiting=waiting,
        line=f"train.py:{10 + rank}",
        stack="",
        groups=groups,
        at=1.0,
    )


def group(
    name: str, entered: int, inside: str = "", ranks: Sequence[int] = (0, 1, 2)
) -> GroupStanding:
    return GroupStanding(
        group=name, size=len(ranks), members=str(ranks), entered=entered, inside=inside
    )


class Watched:
    """
    A job that is watched for a standstill, with its step times.
    """

    def __init__(self) -> None:
        self.times = StepTimes()
        self.standstill = Standstill(self.times)
        self.limit = self.standstill.limit
        self.answered = self.standstill.answered
        self.finding = self.standstill.finding

    def resumed(self, at: float) -> None:
        """
        Let both know that training begins.
        """
        self.times.resumed()
        self.standstill.resumed(at)

    def heard(self, beat: Beat, at: float) -> bool:
        """
        Let both hear a beat.
        """
        return self.standstill.heard(beat, self.times.heard(beat), at)


def trained(steps: int = 10, each: float = 0.2) -> tuple[Watched, float]:
    """
    Return a job that has trained some steps, and the time of the last one.
    """
    job = Watched()
    job.resumed(0.0)
    for step in range(steps):
        assert not job.heard(beat(step * each, step, step * each), step * each)
    return job, (steps - 1) * each


def stand(job: Watched, since: float, until: float, step: int = 9) -> float | None:
    """
    Let a job stand still, with a beat every 0.1 s. Return when the ranks were asked, or None.
    """
    at = since
    while at < until:
        if job.heard(beat(at, step, since), at):
            return at
        at += BEAT
    return None


def test_ranks_are_asked_once_after_three_steps() -> None:
    """When no rank makes progress for three step times and half a second, then the ranks are asked,
    once."""
    job, last = trained()
    asked = stand(job, last, last + 10)
    assert asked is not None
    assert 0 < asked - last - STEPS * 0.2 - MARGIN <= BEAT + 1e-6
    assert stand(job, asked, asked + 10) is None


def test_nobody_is_asked_before_step_times_are_known() -> None:
    """When the first steps take long, then nobody is asked."""
    job = Watched()
    job.resumed(0.0)
    assert stand(job, 0.0, 500.0, step=0) is None


def test_nobody_is_asked_outside_of_training() -> None:
    """When ranks are outside the function `train`, or have announced a long phase, then nobody is
    asked."""
    job, last = trained()
    assert not job.heard(beat(last + 50, 9, last, training=False), last + 50)
    job, last = trained()
    assert not any(job.heard(beat(at, 9, last + 60), at) for at in (last + 1, last + 30, last + 59))


def test_a_standstill_that_ends_by_itself_is_learnt() -> None:
    """When the job has stood still and then gone on, as in an evaluation, then ranks are asked only
    after a longer time."""
    job, last = trained()
    assert stand(job, last, last + 10) is not None
    assert not job.heard(beat(last + 4, 10, last + 4), last + 4)
    assert job.limit() == pytest.approx(LONGER * 4, abs=0.5)
    assert stand(job, last + 4, last + 8, step=10) is None


def test_a_long_phase_that_ends_early_hides_no_standstill() -> None:
    """When ranks have announced a long phase, and it ends early, then a standstill after it is
    noticed as usual, and the phase does not count as the time of a step."""
    job, last = trained()
    assert not job.heard(beat(last + 1, 9, last + 3600), last + 1)
    assert not job.heard(beat(last + 1.2, 10, last + 1.2), last + 1.2)
    asked = stand(job, last + 1.2, last + 30, step=10)
    assert asked is not None
    assert asked - last < 1.2 + STEPS * 0.2 + MARGIN + 1.5


def test_the_finding_waits_for_all_answers() -> None:
    """When all ranks have answered, then there is one finding. Answers to other questions do not
    count."""
    job, last = trained()
    at = stand(job, last, last + 10)
    assert at is not None
    job.answered(standing(0, inquiry=job.standstill.number + 1), at)
    job.answered(standing(0), at)
    assert job.finding(at + ANSWER / 2) is None
    job.answered(standing(1, waiting=False), at)
    finding = job.finding(at + ANSWER / 2)
    assert finding is not None
    assert [each.rank for each in finding.odd] == [1]
    assert job.finding(at + 1) is None


def test_a_rank_that_does_not_answer_is_named() -> None:
    """When a rank has not answered in time, then it is named."""
    job, last = trained()
    at = stand(job, last, last + 10)
    assert at is not None
    job.answered(standing(0), at)
    finding = job.finding(at + 1.01 * ANSWER)
    assert finding is not None
    assert [(each.rank, "does not answer" in each.why) for each in finding.odd] == [(1, True)]


ALL = "allreduce of 4 elements"


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        pytest.param(
            [standing(0, group("a", 5, ALL)), standing(1, group("a", 4)), standing(2, group("a", 5, ALL))],
            [1],
            id="one has not entered",
        ),
        pytest.param(
            [standing(0, group("a", 5, ALL)), standing(1, group("a", 5, "barrier")), standing(2, group("a", 5, ALL))],
            [1],
            id="one has entered another",
        ),
        pytest.param(
            [standing(0, group("a", 5, ALL, (0, 1))), standing(1, group("a", 5, "barrier", (0, 1)))],
            [0, 1],
            id="two have entered different ones",
        ),
        pytest.param(
            [
                standing(0, group("a", 5, ALL), group("b", 3)),
                standing(1, group("a", 4), group("b", 4, ALL)),
                standing(2, group("a", 4), group("b", 4, ALL)),
            ],
            [0, 1, 2],
            id="two groups wait for each other",
        ),
        pytest.param(
            [
                standing(0, group("a", 5, ALL, (0, 1))),
                standing(1, group("a", 4, "", (0, 1)), group("b", 7, ALL, (1, 2))),
                standing(2, group("b", 6, "", (1, 2))),
            ],
            [2],
            id="one holds up another, which holds up a third",
        ),
        pytest.param(
            [standing(0, group("a", 5, ALL)), standing(1, group("a", 5, ALL)), standing(2, group("a", 5, ALL))],
            [],
            id="nothing distinguishes them",
        ),
        pytest.param(
            [standing(0), standing(1, waiting=False), standing(2)], [1], id="one computes"
        ),
        pytest.param(
            [standing(0, waiting=False), standing(1, waiting=False)], [], id="all compute"
        ),
        pytest.param([], [], id="nobody has answered, and nobody was asked"),
    ],
)  # fmt: skip
def test_the_answers_name_the_rank(answers: Sequence[Whereabouts], named: list[int]) -> None:
    """When ranks have answered, then those are named that hold up the others, each with its line."""
    odd = odd_ranks(answers, [])
    assert [each.rank for each in odd] == named
    assert all(each.line == f"train.py:{10 + each.rank}" for each in odd)
