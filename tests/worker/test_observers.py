"""
What plugins have a say in, in a worker.
"""

import pluggy

from tft.plugins import add
from tft.spi.markers import hookimpl
from tft.spi.plugin import PluginSpecs
from tft.spi.types import DeviceFault
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
