"""
The progress of a run over time, in the file `progress.jsonl` of the run directory. From this file
`tft report` computes how the time of the run was spent. The story (the record of all events) does
not contain the completed steps. The controller learns of steps from heartbeats, which are too many
for the story.

The file has three kinds of rows. `docs/reference/report.md` describes their keys:

    {"at": 10.0, "unix": 1.79e9, "run": "5f", "opened": 9.9, "epoch": 1, "world": 4, "from_step": 0}
    {"at": 12.5, "unix": 1.79e9, "state": "healthy", "incident": 0}
    {"at": 13.5, "unix": 1.79e9, "step": 120, "ranks": 4}
"""

import json
import os
from contextlib import suppress
from pathlib import Path

import structlog

from tft.clock import SystemClock, unix_time
from tft.core.job.transitions import State
from tft.protocol.messages import Beat
from tft.replay.recording import Opened

EVERY = 1.0
"""The least time in seconds between two rows about steps."""
LOOK = 0.1
"""The least time in seconds between two checks for a new step. A check takes longer the more nodes
the job has, so it is not made for every heartbeat. The time in a row about a step is the time of
the check that found the step."""
TRAINING = frozenset({State.HEALTHY, State.PAUSING})
"""The states of the job in which the steps are recorded. In all other states the ranks do not
train, or are about to return to another step."""

Row = dict[str, object]

log = structlog.get_logger()

PROGRESS = "progress.jsonl"
"""The name of the file with the progress of a job, in its run directory."""


def last_incident(path: Path) -> int:
    """
    Return the highest number that an incident of an earlier run has in the file `path`; 0 if there
    is none. A run that was killed has no report, so its incidents are only in this file and in the
    story.
    """
    highest = 0
    with suppress(OSError), path.open("rb") as file:
        for row in file:
            if b'"state"' not in row:  # skip rows about steps without parsing them
                continue
            with suppress(ValueError, KeyError, TypeError):  # an incomplete row
                highest = max(highest, int(json.loads(row)["incident"]))
    return highest


class ProgressRows:
    """
    Decides which rows the file gets. It reads no clock and writes nothing: the caller passes the
    times (CLOCK_MONOTONIC, in seconds).
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        # for each node with ranks that train: the highest step that all of these ranks have
        # completed, and the number of these ranks
        self._nodes: dict[int, tuple[int, int]] = {}
        self._heard = self._next = self._written = 0.0
        # the lowest step of all nodes, how many ranks train, and when these two numbers were first
        # seen
        self._seen: tuple[int, int, float] | None = None
        self._told: tuple[int, int, float] | None = None
        self._stand: tuple[State, int] | None = None

    def leads(self, epoch: int, at: float) -> Row:
        """
        Return the row with which a controller begins to lead a run. A controller that continues the
        run of an earlier one writes the row again, with a higher `epoch`.
        """
        opened = self._opened
        return {
            "at": at,
            "run": opened.run,
            "opened": opened.at,
            "epoch": epoch,
            "world": opened.world,
            "from_step": 0 if opened.resume is None else opened.resume[1],
            "first_incident": opened.first_incident,
        }

    def beat(self, beat: Beat, at: float) -> Row | None:
        """
        Note the heartbeat of a node that arrived at the time `at`. Return a row with the highest
        step that all training ranks have completed, or None if no row is due.
        """
        steps = [pulse.position.step for pulse in beat.pulses if pulse.training]
        if not steps:
            self._nodes.pop(beat.node, None)
            return None
        # when a node is heard for the second time, every other node has had the time to send a
        # heartbeat: only then the lowest step of all nodes is known
        complete = beat.node in self._nodes
        self._nodes[beat.node] = min(steps), len(steps)
        self._heard = at
        if not complete or at < self._next or not self._trains:
            return None
        self._next = at + LOOK
        self._look(at)
        return self._row(at) if at - self._written >= EVERY else None

    def state(self, state: State, incident: int, result: str, at: float) -> list[Row]:
        """
        Note the state of the job since the time `at`. `incident` is the number of the open
        incident, or 0 if none is open. `result` is how the job ends, or "" if it does not end.

        Return the rows to write; none if the state has not changed. If the ranks train no longer,
        the first row is about the last step that heartbeats have reported, and the second row about
        the new state.
        """
        if (state, incident) == self._stand:
            return []
        last = None
        if self._trains and state not in TRAINING:
            self._look(self._heard)
            last = self._row(at)
        self._stand = state, incident
        if state is not State.PAUSING:
            # forget the steps that nodes have reported: nodes may be lost now, or return to an
            # earlier step
            self._nodes, self._seen, self._told = {}, None, None
            self._next = self._written = 0.0
        row: Row = {"at": at, "state": str(state), "incident": incident}
        if result:
            row["result"] = result
        return [row] if last is None else [last, row]

    @property
    def _trains(self) -> bool:
        return self._stand is not None and self._stand[0] in TRAINING

    def _look(self, at: float) -> None:
        if not self._nodes:
            return
        step = min(step for step, _ in self._nodes.values())
        ranks = sum(number for _, number in self._nodes.values())
        if self._seen is None or self._seen[:2] != (step, ranks):
            self._seen = step, ranks, at

    def _row(self, at: float) -> Row | None:
        """
        Return a row with the step and the number of training ranks that `_look` has found last, and
        the time at which it found them first. Return None if the last row has the same values.
        """
        if self._seen is None or self._seen == self._told:
            return None
        self._told, self._written = self._seen, at
        step, ranks, since = self._seen
        return {"at": since, "step": step, "ranks": ranks}


class ProgressFile:
    """
    Writes the rows. If a row cannot be written, for example because the disk is full, the job goes
    on. The log of the controller then says so once.
    """

    def __init__(self, path: Path, opened: Opened) -> None:
        self._path = path
        self._clock = SystemClock()
        self._file: int | None = None
        self._rows = ProgressRows(opened)
        self._complained = False
        self._torn = False
        """True if the file may end with an incomplete row."""

    def leads(self, epoch: int, at: float) -> None:
        """
        Write that the controller with the number `epoch` begins to lead the run.
        """
        self._write(self._rows.leads(epoch, at))

    def beat(self, beat: Beat, at: float) -> None:
        """
        Write the step of the job if the heartbeat of a node shows a new one and a row is due.
        """
        row = self._rows.beat(beat, at)
        if row is not None:
            self._write(row)

    def state(self, state: State, incident: int, result: str, at: float) -> None:
        """
        Write the state of the job if it has changed.
        """
        for row in self._rows.state(state, incident, result, at):
            self._write(row)

    def _write(self, row: Row) -> None:
        try:
            self._append(row)
        except OSError as error:
            if self._complained:
                return
            self._complained = True
            refused = error.strerror
        else:
            return
        why = f"{refused}: the report of this run will lack a part of its time"
        log.error("progress_not_written", path=str(self._path), why=why)

    def _append(self, row: Row) -> None:
        at = float(str(row["at"]))
        unix = unix_time() - (self._clock.now() - at)
        line = json.dumps(
            {**row, "at": round(at, 3), "unix": round(unix, 3)}, separators=(",", ":")
        )
        if self._file is None:
            self._file = self._open()
        content = (b"\n" if self._torn else b"") + line.encode() + b"\n"
        self._torn = os.write(self._file, content) < len(content)

    def _open(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # an earlier controller may have died while it wrote a row: then the next row begins on a
        # new line
        size = os.fstat(file).st_size
        self._torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        return file
