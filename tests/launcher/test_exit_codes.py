"""
What the launcher makes of the end of a part.
"""

import signal

import pytest

from tft.launcher.exit_codes import CANCELLED, COMPLETED, DUMPED, FAILED, Restarts, ended, exit_code


def test_accidents_are_forgiven_a_crash_loop_is_not() -> None:
    """
    When a part ends more often than the limit within the span, then it is not started again.
    """
    restarts = Restarts(limit=3, within=60.0)

    assert [restarts.again(at) for at in (0.0, 10.0, 20.0, 30.0)] == [True, True, True, False]


def test_an_accident_now_and_then_is_forgiven_for_ever() -> None:
    """
    When accidents are further apart than the span, then their number does not count.
    """
    restarts = Restarts(limit=3, within=60.0)

    assert all(restarts.again(at) for at in range(0, 3000, 21))


@pytest.mark.parametrize("result", [COMPLETED, DUMPED, FAILED, *CANCELLED])
def test_without_a_signal_the_job_has_the_result_of_its_controller(result: int) -> None:
    """
    When nobody asked for the end, then the controller's result is the exit code.
    """
    assert exit_code(result, None) == result


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("result", [DUMPED, FAILED, *CANCELLED])
def test_a_job_that_was_asked_to_end_says_which_signal_asked(result: int, number: int) -> None:
    """
    When the job ended because of a signal, then the exit code is 128 and the signal.
    """
    assert exit_code(result, number) == 128 + number


def test_a_job_that_completes_before_it_can_be_ended_has_completed() -> None:
    """
    When the signal came too late to matter, then the exit code is 0.
    """
    assert exit_code(COMPLETED, signal.SIGTERM) == COMPLETED


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "exited with 1"),
        (-9, "was killed by SIGKILL"),
        (-signal.SIGRTMIN - 3, "was killed by signal 37"),
    ],
)
def test_an_end_is_told_in_words(code: int, words: str) -> None:
    """
    When a part has ended, then the operator reads how, not a number.
    """
    assert ended(code) == words
