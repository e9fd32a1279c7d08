"""
Which rank is killed in which phase of which step.
"""

import itertools

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
