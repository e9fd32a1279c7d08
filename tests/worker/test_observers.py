"""
What plugins have a say in, in a worker.
"""

import os
import signal
import sys
from typing import cast

import pluggy
import pytest
from structlog.testing import capture_logs

from tft.plugins import add
from tft.spi.markers import hookimpl
from tft.spi.plugin import PluginSpecs
from tft.spi.types import DeviceFault, SessionView
from tft.worker.observers import Observers

LINE = DeviceFault(words="MUSA error", kind="memory")


class Adds:
    """
    It knows another device.
    """

    @hookimpl
    def tft_device_faults(self) -> list[DeviceFault]:
        """One line."""
        return [LINE]


class Mistakes:
    """
    It gives what is no line.
    """

    @hookimpl
    def tft_device_faults(self) -> list[tuple[str, str]]:
        """A pair of texts."""
        return [("MUSA error", "memory")]


class Raises:
    """
    It gives a line that could never be used.
    """

    @hookimpl
    def tft_device_faults(self) -> list[DeviceFault]:
        """None, in the end."""
        return [DeviceFault(words="(", kind="memory")]


def test_valid_lines_of_plugins_are_collected_and_invalid_ones_ignored() -> None:
    """When plugins add lines to the table of device faults, then the valid lines are used. An
    invalid line of one plugin does not remove the lines of the others."""
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    for plugin in (Adds(), Mistakes(), Raises()):
        add(manager, plugin, type(plugin).__name__)
    assert Observers(manager).device_faults() == [LINE]


class Leaves:
    """
    An observer that fails in its own way.
    """

    def __init__(self, failure: BaseException) -> None:
        self._failure = failure

    @hookimpl
    def tft_opened(self, session: SessionView) -> object:
        """It watches itself."""
        return self

    @hookimpl
    def tft_on_window_closed(self, step: int) -> None:
        """It cannot."""
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
    A signal arrives while this observer runs.
    """

    @hookimpl
    def tft_opened(self, session: SessionView) -> object:
        """
        This object observes.
        """
        return self

    @hookimpl
    def tft_on_window_closed(self, step: int) -> None:
        """
        The signal comes.
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
