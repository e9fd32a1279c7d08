"""
The plugins in a worker. Observer objects of the plugins are notified of events in the training
process.

If a plugin raises an exception, tft logs it and continues, because a plugin must not end the job.
There is one exception to this rule: a `TrainingFault` counts as a fault of this rank, as if the
framework had raised it.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import pluggy
import structlog

from tft.plugins import FAILURES, call_guarded, is_exit_by_signal
from tft.protocol.messages import OrderName
from tft.spi.faults import TrainingFault
from tft.spi.types import CheckResult, DeviceFault, Numbers, SessionView
from tft.worker.work_clock import WorkClock

log = structlog.get_logger()


class Observers:
    """
    The observer objects that the plugins returned from `tft_opened`.
    """

    def __init__(self, plugins: pluggy.PluginManager) -> None:
        self._plugins = plugins
        self._watchers: list[object] = []
        self._methods: dict[str, list[tuple[object, Callable[..., object]]]] = {}
        """Maps the name of a hook to the observers that have a method with this name, and to the
        method. Filled when the hook is first called, because some hooks are called in each step."""
        self.watch_windows = False
        """True if an observer wants to be called for each update window that closes. Otherwise the
        training thread skips the call."""
        self.watch_tails = False
        """True if an observer wants to be called at the end of each tail (the code of the loop
        between the update window and the end of the step). Otherwise the training thread skips the
        call."""
        self.watch_ends = False
        """True if an observer wants to be called at the end of each step. Otherwise the training
        thread skips the call."""
        self.watch_releases = False
        """True if an observer wants to be called before the state changes. Otherwise the training
        thread skips the call."""
        self.watch_numbers = False
        """True if an observer checks the numbers of each step (losses, gradient norm) before its
        update."""
        self.work: WorkClock | None = None
        """Measures how long this rank works in each step. None if no plugin has asked for it."""
        self.incarnations: Mapping[int, int] = {}
        """The incarnation of each rank's process, by rank. The numbers come from the last order
        that this rank has carried out."""

    def device_faults(self) -> list[DeviceFault]:
        """
        Return the lines that plugins add to the table of device faults.
        """
        lines = []
        answers = call_guarded(self._plugins, "tft_device_faults")
        listed = (each if isinstance(each, Iterable) else [each] for each in answers)
        for line in chain.from_iterable(listed):
            if isinstance(line, DeviceFault):
                lines.append(line)
            else:
                log.warning(
                    "device_fault_left_out",
                    line=repr(line),
                    why="the hook must return a list of objects of the class DeviceFault",
                )
        return lines

    def opened(self, session: SessionView) -> None:
        """
        Notify the plugins that `tft.init` has succeeded, and keep the observers that they return.
        """
        self._watchers = call_guarded(self._plugins, "tft_opened", session=session)
        self._methods = {}
        self.watch_windows = any(hasattr(w, "tft_on_window_closed") for w in self._watchers)
        self.watch_tails = any(hasattr(w, "tft_on_tail_ending") for w in self._watchers)
        self.watch_ends = any(hasattr(w, "tft_on_step_ended") for w in self._watchers)
        self.watch_releases = any(hasattr(w, "tft_on_state_released") for w in self._watchers)
        self.watch_numbers = any(hasattr(w, "tft_on_window_opening") for w in self._watchers)

    def adopted(self, parts: Mapping[str, Any]) -> None:
        """
        Notify the observers (objects of plugins) that the user has handed over these objects of the
        training state (`session.adopt`).
        """
        self._tell("tft_on_adopted", parts=parts)

    def loss(self, step: int, loss: float) -> bool:
        """
        Return True if an observer (an object of a plugin) refuses the update of `step` because of
        `loss`, a loss of this rank.
        """
        answers = self._ask("tft_on_loss", step=step, loss=loss)
        return any(answer is True for answer in answers)

    def refusal(self, step: int, numbers: Numbers) -> str:
        """
        Return the reason for which an observer (an object of a plugin) refuses the update of
        `step`, because of the losses and the gradient norm in `numbers`. Return an empty string if
        no observer refuses it.
        """
        try:
            self._tell("tft_on_window_opening", step=step, numbers=numbers)
        except TrainingFault as fault:
            return str(fault)
        return ""

    def window_closed(self, step: int) -> None:
        """
        Notify the observers (objects of plugins) that the update window of `step` has closed.
        """
        self._tell("tft_on_window_closed", step=step)

    def tail_ends(self, step: int) -> None:
        """
        Notify the observers (objects of plugins) that the loop has finished all work of `step`,
        including the code after the update window.
        """
        self._tell("tft_on_tail_ending", step=step)

    def step_ended(self, step: int) -> None:
        """
        Notify the observers (objects of plugins) that `step` has ended.
        """
        self._tell("tft_on_step_ended", step=step)

    def state_released(self) -> None:
        """
        Notify the observers (objects of plugins) that the training state may change from now on. An
        observer that reads the state must stop reading it.
        """
        self._tell("tft_on_state_released")

    def order(self, order: OrderName, incident: int, step: int) -> None:
        """
        Notify the observers (objects of plugins) that this rank is about to carry out an order of
        the controller.
        """
        self._tell("tft_on_order", order=order, incident=incident, step=step)

    def check(self, session: SessionView, name: str) -> CheckResult | None:
        """
        Run the check with the name `name`, and return its result. Checks are functions of plugins.
        Return None if no plugin has a check with this name.

        Raises the exception of a check that fails, because such a check has no result. If the check
        calls `sys.exit`, a `RuntimeError` is raised instead of `SystemExit`, so that the process
        does not end. Only a `SystemExit` that a signal has caused is raised unchanged.
        """
        try:
            result: CheckResult | None = self._plugins.hook.tft_check(session=session, name=name)
        except SystemExit as error:
            if is_exit_by_signal(error):
                raise
            raise RuntimeError(f"the check called sys.exit({error.code!r})") from error
        return result

    def _tell(self, hook: str, **facts: object) -> None:
        self._ask(hook, **facts)

    def _ask(self, hook: str, **facts: object) -> list[object]:
        methods = self._methods.get(hook)
        if methods is None:
            methods = self._methods[hook] = [
                (each, method)
                for each in self._watchers
                if (method := getattr(each, hook, None)) is not None
            ]
        answers = []
        for watcher, method in methods:
            try:
                answers.append(method(**facts))
            except FAILURES as error:
                if isinstance(error, TrainingFault) or is_exit_by_signal(error):
                    raise
                log.warning("plugin_failed", hook=hook, plugin=repr(watcher), exc_info=True)
        return answers
