"""
The process in which the loggers are called:

    python -m tft_loggers [--job NAME] RUN_DIR LOGGER…

It sends the values that the loggers do not have yet, and then ends. If the controller starts it,
with `--child`, it continues to send until the run is over or the controller has ended.
"""

import argparse
import fcntl
import os
import sys
import threading
from importlib.metadata import entry_points
from pathlib import Path

import structlog

from tft.errors import UsageError
from tft_loggers import GROUP, checked
from tft_loggers.final import Final
from tft_loggers.merging import Merger
from tft_loggers.places import STATE
from tft_loggers.sending import Sender

POLL = 0.25
"""Seconds between two checks whether the ranks have logged new values."""
ORPHANED = 2.0
"""Seconds for which a logger may continue to send its present rows after the controller has ended.
Then this process ends."""

log = structlog.get_logger()


def main(words: list[str]) -> int:
    """
    Send the values of a run to its loggers. `words` are the command-line arguments. Return the exit
    status of this process: 1 if a logger has failed, otherwise 0.
    """
    parser = argparse.ArgumentParser(prog="python -m tft_loggers")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--job", default="", help="the name of the run for the loggers")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("names", nargs="+", metavar="LOGGER")
    given = parser.parse_args(words)
    run_dir: Path = given.run_dir.absolute()
    try:
        names = checked(",".join(given.names), "LOGGER")
        if not (run_dir / STATE).is_dir():
            raise UsageError(
                f"{run_dir} has no values of a run with `tft run --log`: its directory {STATE} "
                "does not exist"
            )
    except UsageError as refused:
        parser.error(str(refused))
    orphaned = threading.Event()
    if given.child:
        threading.Thread(target=_watch, args=(orphaned,), daemon=True).start()
    with (run_dir / STATE / "lock").open("w") as lock:
        # wait for this lock, because the process that an earlier controller has started may still
        # be sending its last rows
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = given.job or run_dir.name
        senders = [_sender(name, job, run_dir, persists=given.child) for name in names]
        _send(run_dir, senders, orphaned, waits=given.child)
    failed = any(sender.failed for sender in senders)
    return 1 if failed else 0


def _send(run_dir: Path, senders: list[Sender], orphaned: threading.Event, *, waits: bool) -> None:
    """
    Merge the values of the ranks and send them. With `waits=True`, return when the run is over or
    `orphaned` is set. With `waits=False`, return when the values of all steps that are final now
    were sent.
    """
    merger = Merger(run_dir)
    for sender in senders:
        sender.start()
    while not orphaned.is_set():
        final = Final.of(run_dir / STATE)
        if merger.merge(final):
            for sender in senders:
                sender.news()
        if final.result or not waits:
            for sender in senders:
                sender.finish(final.result)
            for sender in senders:
                sender.join()
            return
        orphaned.wait(POLL)


def _sender(name: str, job: str, run_dir: Path, *, persists: bool) -> Sender:
    (entry, *_) = entry_points(group=GROUP, name=name)
    return Sender(name, job, run_dir, lambda place: entry.load()(place), persists=persists)


def _watch(orphaned: threading.Event) -> None:
    """
    Wait until the standard input of this process is closed, which happens when the controller ends.
    Then set `orphaned`, wait `ORPHANED` seconds, and end this process.
    """
    while os.read(0, 64):
        pass
    orphaned.set()
    threading.Event().wait(ORPHANED)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
