"""
Makes one line about the progress of a running job, for a console. On a terminal this line is drawn
again and again. Without a terminal it is printed from time to time.
"""

import asyncio
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Protocol

from tft.clock import SystemClock
from tft.core.job.transitions import State
from tft.launcher.look import RankSeen, Watch, look, pace, watching
from tft.launcher.run_directory import JobThere
from tft.launcher.situation import MEANS
from tft.limits import can_start_threads
from tft.sentences import counted, seconds

_EVERY = 0.5  # seconds between two drawings on a terminal
_FIRST, _LAST = 30.0, 600.0
"""The first and the longest interval in seconds between two lines without a terminal. The intervals
are 30, 60, 120, 240, 480 and then 600 seconds. So even a short job shows that it trains, and a job
of a month prints only about 4,500 lines."""
_LARGE = 512
"""With this many ranks or more, `tft run` only looks at the job from time to time, even if the line
is drawn in a terminal. To listen to all heartbeats of a thousand ranks would take a tenth of a
core."""
_RARELY = 5.0  # seconds between two looks at a large job
_LOOK = 3.0  # the longest time of a look in seconds
_THREADS = 4
"""How many threads the system must be able to start before the job is looked at. A look needs
two."""
_STANDS, _STEPS = 3.0, 3
"""A line says that the job makes no progress if the last progress is longer ago than `_STANDS`
seconds, and longer than `_STEPS` steps usually take."""
_TAIL = 4096
"""How many bytes at the end of a file of records are searched for the last row."""
_TRAINS = (str(State.HEALTHY), str(State.PAUSING))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """
    One part of a line. Where the line is too long, the parts with the highest `rank` are left out
    first. This `rank` says how important the part is; it is no rank of the job.
    """

    text: str
    rank: int


class Display(Protocol):
    """
    A console that shows the line.
    """

    live: bool
    """True if a new line is drawn over the previous line, as in a terminal. Then lines are shown
    often."""

    def show(self, parts: Sequence[Part]) -> None:
        """
        Show a line. Never blocks.
        """


class Progress:
    """
    Makes the lines about one job. `world` is the number of ranks with which the job was started.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._clock = SystemClock()
        self._since = self._clock.now()
        self._state = ""
        self._before: tuple[int, float] | None = None
        """The step that the line before has shown, and when this step ended. None if the job did
        not train then."""

    def parts(self, watch: Watch) -> list[Part]:
        """
        Return the parts of a line about the present state of the job in `watch`. The list is empty
        if the job is over, or if nothing is known about it yet.
        """
        if watch.state != self._state:
            self._since, self._state = self._clock.now(), watch.state
        if self._state in (State.EXITING, State.ENDED):
            return []
        ranks = [seen for seen in watch.ranks().values() if seen.pulse.training]
        if not ranks and watch.lead is None:
            return []
        return [*self._standing(), *self._steps(ranks), *self._others(watch, ranks)]

    def _standing(self) -> Iterator[Part]:
        if self._state == State.HEALTHY:
            self._since = self._clock.now()
            return
        name = self._state or "no controller leads the job"
        took = self._clock.now() - self._since
        yield Part(text=f"{name} ({_whole(took)})" if took >= 1.0 else name, rank=0)
        if means := MEANS.get(self._state):
            yield Part(text=means, rank=6)

    def _steps(self, ranks: Sequence[RankSeen]) -> Iterator[Part]:
        together = pace(ranks)
        if together.slowest is None:
            return
        pulse = together.slowest.pulse
        yield Part(text=f"step {pulse.position.step}", rank=0)
        trains = self._state in _TRAINS
        took, before = together.step_seconds, self._before
        self._before = (pulse.position.step, pulse.moved) if trains else None
        if before is not None and trains and pulse.position.step > before[0]:
            # if no rank has ended two steps during the look, compute the time of a step from the
            # steps that this line and the line before it show
            took = took or (pulse.moved - before[1]) / (pulse.position.step - before[0])
        still = together.standstill or 0.0
        if still > max(_STANDS, _STEPS * (took or 0.0)):
            yield Part(text=f"no progress for {_whole(still)}", rank=1)
        elif took is not None and trains:
            yield Part(text=f"{took:.3g} s/step", rank=2)

    def _others(self, watch: Watch, ranks: Sequence[RankSeen]) -> Iterator[Part]:
        if ranks:
            of = "" if len(ranks) == self._world else f" of {self._world}"
            noun = "rank" if self._world == 1 else "ranks"
            yield Part(text=f"{len(ranks)}{of} {noun}", rank=4)
        if watch.lead is not None and watch.lead.incident:
            yield Part(text=counted(watch.lead.incident, "incident"), rank=3)


def _whole(duration: float) -> str:
    """
    Return a duration as text, without fractions of a second, which do not matter here.
    """
    return f"{duration:.0f} s" if duration < 119.5 else seconds(duration)


def fitted(parts: Sequence[Part], columns: int = 0) -> str:
    """
    Return the parts as a line of at most `columns` characters; 0: of any length.
    """
    kept = list(parts)
    while columns and len(kept) > 1 and len(_joined(kept)) > columns:
        # drop the least important part. Among equally important parts, drop the last one
        kept.remove(max(reversed(kept), key=lambda part: part.rank))
    line = _joined(kept)
    return line[:columns] if columns else line


def _joined(parts: Sequence[Part]) -> str:
    return f"tft: {', '.join(part.text for part in parts)}"


# ---------------------------------------------------------------- when a line is shown


async def show_progress(
    there: JobThere, nodes: int, world: int, display: Display, every: int | None
) -> None:
    """
    Show the progress of a job until this task is cancelled. `nodes` and `world` are the numbers of
    its nodes and ranks. `every` is the interval in seconds between two lines without a terminal;
    None: the interval grows.
    """
    progress = Progress(world)
    if display.live and world < _LARGE:
        async with watching(there) as watch:
            while True:
                display.show(progress.parts(watch))
                await asyncio.sleep(_EVERY)
    for interval in repeat(_RARELY) if display.live else _intervals(every):
        await asyncio.sleep(interval)
        if not can_start_threads(_THREADS):
            continue  # a look that cannot start its threads would end this process, and so the job
        # connect only for a short look, so that no process listens to all heartbeats of a large job
        async with watching(there) as watch:
            await look(watch, range(nodes), 0.0, min(_LOOK, interval))
            if parts := progress.parts(watch):
                display.show(parts)


def _intervals(every: int | None) -> Iterator[float]:
    interval = _FIRST if every is None else float(every)
    while True:
        yield interval
        if every is None:
            interval = min(2 * interval, _LAST)


# ---------------------------------------------------------------- the loss


class Losses:
    """
    The newest loss that a script has recorded with `session.record` under the name `loss`, on the
    lowest rank that records.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._path: Path | None = None

    def newest(self) -> float | None:
        """
        Return the newest loss, or None if no row with a loss can be found. If the file system
        hangs, the call blocks.
        """
        try:
            if self._path is None:
                found = self._run_dir.glob("records-rank*.jsonl")
                self._path = min(found, key=lambda path: (len(path.name), path.name), default=None)
            return None if self._path is None else _last_loss(self._path)
        except OSError:  # a rank that goes back to an earlier step replaces the file
            return None


def _last_loss(path: Path) -> float | None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TAIL))
        rows = file.read(_TAIL).split(b"\n")[:-1]
    for row in reversed(rows):
        try:
            loss = float(json.loads(row)["loss"])
        except (ValueError, KeyError, TypeError, OverflowError):
            continue  # a row without a loss, or the first row read, whose beginning is missing
        return loss if math.isfinite(loss) else None
    return None
