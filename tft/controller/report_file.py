"""
What the controller writes about a job for people and programs: the file `report.json` in the run
directory when the job is over, and sentences for consoles while it runs.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from math import isfinite
from typing import Any

import pluggy
import structlog

from tft.clock import SystemClock, unix_time
from tft.config import JobSettings
from tft.controller.notices import Notices
from tft.controller.remarks import KEPT, REMARKS, Remarks
from tft.core.job.commands import JobOver
from tft.core.job.incident import Fault, Incident
from tft.core.job.incident_report import (
    incident_began,
    incident_report,
    job_report,
    missed_report,
)
from tft.core.job.machine import Machine
from tft.files import read_object, write_whole
from tft.last_words import leave_word
from tft.plugins import call_guarded
from tft.sentences import incident_file, incident_line, incident_story, is_long
from tft.spi.types import Remark

log = structlog.get_logger()


class ReportFile:
    """
    Writes the report of a job. For each fault, the hook `tft_fault_moment` asks plugins when the
    fault really happened. Plugins that cause faults on purpose, for tests, know this time.
    """

    def __init__(self, settings: JobSettings, plugins: pluggy.PluginManager) -> None:
        self._settings = settings
        self._plugins = plugins
        self._path = settings.run_dir / "report.json"
        self._remarks = Remarks(settings.run_dir / REMARKS, settings.run)
        self._closed = 0
        """The number of closed incidents that `newly_closed` has returned so far."""
        self.notices = Notices()
        """The sentences for consoles."""

    def earlier(self, what: str) -> list[Any]:  # Any: parsed JSON
        """
        Return a list from the report that an earlier run has left in the run directory. `what` is
        the key of the list, such as `incidents`. The list is empty if this run does not resume an
        earlier run, or if there is no such report.
        """
        if not self._settings.resume:
            return []
        entries: list[Any] = read_object(self._path).get(what, [])
        return entries

    def newly_closed(self, incidents: Sequence[Incident]) -> Sequence[Incident]:
        """
        Return the incidents that have ended since the last call. `incidents` has all ended
        incidents of the job.
        """
        new = incidents[self._closed :]
        self._closed = len(incidents)
        return new

    def entry(self, incident: Incident) -> tuple[dict[str, object], float]:
        """
        Return the entry of a closed incident, as it will be in the report, and the time at which
        the incident began (in seconds since 1970). The times in the entry count from then.
        """
        began = incident_began(incident, self._moment)
        unix = unix_time() - (SystemClock().now() - began)
        return incident_report(incident, self._moment), unix

    def remark(self, remark: Remark, at: float) -> bool:
        """
        Keep a remark of a plugin for the report, and tell it to consoles. `at` is the present time
        (CLOCK_MONOTONIC, in seconds). Return False if consoles do not get the remark, because there
        were too many.
        """
        self._remarks.add(remark, at)
        return self.notices.remark(remark.event, remark.facts, at)

    def tell(self, incident: Incident) -> None:
        """
        Send consoles the line about an ended incident. If a line cannot say all that happened,
        write the full account to a file, and name the file in the line.
        """
        entry = incident_report(incident, self._moment)
        line = incident_line(entry)
        if is_long(entry) and (file := self._write_story(entry)):
            line += f"; more in {file}"
        self.notices.incident(line, incident.number)

    def _write_story(self, incident: dict[str, Any]) -> str:  # Any: JSON
        """
        Write all that is known of an incident to a file for people. Return the name of the file in
        the run directory, or an empty text if the file cannot be written.
        """
        name = incident_file(incident["id"])
        try:
            write_whole(self._settings.run_dir / name, incident_story(incident))
        except (OSError, UnicodeError) as error:
            log.warning("incident_not_written", path=name, why=str(error))
            return ""
        return name

    def write(self, outcome: JobOver, machine: Machine, unprotected_steps: int) -> None:
        """
        Write the report of a job that is over. If this run resumes an earlier run, the new report
        repeats the lists (such as the incidents) of the report that the earlier run has written.

        `unprotected_steps` is the number of steps of this run in which some rank opened its update
        window before another node had a copy of the rank-local state of this rank.

        Raises `OSError` if the report cannot be written.
        """
        incidents = [incident_report(each, self._moment) for each in machine.incidents]
        report = job_report(
            outcome,
            machine.last_step,
            [*self.earlier("incidents"), *incidents],
            [*self.earlier("missed"), *missed_report(machine.missed)],
            unprotected_steps,
            [*self.earlier("begins_unlike"), *machine.begins_unlike],
            [*self.earlier("remarks"), *self._remarks.rows][-KEPT:],
        )
        write_whole(self._path, json.dumps(report, indent=1, default=str))

    def lost(self, error: OSError) -> None:
        """
        Say in the log and at the end of the job that the report could not be written.
        """
        why = error.strerror or str(error)
        log.error("report_not_written", path=str(self._path), why=why)
        # this sentence is written to a file too, which may be on the same full disk
        with suppress(OSError):
            leave_word(
                self._settings.run_dir,
                f"the report of the job could not be written to {self._path}: {why}",
            )

    def _moment(self, fault: Fault) -> float | None:
        """
        Return the time in seconds at which a fault really happened, or None if no plugin knows the
        time.
        """
        told = call_guarded(
            self._plugins,
            "tft_fault_moment",
            run_dir=self._settings.run_dir,
            kind=fault.kind,
            rank=fault.rank,
            seen=fault.seen,
        )
        known = [moment for moment in told if _is_time(moment)]
        if len(known) < len(told):
            log.error("fault_moment_not_understood", what=[repr(each) for each in told])
        return min(known, default=None)


def _is_time(moment: object) -> bool:
    """
    Return True if `moment`, which a plugin has returned, is a finite number.
    """
    return isinstance(moment, int | float) and not isinstance(moment, bool) and isfinite(moment)
