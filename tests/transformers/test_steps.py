"""
Operations of a step, in a session that does what the tests say.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from tft_transformers.steps import Steps

ABORTED = RuntimeError("a collective was aborted")


class Playing:
    """
    Plays the session: an incident makes all ranks repeat the present step. Plays the surroundings,
    too, which have nothing to put back.
    """

    step = 1

    def __init__(self, *synchronized: Exception | None) -> None:
        """
        `synchronized` are what the device says in turn when it is waited for.
        """
        self._synchronized = iter(synchronized)
        self.waits = 0

    def attempt(self, work: Callable[[], None]) -> bool:
        """Run a part of the loop."""
        try:
            work()
        except RuntimeError:
            return False
        return True

    def obey(self) -> str:
        """Resume at once."""
        return "resume"

    def synchronize(self) -> None:
        """Wait for the device."""
        self.waits += 1
        error = next(self._synchronized, None)
        if error is not None:
            raise error

    def noted(self) -> None:
        """Note nothing."""

    def put_back(self, noted: Any, *, only_bookkeeping: bool = False) -> None:
        """Put nothing back."""

    def muted(self) -> AbstractContextManager[None]:
        """Mute nothing."""
        return nullcontext()


def steps_in(session: Any) -> Steps:
    """
    Return the steps of a rank in a session that is played.
    """
    return Steps(session, session)


def counting() -> Callable[[], int]:
    """
    Return a function that returns 1, 2, 3 and so on.
    """
    numbers: Iterator[int] = iter(range(1, 10))
    return lambda: next(numbers)


def test_the_result_of_an_aborted_collective_is_not_kept() -> None:
    """When a collective of an operation was aborted, then the operation is repeated, and its result
    is that of the repetition."""
    session = Playing(ABORTED)
    assert steps_in(session).perform(counting(), 0) == 2
    assert session.waits == 2


def test_an_operation_that_waits_itself_is_not_waited_for() -> None:
    """When an operation needs no wait for the device, then it is done when its function returns."""
    session = Playing(ABORTED)
    assert steps_in(session).perform(counting(), 0, waits=False) == 1
    assert session.waits == 0


def test_a_repeated_operation_is_checked_before_the_next_one() -> None:
    """When the first operation is repeated and its collective is aborted once more, then the second
    operation is not begun before the first has been repeated again."""
    session = Playing(None, ABORTED, ABORTED)
    steps = steps_in(session)
    seen: list[str] = []
    steps.perform(lambda: seen.append("first"), None)
    steps.perform(lambda: seen.append("second"), None)
    assert seen == ["first", "second", "first", "first", "second"]


@pytest.mark.parametrize("inside", [True, False])
def test_a_check_raises_only_in_an_operation(inside: bool) -> None:
    """When a collective was aborted, then a check within the operation raises. Between operations it
    does nothing."""
    session = Playing(ABORTED)
    steps = steps_in(session)
    if inside:
        assert [steps.perform(steps.check, None)] == [None]
        assert session.waits == 3
    else:
        steps.check()
        assert session.waits == 0
