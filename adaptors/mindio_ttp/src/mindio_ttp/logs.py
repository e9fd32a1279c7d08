"""
Where the lines of this package go: to the output of the process, which the agent keeps, or where MindIO's
variables want them.
"""

import logging
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import structlog

from mindio_ttp import environment

DIRECTORY_MODE, FILE_MODE = 0o750, 0o640

Event = MutableMapping[str, Any]
"""Any: whatever is told."""

_line = structlog.processors.LogfmtRenderer(key_order=["at", "level", "event"])


class Lines:
    """
    Takes each line to where it belongs. A process that is forked has a file of its own.
    """

    def __init__(self, wanted: environment.Logging) -> None:
        self._wanted = wanted

    def msg(self, line: str) -> None:
        """
        Written at once: the process may be killed.
        """
        path = self.path()
        written = path is not None and self._append(path, line)
        if not written or self._wanted.stdout:
            stream = sys.stdout if self._wanted.stdout else sys.stderr
            stream.write(line + "\n")
            stream.flush()

    debug = info = warning = error = msg

    def _append(self, path: Path, line: str) -> bool:
        """
        Whether it could be: no rank is lost over a line.
        """
        try:
            path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            # one write, at the end: others may have the same file
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, FILE_MODE)
            try:
                os.write(file, line.encode() + b"\n")
            finally:
                os.close(file)
        except OSError:
            return False
        return True

    def path(self) -> Path | None:
        """
        The file; None: there is none.
        """
        if self._wanted.directory is None:
            return None
        own = "" if self._wanted.shared else f".{os.getpid()}"
        return self._wanted.directory / f"ttp_log{own}.log"


def get_logger(wanted: environment.Logging | None = None) -> Any:  # Any: as structlog types it
    """
    A logger of events with facts; `wanted` is what the environment says.
    """
    wanted = wanted or environment.logging()
    return structlog.wrap_logger(
        Lines(wanted),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            structlog.processors.format_exc_info,
            _render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, wanted.level)),
    )


def _render(logger: object, name: str, event: Event) -> str:
    """
    A line; the traceback below it, as one reads it.
    """
    exception = str(event.pop("exception", ""))
    line = str(_line(logger, name, event))
    return f"{line}\n{exception}" if exception else line
