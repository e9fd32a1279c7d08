"""
The plugins of a worker: told what happens, under a guard.

A plugin that fails is logged and the job goes on, unless what it raises names a fault kind
(`tft_fault_kind`): that is an observer reporting a fault at this rank, through the same door as
the framework's own exceptions.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import pluggy
import structlog

from tft.hooks import CheckResult, DeviceFault, SessionView
from tft.plugins import call_guarded
from tft.protocol.messages import OrderName

log = structlog.get_logger()


class Observers:
    """
    What the plugins returned from `tft_opened`.
    """

    def __init__(self, plugins: pluggy.PluginManager) -> None:
        self._plugins = plugins
        self._watchers: list[object] = []
        self.watch_windows = False
        """Somebody wants every step: else the training thread does not even ask."""
        self.watch_tails = False
        """The same of the ends of steps."""

    def device_faults(self) -> list[DeviceFault]:
        """
        The lines that plugins add to the table of device faults.
        """
        lines = []
        for line in chain.from_iterable(call_guarded(self._plugins, "tft_device_faults")):
            if isinstance(line, DeviceFault):
                lines.append(line)
            else:
                log.warning("device_fault_left_out", line=repr(line), why="it is no DeviceFault")
        return lines

    def opened(self, session: SessionView) -> None:
        """
        `tft.init` has succeeded.
        """
        self._watchers = call_guarded(self._plugins, "tft_opened", session=session)
        self.watch_windows = any(hasattr(w, "tft_on_window_closed") for w in self._watchers)
        self.watch_tails = any(hasattr(w, "tft_on_tail_ending") for w in self._watchers)

    def adopted(self, parts: Mapping[str, Any]) -> None:
        """
        The user has handed over these objects.
        """
        self._tell("tft_on_adopted", parts=parts)

    def window_closed(self, step: int) -> None:
        """
        The update window of `step` has closed.
        """
        self._tell("tft_on_window_closed", step=step)

    def tail_ends(self, step: int) -> None:
        """
        All that the loop does in `step` is done.
        """
        self._tell("tft_on_tail_ending", step=step)

    def order(self, order: OrderName, incident: int, step: int) -> None:
        """
        An order is about to be carried out.
        """
        self._tell("tft_on_order", order=order, incident=incident, step=step)

    def check(self, session: SessionView, name: str) -> CheckResult | None:
        """
        Run the check of that name; None where no plugin knows it. What the check raises is not
        held back: it has found nothing out, and must not pass for one that has.
        """
        result: CheckResult | None = self._plugins.hook.tft_check(session=session, name=name)
        return result

    def _tell(self, hook: str, **facts: object) -> None:
        for watcher in self._watchers:
            method: Callable[..., None] | None = getattr(watcher, hook, None)
            if method is None:
                continue
            try:
                method(**facts)
            except Exception as error:
                if hasattr(error, "tft_fault_kind"):
                    raise
                log.warning("plugin_failed", hook=hook, plugin=repr(watcher), exc_info=True)
