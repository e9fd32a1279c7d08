"""
Which rank is killed in which phase of which step.
"""

import itertools

import pytest

from tft.verify.schedule import PHASES, schedule, steps_for


def test_all_phases_have_room_in_the_default_number_of_steps() -> None:
    """When a run has the default number of steps and an evaluation after each, then each phase has
    a step of its own before the last, the steps are apart, and all ranks have their turn."""
    last = steps_for(PHASES)
    kills = schedule(PHASES, ranks=3, last=last, evaluated=range(1, last + 1))
    assert [kill.phase for kill in kills] == list(PHASES)
    steps = [kill.step for kill in kills]
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(steps))
    assert steps[-1] < last
    assert {kill.rank for kill in kills} == {0, 1, 2}


def test_phases_that_do_not_fit_are_left_for_the_next_run() -> None:
    """When a run has few steps, then it has the first phases only."""
    kills = schedule(PHASES, ranks=2, last=6, evaluated=())
    assert [(kill.phase, kill.step) for kill in kills] == [("forward", 2), ("backward", 4)]
    assert schedule(PHASES, ranks=2, last=2, evaluated=()) == ()


def test_a_kill_in_an_evaluation_needs_a_step_with_one() -> None:
    """When functions are called after step 8 only, then the kill is there; without such a step the
    phase is left out."""
    [kill] = schedule(["evaluation"], ranks=2, last=17, evaluated=[4, 8][1:])
    assert (kill.step, kill.spec) == (8, f"kill:rank={kill.rank},step=8,phase=evaluation")
    assert schedule(["evaluation"], ranks=2, last=17, evaluated=[]) == ()


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 64])
def test_rank_0_is_killed_whatever_the_number_of_ranks(ranks: int) -> None:
    """When all phases have room, then rank 0 is killed in the tail and in the evaluation, and also
    without an evaluation. Neighbouring phases before that kill different ranks."""
    last = steps_for(PHASES)
    kills = schedule(PHASES, ranks=ranks, last=last, evaluated=range(1, last + 1))
    assert [kill.phase for kill in kills if kill.rank == 0][-2:] == ["tail", "evaluation"]
    without = schedule(PHASES, ranks=ranks, last=last, evaluated=())
    assert without == kills[:-1]
    assert all(one.rank != next_.rank for one, next_ in itertools.pairwise(without))


def test_other_ranks_are_killed_in_an_evaluation_without_rank_0() -> None:
    """When rank 0 does not call the model in an evaluation, then the other ranks are killed there, as
    far as the run has steps with an evaluation. The last rank comes first."""
    kills = schedule(["evaluation"], ranks=4, last=17, evaluated=[4, 8, 12, 16], others=True)
    assert [(kill.rank, kill.step) for kill in kills] == [(3, 4), (2, 8), (1, 12)]
    kills = schedule(["tail", "evaluation"], ranks=4, last=9, evaluated=[4, 8], others=True)
    assert [(kill.rank, kill.step) for kill in kills] == [(0, 2), (3, 4), (2, 8)]
