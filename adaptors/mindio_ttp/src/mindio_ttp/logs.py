"""
The log of this package. By default the log is a file in the directory `logs` under the working
directory. The environment variables of the library MindIO can name another place.
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
"""The facts of one log line, by name. Any: a fact may have any type."""

_line = structlog.processors.LogfmtRenderer(key_order=["at", "level", "event"])


class Lines:
    """
    Writes log lines to the log file. If each process has its own log file, a forked process writes
    to another file than its parent.

    With `printed=True`, the lines are also written to standard output.
    """

    def __init__(self, wanted: environment.Logging, *, printed: bool = False) -> None:
        self._wanted = wanted
        self._printed = printed

    def msg(self, line: str) -> None:
        """
        Write a log line to the log file. If the log file cannot be written, or if there is no log
        file, write the line to standard output.

        The line is not buffered, because the process may be killed at any time.
        """
        path = self.path()
        written = path is not None and self._append(path, line)
        if not written or self._printed:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    debug = info = warning = error = msg

    def _append(self, path: Path, line: str) -> bool:
        """
        Append a log line to the file at `path`. Return whether the line was written. Do not raise
        `OSError`, so that no process fails because of a log line.
        """
        try:
            if path.parent.is_symlink():
                raise OSError(errno.ELOOP, "the directory of the log is a symbolic link")
            path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            # write the whole line at once in append mode, because several processes may share the
            # file
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
        Return the path of the log file. Return None if lines go to standard output instead.
        """
        if self._wanted.directory is None:
            return None
        own = "" if self._wanted.shared else f".{os.getpid()}"
        return self._wanted.directory / f"ttp_log.log{own}"


_said: set[tuple[int, Path]] = set()
"""The log files that were reported as not writable, each with the pid of the process that reported
the file. Because of the pid, a forked process reports the file again."""


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
    Return a logger of the library structlog, which logs named events with facts. `wanted` has the
    settings of the log. If `wanted` is None, the settings are read from environment variables.

    With `printed=True`, the lines of this logger are also written to standard output. Pass it for
    lines that operators look for in the output of the process.
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
    Return `event`, the facts of a log line, as a line of text. If the event has a traceback, the
    lines of the traceback follow.
    """
    exception = str(event.pop("exception", ""))
    line = str(_line(logger, name, event))
    return f"{line}\n{exception}" if exception else line
