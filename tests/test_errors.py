"""
The chain of causes of an exception.
"""

import pytest

from tft.errors import UsageError, chain_of
from tft.spi.types import Numbers
from tft.worker.refusal import UpdateRefused, refusal_in


def raised(hides: bool) -> BaseException:
    """
    Return an exception that was raised while a refusal was handled. With `hides` it was raised
    `from None`.
    """
    try:
        try:
            raise UpdateRefused("the loss is nan", Numbers())
        except UpdateRefused as error:
            if hides:
                raise UsageError("another error") from None
            raise UsageError("another error") from error
    except UsageError as error:
        return error


@pytest.mark.parametrize("hides", [False, True])
def test_cause_of_an_exception_is_found_unless_it_was_hidden(hides: bool) -> None:
    """When an exception was raised from another one, then both are in its chain. Raised from None,
    it has no cause. A refusal is found in both."""
    kinds = [type(each) for each in chain_of(raised(hides))]
    assert kinds == ([UsageError] if hides else [UsageError, UpdateRefused])
    assert refusal_in(raised(hides)) is not None


def test_exceptions_that_refer_to_each_other_come_once() -> None:
    """When two exceptions are the cause of each other, then each comes once."""
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert list(chain_of(one)) == [one, other]
    assert refusal_in(one) is None
