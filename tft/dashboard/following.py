"""
Follows the job in a run directory, from run to run: also while no controller leads it, after its
end, and while the directory cannot be read.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from tft.clock import SystemClock, processor_time
from tft.dashboard.curve import Curve
from tft.dashboard.run import RunFollower, past_of
from tft.dashboard.view import Curves, Disk, Ranks, Spent, View
from tft.errors import UsageError
from tft.launcher.look import watching
from tft.launcher.records import Records, is_over, read_records
from tft.launcher.run_directory import JOB
from tft.launcher.situation import over
from tft.report.facts import Facts as Report
from tft.report.facts import gather
from tft.report.goodput import INCIDENT
from tft.report.sentences import ending, next_steps
from tft.sentences import remark_text

EVERY = 0.5
"""Seconds between two views of the page, if nothing happens. `tft top` uses the same interval."""
SOONEST = 0.05
"""The least time in seconds between two views when the controller sends orders."""
_SHARE = 4.0
"""The pause after a view, as a multiple of the processor time that making the view took. The same
thread must receive the heartbeats in the pause."""
_AGAIN = 1.0
"""Seconds between two attempts to read a run directory that cannot be read or whose job is over."""
_RECORDS = 5.0
"""Seconds between two checks whether processes of the job live on this machine."""

Show = Callable[[View], None]


def disk_of(run_dir: Path) -> Disk | None:
    """
    Return the free space of the run directory's file system, or None if it cannot be read.
    """
    try:
        usage = shutil.disk_usage(run_dir)
    except OSError:
        return None
    return Disk(free=usage.free, size=usage.total)


class JobFollower:
    """
    Shows the job in a run directory, run after run: makes a `View` again and again, and passes it
    to `show`.
    """

    def __init__(self, run_dir: Path, show: Show) -> None:
        self._run_dir = run_dir
        self._show = show
        self._clock = SystemClock()

    async def follow(self) -> None:
        """
        Show the job until this task is cancelled.
        """
        while True:
            try:
                records = await asyncio.to_thread(read_records, self._run_dir)
                if records.report is not None:
                    await self._ended(records)
                else:
                    await self._running(records)
            except (UsageError, OSError) as unread:
                self._show(_unread(self._run_dir, str(unread)))
                await asyncio.sleep(_AGAIN)

    async def _running(self, records: Records) -> None:
        """
        Show a run until it is over, until another run begins, or until its directory is gone.
        """
        follower = RunFollower(records)
        await asyncio.to_thread(follower.read_past)
        looked = self._clock.now()
        async with watching(records.there) as watch:
            while not is_over(self._run_dir):
                watch.orders.clear()
                begun = self._clock.now()
                if begun - looked > _RECORDS:
                    looked = begun
                    records = await asyncio.to_thread(read_records, self._run_dir)
                    if records.began != follower.records.began:
                        return
                    follower.records = records
                disk = await asyncio.to_thread(self._read, follower)
                used = processor_time()
                self._show(follower.view(watch, disk))
                cost = processor_time() - used
                await _passed(watch.orders.wait(), max(SOONEST, _SHARE * cost), EVERY)

    def _read(self, follower: RunFollower) -> Disk | None:
        follower.read()
        if not (self._run_dir / JOB).exists():
            raise UsageError(f"the run directory {self._run_dir} has disappeared")
        return disk_of(self._run_dir)

    async def _ended(self, records: Records) -> None:
        """
        Show a run that is over, until another run begins in its directory.
        """
        report = await asyncio.to_thread(gather, self._run_dir)
        view = await asyncio.to_thread(_over, records, report)
        while True:
            self._show(view)
            await asyncio.sleep(_AGAIN)
            if not is_over(self._run_dir):
                return


async def _passed(news: Awaitable[object], least: float, most: float) -> None:
    """
    Wait until `news` has come, but for at least `least` and at most `most` seconds. If `least` is
    larger than `most`, wait for `least` seconds.
    """

    async def waited() -> None:
        await news

    task = asyncio.ensure_future(waited())
    try:
        await asyncio.sleep(least)
        if most > least:
            await asyncio.wait([task], timeout=most - least)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _unread(run_dir: Path, why: str) -> View:
    return View(
        name=run_dir.resolve().name,
        mood="trouble",
        title="cannot be read",
        trouble=f"{why}. This page tries again every second.",
        disk=disk_of(run_dir),
    )


def _over(records: Records, report: Report) -> View:
    """
    Return the view of a job that has ended.
    """
    goodput = report.goodput
    spent, curves = None, Curves(points=(), version=(0, -1))
    if report.runs:
        last = report.runs[-1]
        curve = Curve()
        curve.take(last.progress)
        curves = Curves(points=curve.points, version=(curve.version, -1))
        marks = [
            (s.start, s.end, s.incident)
            for s in last.goodput.spans
            if s.incident and s.kind == INCIDENT
        ]
        if goodput is not None:
            spent = Spent(
                share=goodput.share,
                wall=goodput.wall,
                lately=goodput.share,
                parts=goodput.parts,
                marks=marks,
            )
    return View(
        name=records.run_dir.resolve().name,
        mood="over",
        title=ending(report),
        trouble=report.why,
        facts=over(records),
        past=past_of(report),
        spent=spent,
        remarks=[
            remark_text(each["event"], each["facts"]) for each in report.report.get("remarks", ())
        ],
        disk=disk_of(records.run_dir),
        ranks=Ranks(codes="", rows=()),
        curves=curves,
        advice=next_steps(report),
    )
