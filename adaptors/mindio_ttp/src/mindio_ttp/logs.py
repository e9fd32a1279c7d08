"""
The log of this package: a file in the working directory, or the place that MindIO's variables name.
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
"""Any: the facts of a log line."""

_line = structlog.processors.LogfmtRenderer(key_order=["at", "level", "event"])


class Lines:
    """
    Writes each line to the log. A process that is forked has a file of its own.

    `printed`: where there is a file, lines are written to standard output as well.
    """

    def __init__(self, wanted: environment.Logging, *, printed: bool = False) -> None:
        self._wanted = wanted
        self._printed = printed

    def msg(self, line: str) -> None:
        """
        Write a line at once: the process may be killed.
        """
        path = self.path()
        written = path is not None and self._append(path, line)
        if not written or self._printed:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    debug = info = warning = error = msg

    def _append(self, path: Path, line: str) -> bool:
        """
        Append a line to the file. Return whether it was written: no rank is lost because of a log
        line.
        """
        try:
            if path.parent.is_symlink():
                raise OSError(errno.ELOOP, "the directory of the log is a symbolic link")
            path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            # one appending write: other processes may share the file
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
        Return the path of the file; None where there is no file.
        """
        if self._wanted.directory is None:
            return None
        own = "" if self._wanted.shared else f".{os.getpid()}"
        return self._wanted.directory / f"ttp_log.log{own}"


_said: set[tuple[int, Path]] = set()
"""The files that each process has reported as not writable. A forked process reports this
itself."""


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
) -> Any:  # Any: as structlog types it
    """
    Return a logger of events with facts. `wanted`: the settings; None takes those of the
    environment.

    `printed`: the lines are written to standard output as well as to the file, for lines that are
    looked for in the output of the process.
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
    Return an event as a line of text, with the traceback below it in its usual form.
    """
    exception = str(event.pop("exception", ""))
    line = str(_line(logger, name, event))
    return f"{line}\n{exception}" if exception else line
