"""
What plugins have a say in, in a worker.
"""

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


def test_lines_of_plugins_are_collected_and_mistakes_left_out() -> None:
    """
    When plugins add lines to the table of device faults, then those that are some count, and a plugin's
    mistake takes nothing from the others.
    """
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
    """
    When an observer raises, or calls `sys.exit`, then that is logged and the training goes on.
    """
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    add(manager, Leaves(failure), "leaves")
    observers = Observers(manager)
    observers.opened(cast("SessionView", None))
    with capture_logs() as logs:
        observers.window_closed(7)
    assert [line["event"] for line in logs] == ["plugin_failed"]
