"""
Measures how long this rank works in each step. All code of this module runs on the training thread.
"""

from time import monotonic

from tft.page import Page
from tft.spi.types import WorkMeter


class WorkClock:
    """
    The times of the steps of one rank, without the time in which it waits for other ranks.

    A step that an incident interrupts is not measured, nor is the first step after the incident.
    """

    __slots__ = (
        "_arrived",
        "_before",
        "_began",
        "_compute_waits",
        "_computing",
        "_input_waits",
        "_opened",
        "_opening_waits",
        "_page",
        "meter",
    )

    def __init__(self, page: Page) -> None:
        self._page = page
        self.meter: WorkMeter | None = None
        """The adaptor's object that measures how long the training thread waits and computes. None:
        the adaptor has no such object, so nothing is measured."""
        self._began = 0.0
        """The time at which the step began. 0.0: the step is not measured."""
        self._before = 0.0
        """The total waiting time of the meter (`WorkMeter.waited`) when the step began."""
        self._computing = 0.0
        """The time at which the first forward pass of the step began. 0.0: none has begun yet."""
        self._input_waits = 0.0
        """How long the training thread waited for other ranks between `_began` and `_computing`."""
        self._arrived = self._opened = 0.0
        """The times at which the training thread reached the update window, and at which the window
        opened."""
        self._compute_waits = self._opening_waits = 0.0
        """How long the training thread waited for other ranks between `_began` and `_arrived`, and
        between `_began` and `_opened`."""

    def step_begins(self) -> None:
        """
        Record that all work of the last step is done, so that the next step begins now.
        """
        if self.meter is not None:
            self._computing = 0.0
            self._before = self.meter.waited()
            self.meter.step_begins()
            self._began = monotonic()

    def forget(self) -> None:
        """
        Do not measure the present step, because the loop was left, or is entered now.
        """
        self._began = 0.0

    def computing(self) -> None:
        """
        Record that a forward pass begins. Only the first one of a step counts.
        """
        if not self._computing and self._began and self.meter is not None:
            self._input_waits = self.meter.waited() - self._before
            self._computing = monotonic()

    def arrives(self) -> None:
        """
        Record that the training thread has arrived at the update window.
        """
        if self._began and self.meter is not None:
            self._compute_waits = self.meter.waited() - self._before
            self._arrived = monotonic()
            if not self._computing:
                self._computing, self._input_waits = self._arrived, self._compute_waits

    def opens(self) -> None:
        """
        Record that the update window opens.
        """
        if self._began and self.meter is not None:
            self._opening_waits = self.meter.waited() - self._before
            self._opened = monotonic()

    def closes(self, step: int) -> None:
        """
        Record that the update window of `step` closes, and write the times of the step to the page
        (the shared memory of the rank, which the agent reads).
        """
        if not self._began or self.meter is None:
            return
        now = monotonic()
        # subtract the waits for collectives in the update window, such as those of a sharded
        # optimizer
        waited = self.meter.waited() - self._before
        self._page.post_work(
            step,
            self._computing - self._began - self._input_waits,
            self._arrived - self._computing - (self._compute_waits - self._input_waits),
            now - self._opened - (waited - self._opening_waits),
            waited,
        )
        self._began = 0.0
