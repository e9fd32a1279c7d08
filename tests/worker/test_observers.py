"""
Plugins in a worker: additional lines of device faults, and observers of the session.
"""

import os
import signal
import sys
from typing import cast

import pluggy
import pytest
from structlog.testing import capture_logs

from tft.plugins import add
from tft.spi.faults import TrainingFault
from tft.spi.markers import hookimpl
from tft.spi.plugin import PluginSpecs
from tft.spi.types import DeviceFault, Numbers, SessionView
from tft.worker.observers import Observers

LINE = DeviceFault(words="MUSA error", kind="memory")


class Adds:
    """
    A plugin that adds a line to the table of device faults.
    """

    @hookimpl
    def tft_device_faults(self) -> list[DeviceFault]:
        """
        Return one valid line.
        """
        return [LINE]


class Mistakes:
    """
    A plugin that returns a line of the wrong type.
    """

    @hookimpl
    def tft_device_faults(self) -> list[tuple[str, str]]:
        """
        Return a pair of texts instead of a `DeviceFault`.
        """
        return [("MUSA error", "memory")]


class Miscounts:
    """
    A plugin that returns no list.
    """

    @hookimpl
    def tft_device_faults(self) -> int:
        """
        Return a number.
        """
        return 5


class Raises:
    """
    A plugin whose hook raises an error, because its regular expression is invalid.
    """

    @hookimpl
    def tft_device_faults(self) -> list[DeviceFault]:
        """
        Raises `UsageError`, because the regular expression is invalid.
        """
        return [DeviceFault(words="(", kind="memory")]


def test_valid_lines_of_plugins_are_collected_and_invalid_ones_ignored() -> None:
    """When plugins add lines to the table of device faults, then the valid lines are used. An
    invalid line of one plugin does not remove the lines of the others."""
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    for plugin in (Adds(), Mistakes(), Miscounts(), Raises()):
        add(manager, plugin, type(plugin).__name__)
    assert Observers(manager).device_faults() == [LINE]


class Leaves:
    """
    An observer that raises the exception that the test chooses.
    """

    def __init__(self, failure: BaseException) -> None:
        self._failure = failure

    @hookimpl
    def tft_opened(self, session: SessionView) -> object:
        """
        Return this object as the observer of the session.
        """
        return self

    @hookimpl
    def tft_on_window_closed(self, step: int) -> None:
        """
        Raise the chosen exception.
        """
        raise self._failure


@pytest.mark.parametrize("failure", [RuntimeError("no room"), SystemExit(3)])
def test_an_observer_that_raises_or_exits_does_not_end_the_loop(failure: BaseException) -> None:
    """When an observer raises, or calls `sys.exit`, then the failure is logged and training
    continues."""
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    add(manager, Leaves(failure), "leaves")
    observers = Observers(manager)
    observers.opened(cast("SessionView", None))
    with capture_logs() as logs:
        observers.window_closed(7)
    assert [line["event"] for line in logs] == ["plugin_failed"]


class Interrupted:
    """
    An observer during whose call a signal arrives.
    """

    @hookimpl
    def tft_opened(self, session: SessionView) -> object:
        """
        Return this object as the observer of the session.
        """
        return self

    @hookimpl
    def tft_on_window_closed(self, step: int) -> None:
        """
        Send SIGUSR1 to this process.
        """
        os.kill(os.getpid(), signal.SIGUSR1)


def test_signal_handler_can_exit_the_script_while_an_observer_runs() -> None:
    """When the signal handler of the script calls `sys.exit` while an observer runs, then the
    script ends. The observer is not reported as failed."""

    def leave(number: int, frame: object) -> None:
        sys.exit(7)

    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    add(manager, Interrupted(), "interrupted")
    observers = Observers(manager)
    observers.opened(cast("SessionView", None))
    before = signal.signal(signal.SIGUSR1, leave)
    try:
        with pytest.raises(SystemExit):
            observers.window_closed(7)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_check_that_calls_sys_exit_has_failed() -> None:
    """When a check calls `sys.exit`, then the check has failed and the rank continues."""

    class Exits:
        @hookimpl
        def tft_check(self, session: SessionView, name: str) -> None:
            sys.exit(0)

    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    add(manager, Exits(), "exits")
    with pytest.raises(RuntimeError, match=r"the check called sys.exit\(0\)"):
        Observers(manager).check(cast("SessionView", None), "memory")


class Refuses:
    """
    An observer that refuses what is larger than 3, and fails at 5.
    """

    @hookimpl
    def tft_opened(self, session: SessionView) -> object:
        """
        Return this object as the observer of the session.
        """
        return self

    @hookimpl
    def tft_on_loss(self, step: int, loss: float) -> bool:
        """
        Return whether the loss is larger than 3.
        """
        return loss > 3

    @hookimpl
    def tft_on_window_opening(self, step: int, numbers: Numbers) -> None:
        """
        Raise a fault for a norm larger than 3, and another error at 5.
        """
        if numbers.norm == 5:
            raise RuntimeError("no room")
        if numbers.norm is not None and numbers.norm > 3:
            raise TrainingFault("too large", kind="numeric")


def test_observer_refuses_numbers_and_its_failure_refuses_nothing() -> None:
    """When an observer refuses a loss or raises a fault before an update, then the reason is
    returned. When it raises another exception, then that is logged, and nothing is refused."""
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    observers = Observers(manager)
    observers.opened(cast("SessionView", None))
    watched_before = observers.watch_numbers
    add(manager, Refuses(), "refuses")
    observers.opened(cast("SessionView", None))
    assert (watched_before, observers.watch_numbers) == (False, True)
    assert [observers.loss(1, loss) for loss in (2.0, 4.0)] == [False, True]
    assert observers.refusal(1, Numbers(norm=2.0)) == ""
    assert observers.refusal(1, Numbers(norm=4.0)) == "too large"
    with capture_logs() as logs:
        assert observers.refusal(1, Numbers(norm=5.0)) == ""
    assert [line["event"] for line in logs] == ["plugin_failed"]
