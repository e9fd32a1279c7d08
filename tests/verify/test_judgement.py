"""
What one job says about the kills in it.
"""

import pytest

from tft.verify.differences import Difference
from tft.verify.judgement import DIFFERS, IDENTICAL, NOT_TRIED, Finding, judge, settle
from tft.verify.schedule import Kill

FORWARD = Kill(phase="forward", rank=1, step=2)
BACKWARD = Kill(phase="backward", rank=0, step=4)
TAIL = Kill(phase="tail", rank=0, step=6)
KILLS = (FORWARD, BACKWARD, TAIL)
ALL = tuple(kill.spec for kill in KILLS)


def differs(step: int, kind: str = "losses", *, after: bool = False) -> Difference:
    """
    Return a difference of rank 1 in a step.
    """
    return Difference(step=step, rank=1, kind=kind, name="", after=after)


def results(findings: tuple[Finding, ...]) -> list[tuple[str, str, bool]]:
    """
    Return the phase and the result of each finding, and whether its kill was carried out.
    """
    return [(each.phase, each.result, each.killed) for each in findings]


def test_kills_that_change_nothing_are_identical() -> None:
    """When the job has ended well and has no difference, then each phase is identical whose kill was
    carried out, and the others are not tried."""
    findings = judge(KILLS, fired=[FORWARD.spec, TAIL.spec], code=0, difference=None)
    assert results(findings) == [
        ("forward", IDENTICAL, True), ("backward", NOT_TRIED, False), ("tail", IDENTICAL, True),
    ]  # fmt: skip
    assert findings[1].why == "rank 0 did not come to this phase in step 4"


@pytest.mark.parametrize("code", [0, 4, None])
def test_difference_is_ascribed_to_the_last_kill_before_it(code: int | None) -> None:
    """When the job has a difference in step 5, then the kill in step 4 has caused it, however the job
    has ended. The job says nothing about the later kill."""
    difference = differs(5)
    findings = judge(KILLS, fired=ALL, code=code, difference=difference)
    assert results(findings) == [("forward", IDENTICAL, True), ("backward", DIFFERS, True)]
    assert findings[1].difference == difference


@pytest.mark.parametrize("code", [0, 4, None])
def test_row_of_a_function_is_ascribed_to_a_kill_in_the_next_step(code: int | None) -> None:
    """When a function that is called after step 1 has recorded another row, then the kill in step 2
    has caused it: the function was called again. With code 0 this is no refusal."""
    findings = judge(KILLS, fired=ALL, code=code, difference=differs(1, "rows", after=True))
    assert results(findings) == [("forward", DIFFERS, True)]


def test_difference_before_any_kill_says_nothing() -> None:
    """When the job has ended well, and a row of step 1 itself differs, then no kill has caused it,
    and there is no finding."""
    assert judge(KILLS, fired=ALL, code=0, difference=differs(1, "rows")) == ()


@pytest.mark.parametrize("code", [1, 4, None])
def test_failure_is_never_taken_for_a_result(code: int | None) -> None:
    """When the job has failed, then the last kill that was carried out has caused it. If it has a
    difference from before all kills, it is the first one that was carried out. If no rank was killed
    before the failure, it is the first planned one."""
    two = [FORWARD.spec, BACKWARD.spec]
    assert results(judge(KILLS, fired=two, code=code, difference=None)) == [
        ("forward", IDENTICAL, True), ("backward", DIFFERS, True),
    ]  # fmt: skip
    assert results(judge(KILLS, fired=two, code=code, difference=differs(1))) == [
        ("forward", DIFFERS, True)
    ]
    for difference in (None, differs(6)):
        assert results(judge(KILLS, fired=(), code=code, difference=difference)) == [
            ("forward", DIFFERS, False)
        ]
    [alone] = judge(KILLS[2:], fired=(), code=code, difference=differs(6))
    assert (alone.result, alone.killed) == (DIFFERS, False)


OTHERS = tuple(Kill(phase="evaluation", rank=rank, step=8 * (4 - rank)) for rank in (3, 2, 1))


@pytest.mark.parametrize("code", [0, 4])
def test_several_kills_in_an_evaluation_are_one_finding(code: int) -> None:
    """When several ranks are to be killed in the evaluation, then the phase is identical if one of
    them was killed, and differs if one of them has changed the training."""
    fired = [OTHERS[1].spec, OTHERS[2].spec]
    [found] = judge(OTHERS, fired=fired, code=0, difference=None)
    assert (found.result, found.kill, found.killed) == (IDENTICAL, OTHERS[1], True)
    [found] = judge(OTHERS, fired=fired, code=code, difference=differs(25))
    assert (found.result, found.kill, found.killed) == (DIFFERS, OTHERS[2], True)


def test_ranks_that_do_not_call_the_model_are_named() -> None:
    """When rank 0 does not call the model in the evaluation, then the others are tried before that
    is reported, and the reason has a line for each rank. Without time for it, or steps for all ranks,
    the reason says so."""
    zero = Kill(phase="evaluation", rank=0, step=16)
    [alone] = judge([zero], fired=(), code=0, difference=None)
    assert settle(alone, None, untried=2, time=True) is None
    hurried = settle(alone, None, untried=2, time=False)
    assert hurried is not None
    first = "in the functions after step 16, rank 0 did not call the model that was handed over"
    assert hurried.why.splitlines() == [
        first, "no time was left to try other ranks: give a higher --limit",
    ]  # fmt: skip
    [rest] = judge(OTHERS[:2], fired=(), code=0, difference=None)
    settled = settle(rest, alone, untried=1, time=True)
    assert settled is not None
    assert (settled.result, settled.why.splitlines()) == (
        NOT_TRIED,
        [
            first,
            "in the functions after step 8, rank 3 did not call the model that was handed over",
            "in the functions after step 16, rank 2 did not call the model that was handed over",
            "ranks not tried for lack of such steps: 1; give more --steps",
        ],
    )
    complete = settle(rest, alone, untried=0, time=True)
    assert complete is not None
    assert settled.why.startswith(complete.why)
    assert "not tried" not in complete.why


def test_other_findings_are_reported_at_once() -> None:
    """When a rank was killed in the evaluation, or another phase was not tried, then no other ranks
    are tried."""
    zero = Kill(phase="evaluation", rank=0, step=8)
    [killed] = judge([zero], fired=[zero.spec], code=0, difference=None)
    [tail] = judge([TAIL], fired=(), code=0, difference=None)
    for found in (killed, tail):
        assert settle(found, None, untried=2, time=True) == found
