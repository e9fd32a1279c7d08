"""
Repeats what the Trainer has done since the end of the last step, after an incident.

The Trainer's loop is a long method that calls small methods. Calls that need other ranks, or that
are part of a step, are carried out as operations. When an incident interrupts an operation, all
operations since the end of the last step are carried out again, in their order. Then the loop
continues after the interrupted operation, so the loop itself is not left.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tft import Session

Result = TypeVar("Result")


class Rewound(BaseException):
    """
    Raised when all ranks have gone back further than to the end of the last step: to a copy in host
    memory or to a checkpoint. Then it is not enough to repeat the operations of the present step.
    The Trainer's loop must continue with the step `session.step`.

    This exception is a `BaseException`, so that an `except Exception` of the Trainer does not catch
    it.
    """


class Surroundings(Protocol):
    """
    Notes and restores the state on which every operation depends, so that an operation can be
    repeated: random generators, settings of the optimizer, and the bookkeeping of the Trainer.
    """

    def noted(self) -> Any: ...  # Any: each subclass has a type of its own for what it notes

    def put_back(self, noted: Any, *, only_bookkeeping: bool = False) -> None: ...

    def muted(self) -> AbstractContextManager[None]: ...

    def report(self, session: Session) -> None: ...


@dataclass(slots=True, eq=False)
class _Operation:
    function: Callable[[], Any]
    before: Any
    """The state (`Surroundings.noted`) when the operation first began. It is restored before the
    operation is repeated."""
    speaks: bool
    """True if all callbacks are called again when the operation is repeated. If False, only
    callbacks with a state are called, and their state is restored afterwards."""
    after: Any = None
    done: bool = False


class Steps:
    """
    Carries out the operations of each step of this rank, and repeats them after an incident. All
    methods run on the training thread.
    """

    def __init__(self, session: Session, surroundings: Surroundings) -> None:
        self._session = session
        self._surroundings = surroundings
        self._operations: list[_Operation] = []
        self.inside = False
        """True while the training thread is inside an operation."""
        self.skips = False
        """True if the other ranks have completed the present step without this rank. Then the rest
        of the step needs no operation: this rank has their state already."""

    def enter(self) -> None:
        """
        Join the training. On return, the state is that of the end of step `session.step - 1`, and
        the process groups exist.
        """
        self._session.begin()
        self._resume()
        self.end_step()  # tells tft that this loop marks the ends of its steps

    def perform(
        self, function: Callable[[], Result], default: Result, *, waits: bool = True
    ) -> Result:
        """
        Carry out `function` as an operation, and return its result. If the other ranks have
        completed the step without this rank, return `default`.

        The Trainer keeps the result, even if a later operation is interrupted and this operation is
        repeated. So the operation counts as done only when the device has done its work and no
        collective in it was aborted. With `waits=False` it counts as done as soon as `function`
        returns. Then the result and the bookkeeping must not come from collectives, or `function`
        must itself have waited for these collectives.

        Raises `Rewound` if all ranks go back to an earlier step, and `tft.JobEnded` if the job
        ends.
        """
        if self.skips:
            return default
        operation = _Operation(function, self._surroundings.noted(), speaks=False)
        self._operations.append(operation)
        results: list[Result] = []
        step = self._session.step
        first = True

        def work() -> None:
            nonlocal first
            repeats, first = not first, False
            if repeats:
                self._repeat(operation)
            with self._as_operation():
                result = function()
            if waits:
                self._session.synchronize()
            results.append(result)

        while not self._session.attempt(work):
            if self._resume() == step + 1:
                self.skips = True
                return default
            self._must_be_at(step)
        operation.after, operation.done = self._surroundings.noted(), True
        return results[-1]

    def also_repeat(self, function: Callable[[], None]) -> None:
        """
        Arrange that `function` is called at this place of the step whenever the step is repeated.
        Do not call it now, because the Trainer's loop does so.
        """
        noted = self._surroundings.noted()
        self._operations.append(_Operation(function, noted, speaks=True, after=noted, done=True))

    def end_step(self) -> None:
        """
        End the step. Raises `Rewound` if all ranks go back to an earlier step, and `tft.JobEnded`
        if the job ends.
        """
        step = self._session.step
        self._operations.clear()
        self.skips = False

        def end() -> None:
            self._surroundings.report(self._session)
            self._session.end_step()

        if not self._session.attempt(end):
            self._resume()
            self._must_be_at(step)

    def forget(self) -> None:
        """
        Forget the operations of the present step, because training goes on at an earlier step.
        """
        self._operations.clear()
        self.skips = False

    def finish(self) -> None:
        """
        Report that the loop has ended, and return when the loops of all ranks have ended.

        Raises `Rewound` if all ranks go back to an earlier step, and `tft.JobEnded` if the job ends
        before all loops have ended.
        """
        step = self._session.step
        again = False
        while True:
            if again and not self._session.attempt(self._repeat):
                self._resume()
                self._must_be_at(step)
                continue
            again = True
            if self._session.attempt(self._session.finish):
                if self._completes():
                    return
            else:
                self._resume()
            self._must_be_at(step)

    def fail(self, error: BaseException) -> None:
        """
        Report an exception that the Trainer has raised between two operations, as a fault.

        Returns if the job goes on. Then the caller must end this process, so that another process
        replaces it. Raises `tft.JobEnded` if the job ends.
        """

        def again() -> None:
            raise error

        self._session.attempt(again)
        self._resume()

    def check(self) -> None:
        """
        If called within an operation, wait until the device has done its work. Raise an exception
        if a collective may have been aborted, so that its wrong result is not used. Do nothing
        outside of operations.
        """
        if self.inside:
            self._session.synchronize()

    # ------------------------------------------------------------ inside

    def _repeat(self, until: _Operation | None = None) -> None:
        """
        Carry out the operations of the present step again, up to `until`, which is not repeated.
        """
        for each in self._operations:
            self._surroundings.put_back(each.before)
            if each is until:
                return
            with nullcontext() if each.speaks else self._surroundings.muted(), self._as_operation():
                each.function()
            if not each.speaks:
                self._session.synchronize()
            self._surroundings.put_back(each.after, only_bookkeeping=True)

    @contextmanager
    def _as_operation(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def _resume(self) -> int:
        while self._session.obey() != "resume":
            pass
        return self._session.step

    def _completes(self) -> bool:
        while (order := self._session.obey()) not in ("resume", "complete"):
            pass
        return order == "complete"

    def _must_be_at(self, step: int) -> None:
        if self._session.step != step:
            raise Rewound
