"""
Loops that mark the ends of their steps, as they are recognized before the first step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tft.worker.step_marks import marks_ends


class Marks:
    """
    A session, or another object that has a method of the same name.
    """

    def end_step(self) -> None:
        """
        Mark the end of a step.
        """


loop = Marks()
timer = Marks()


def directly(s: Marks) -> None:
    for _ in range(3):
        s.end_step()


def by_a_global(_: object) -> None:
    loop.end_step()


def tail(session: Marks) -> None:
    session.end_step()


def by_a_function(s: Marks) -> None:
    tail(s)


def in_a_nested_function(s: Marks) -> None:
    def ends() -> None:
        s.end_step()

    ends()


def recursively(s: Marks) -> None:
    recursively(s)
    tail(s)


def never(s: Marks) -> None:
    timer.end_step()


def of_another(s: Marks, clock: Marks) -> None:
    clock.end_step()


class Trainer:
    """
    A script that keeps its loop in a class.
    """

    def __init__(self) -> None:
        self.session, self.clock = loop, timer

    def train(self, s: Marks) -> None:
        """
        End a step by another method.
        """
        self.finish()

    def finish(self) -> None:
        """
        End a step.
        """
        self.session.end_step()

    def times(self, s: Marks) -> None:
        """
        Call a method of the same name of another object.
        """
        self.clock.end_step()


@pytest.mark.parametrize(
    "train",
    [
        directly, by_a_global, by_a_function, in_a_nested_function, recursively, Trainer().train,
        partial(of_another, timer),
    ],
)  # fmt: skip
def test_calls_of_end_step_are_found_before_the_first_step(train: Callable[..., Any]) -> None:
    """When a loop calls `end_step` of the session, directly or in a function of the script, then
    this is known before its first step, so that its first step has a tail too."""
    assert marks_ends(train, loop)


@pytest.mark.parametrize("train", [never, of_another, Trainer().times, print, object()])
def test_loop_that_calls_end_step_of_another_object_marks_no_ends(train: Any) -> None:
    """When a loop calls `end_step` of another object only, or its code cannot be read, then it is
    not taken for a loop that marks the ends of its steps."""
    assert not marks_ends(train, loop)
