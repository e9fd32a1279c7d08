"""
What the report takes from plugins.
"""

import math
from pathlib import Path
from typing import Any

import pluggy
import pytest

from tests.controller.test_beginning import settings
from tests.core.lives import trained
from tft.controller.report_file import ReportFile
from tft.plugins import add
from tft.spi.markers import hookimpl
from tft.spi.plugin import PluginSpecs


class Telling:
    """
    A plugin that returns what it is given as the moment of each fault.
    """

    def __init__(self, moment: Any) -> None:  # Any: perhaps no moment
        self.moment = moment

    @hookimpl
    def tft_fault_moment(self) -> Any:  # Any: as above
        return self.moment


@pytest.mark.parametrize("strange", ["3.5", math.nan, -math.inf, True, [1.0]])
def test_moment_that_is_no_time_is_ignored(tmp_path: Path, strange: object) -> None:
    """When a plugin returns something other than a finite number as the moment of a fault, then the
    report counts as if the plugin did not know the moment. The moment of another plugin counts."""
    job = trained()
    job.fault(1, "network")
    job.settle()
    job.train()
    (incident,) = job.machine.incidents
    plugins = pluggy.PluginManager("tft")
    plugins.add_hookspecs(PluginSpecs)
    add(plugins, Telling(strange), "strange")
    report = ReportFile(settings(tmp_path), plugins)
    entry, _ = report.entry(incident)
    assert isinstance(entry["seconds"], dict)
    assert entry["seconds"]["detect"] is None
    add(plugins, Telling(incident.faults[0].seen - 2.0), "right")
    entry, _ = report.entry(incident)
    assert isinstance(entry["seconds"], dict)
    assert entry["seconds"]["detect"] == pytest.approx(2.0)
