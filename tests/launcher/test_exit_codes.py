"""
The meaning of the end of a part, and the exit codes of the launcher.
"""

import signal

import pytest

from tft.ending_signals import ENDING
from tft.launcher.exit_codes import (
    CANCELLED,
    COMPLETED,
    DUMPED,
    FAILED,
    Restarts,
    ended,
    exit_code,
)


def test_restart_is_refused_after_the_limit_of_ends() -> None:
    """When a process ends more often than the limit within the time span, then the process is not
    started again."""
    restarts = Restarts(limit=3, within=60.0)

    assert [restarts.again(at) for at in (0.0, 10.0, 20.0, 30.0)] == [True, True, True, False]


def test_restart_is_always_allowed_when_ends_are_rare() -> None:
    """When a process ends so rarely that the limit is never reached within the time span, then the
    process is always started again."""
    restarts = Restarts(limit=3, within=60.0)

    assert all(restarts.again(at) for at in range(0, 3000, 21))


@pytest.mark.parametrize("result", [COMPLETED, DUMPED, FAILED, *CANCELLED])
def test_exit_code_without_a_signal_is_the_result_of_the_controller(result: int) -> None:
    """When no signal came, then the exit code is the result of the controller."""
    assert exit_code(result, None) == result


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize("result", [DUMPED, FAILED, *CANCELLED])
def test_exit_code_after_a_signal_is_128_plus_its_number(result: int, number: int) -> None:
    """When a job ended because of SIGINT, SIGTERM or SIGHUP, then the exit code is 128 plus the number of
    the signal."""
    assert exit_code(result, number) == 128 + number


def test_exit_code_is_0_when_the_job_completes_after_a_signal() -> None:
    """When a signal came and the job completed nevertheless, then the exit code is 0."""
    assert exit_code(COMPLETED, signal.SIGTERM) == COMPLETED


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "exited with 1"),
        (-9, "was killed by SIGKILL"),
        (-signal.SIGRTMIN - 3, "was killed by signal 37"),
    ],
)
def test_exit_status_is_described_in_words(code: int, words: str) -> None:
    """When a process has ended, then its exit status is described in words, with the name or number
    of the signal."""
    assert ended(code) == words
