"""
A step is final when all members have ended it, and stays so until the job goes back on purpose.
"""

from itertools import count

from tft.core.link.final_steps import LOOK, FinalSteps
from tft.protocol.messages import Beat, Position, Pulse


def beat(steps: dict[int, int], *, tail: bool = False, after: bool = False) -> Beat:
    """
    Return a heartbeat with the last step that each rank has completed.
    """
    pulses = tuple(
        Pulse(
            rank=rank, incarnation=0, training=True, moved=0.0,
            position=Position(step=step, window=False, tail=tail, after=after),
        )
        for rank, step in steps.items()
    )  # fmt: skip
    return Beat(node=0, pulses=pulses, at=0.0)


def heard(steps: FinalSteps, *beats: Beat) -> int | None:
    """
    Take in heartbeats, each when a look is due, and return what the last one has shown.
    """
    found = None
    for each in beats:
        found = steps.heard(each, next(TIMES))
    return found


TIMES = count(1.0)
"""The times of heartbeats, in seconds: each is a second later than the one before."""


def begun(step: int = 0) -> FinalSteps:
    """
    Return the final steps of a job of the ranks 0 and 1 that goes on from the end of `step`.
    """
    steps = FinalSteps()
    assert steps.resumed({0, 1}, step) == step
    return steps


def test_step_is_final_when_all_members_have_ended_it() -> None:
    """When the slowest member has ended a step, then the step is final, and is told once."""
    steps = begun()
    assert heard(steps, beat({0: 5})) is None
    assert heard(steps, beat({1: 3})) == 3
    assert heard(steps, beat({0: 9, 1: 3})) is None
    assert heard(steps, beat({0: 9, 1: 4, 7: 1})) == 4


def test_step_is_not_final_before_its_tail_and_the_functions_after_it_end() -> None:
    """When a rank is in the tail of a step, or in a function after it, then only the step before
    is final."""
    steps = begun()
    assert heard(steps, beat({0: 3, 1: 3}, tail=True)) == 2
    assert heard(steps, beat({0: 3, 1: 3}, after=True)) is None
    assert heard(steps, beat({0: 3, 1: 3})) == 3


def test_return_is_told_only_if_it_gives_up_final_steps() -> None:
    """When the ranks go on from a final step or a later one, then nothing is told. When they go on
    from an earlier step, then that is told at once, and their old positions do not count."""
    steps = begun()
    heard(steps, beat({0: 8, 1: 8}))
    assert steps.resumed({0, 1}, 8) is None
    assert steps.resumed({0, 1}, 6) == 6
    assert heard(steps, beat({0: 7})) is None
    assert heard(steps, beat({1: 7})) == 7


def test_ranks_that_have_left_the_job_do_not_count() -> None:
    """When the job goes on with fewer ranks, then a step is final that these have ended."""
    steps = begun()
    steps.resumed({0}, None)
    assert heard(steps, beat({1: 2})) is None
    assert heard(steps, beat({0: 3, 1: 2})) == 3


def test_controller_that_goes_on_waits_for_all_positions() -> None:
    """When a controller goes on with a run, then it tells no step before it knows where all members
    are. Before any rank has trained, it tells none."""
    steps = FinalSteps()
    steps.resumed((), None)
    assert heard(steps, beat({0: 3, 1: 2})) is None
    steps.resumed({0, 1}, None)
    assert heard(steps, beat({0: 30})) is None
    assert heard(steps, beat({1: 29})) == 29


def test_all_steps_of_a_complete_job_are_final() -> None:
    """When the job is over, then its last step is final, also if no heartbeat has said so."""
    steps = begun()
    heard(steps, beat({0: 8, 1: 7}))
    assert steps.over(10) == 10
    assert steps.over(10) is None


def test_positions_of_all_ranks_are_looked_at_in_intervals() -> None:
    """When heartbeats come fast, then all ranks are looked at once in an interval."""
    steps = begun()
    steps.heard(beat({0: 1, 1: 1}), 10.0)
    assert steps.heard(beat({0: 2, 1: 2}), 10.0 + LOOK / 2) is None
    assert steps.heard(beat({0: 2}), 10.0 + LOOK) == 2
