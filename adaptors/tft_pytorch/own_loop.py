"""
The steps of a training loop that belongs to a framework, such as Lightning or Transformers. An
incident interrupts one step of the loop, and that step is repeated: the loop itself is not left.

    loop = OwnLoop(session)
    loop.enter()  # after session.adopt
    while framework.goes_on() and not session.over:
        loop.step(compute)  # takes the batches; forward, backward, and the update window
        framework.calls_its_callbacks()
        loop.end_step()
    loop.finish()

What must happen after a step and uses collectives, such as an evaluation, is registered with
`session.after_step` before `enter`. `end_step` calls it.
"""

from collections.abc import Callable

from tft import Session


class Rewound(BaseException):
    """
    Raised when all ranks have gone back by more than the present step, to a copy in host memory or
    to a checkpoint. The framework's loop must go on with the step `session.step`.

    This exception is a `BaseException`, so that an `except Exception` of a framework does not catch
    it.
    """


class OwnLoop:
    """
    The steps of one rank in the training loop of a framework. Use it on the training thread only.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def enter(self) -> None:
        """
        Join the training: on return, the state is that of the end of step `session.step - 1`, the
        process groups exist, and `session.model` is the wrapped model.

        A replacement process may enter at any step. Raises `tft.JobEnded` if the job ends before.
        """
        self._session.begin()
        self._resume()

    def step(self, compute: Callable[[], None]) -> bool:
        """
        Compute one step: call `compute`, which computes the gradients and changes the state in an
        update window. Call it again after each incident, until the step is complete.

        Before each further call, random generators and data position are those of the begin of the
        step. So `compute` takes the batches of the step itself; or it keeps them, and moves the data
        position on in each call. Return False if the other ranks have completed the step without
        this rank, which has got their state. Raises `Rewound`, and `tft.JobEnded` if the job ends.
        """
        step = self._session.step
        while not self._session.attempt(compute):
            if self._resume() == step + 1:
                return False
            self._must_be_at(step)
        return True

    def end_step(self) -> None:
        """
        End the step, and call the functions that were registered with `session.after_step`.

        Raises `Rewound`, and `tft.JobEnded` if the job ends.
        """
        step = self._session.step
        if not self._session.attempt(self._session.end_step):
            self._resume()
            self._must_be_at(step)

    def finish(self) -> None:
        """
        Report that the loop has ended, and return when the loops of all ranks have ended.

        Raises `Rewound`, and `tft.JobEnded` if the job ends before that.
        """
        step = self._session.step
        while True:
            if self._session.attempt(self._session.finish):
                if self._completes():
                    return
            else:
                self._resume()
            self._must_be_at(step)

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
