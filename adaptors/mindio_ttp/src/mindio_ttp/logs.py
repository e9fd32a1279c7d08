"""
The log of this package. It is a file in the working directory, or in the place that MindIO's
environment variables name.
"""

import errno
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
"""The facts of a log line. Any: facts may have any type."""

_line = structlog.processors.LogfmtRenderer(key_order=["at", "level", "event"])


class Lines:
    """
    Writes each line to the log file. If each process has its own file, a forked process writes to
    another file than its parent.

    With `printed=True`, lines are written to standard output in addition to the file.
    """

    def __init__(self, wanted: environment.Logging, *, printed: bool = False) -> None:
        self._wanted = wanted
        self._printed = printed

    def msg(self, line: str) -> None:
        """
        Write a line at once, because the process may be killed at any time. If the file cannot be
        written, or there is none, write the line to standard output.
        """
        path = self.path()
        written = path is not None and self._append(path, line)
        if not written or self._printed:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    debug = info = warning = error = msg

    def _append(self, path: Path, line: str) -> bool:
        """
        Append a line to the file. Return whether it was written. Raise no exception, so that no
        process fails because of a log line.
        """
        try:
            if path.parent.is_symlink():
                raise OSError(errno.ELOOP, "the directory of the log is a symbolic link")
            path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            # make a single write in append mode, because several processes may share the file
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            file = os.open(path, flags, FILE_MODE)
            try:
                os.write(file, line.encode() + b"\n")
            finally:
                os.close(file)
        except OSError as error:
            _say_once(path, error)
            return False
        return True

    def path(self) -> Path | None:
        """
        Return the path of the log file. Return None if there is no file.
        """
        if self._wanted.directory is None:
            return None
        own = "" if self._wanted.shared else f".{os.getpid()}"
        return self._wanted.directory / f"ttp_log.log{own}"


_said: set[tuple[int, Path]] = set()
"""The files that were reported as not writable, each with the pid of the process that reported it.
So a forked process reports a file again."""


def _say_once(path: Path, error: OSError) -> None:
    key = (os.getpid(), path)
    if key not in _said:
        _said.add(key)
        sys.stderr.write(
            f"mindio_ttp: {path} cannot be written: {error.strerror}; lines go to standard output. "
            "Set TTP_LOG_PATH to a directory that can be written\n"
        )


def get_logger(
    wanted: environment.Logging | None = None, *, printed: bool = False
) -> Any:  # Any: the return type of structlog's own functions
    """
    Return a logger of structlog for events with facts. `wanted` has the settings; if it is None,
    they are read from the environment variables.

    With `printed=True`, lines are written to standard output in addition to the file, because
    operators look for these lines in the output of the process.
    """
    wanted = wanted or environment.logging()
    return structlog.wrap_logger(
        Lines(wanted, printed=printed),
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
    Return an event as a line of text. If it has a traceback, the lines of the traceback follow.
    """
    exception = str(event.pop("exception", ""))
    line = str(_line(logger, name, event))
    return f"{line}\n{exception}" if exception else line
