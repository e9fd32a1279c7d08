"""
The setup of logging: one line per event, `key=value`, on stderr.

Only the command line calls this setup. All other code gets a logger from structlog, and logs an
event name with keyword arguments. Events of a rank that nobody needs to see on a console go only to
the log file of the rank (`QuietLog`).
"""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

import structlog
from structlog.typing import Processor


class _Lines:
    """
    The object to which structlog passes the text of each event. It writes the text to the file
    descriptor `fd` in one system call. So the text is not mixed up with the output of the rank,
    which the agent writes to the same file.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def info(self, text: str) -> None:
        """
        Write a line. If it cannot be written, for example because the disk is full, leave it out.
        """
        with suppress(OSError):
            os.write(self._fd, f"{text}\n".encode(errors="backslashreplace"))


class _Stream:
    """
    A stream to which structlog writes. It raises no exception when a text cannot be written,
    because a full disk or a closed terminal must not end a process of tft.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """
        Write a text. If it cannot be written, leave it out.
        """
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        """
        Flush the stream. If this fails, the text stays in the buffer of the stream, and a later
        call tries again.
        """
        with suppress(OSError):
            self._stream.flush()


class QuietLog:
    """
    Logs events of a rank to the log file of the rank, and not to the console. These events are not
    printed, because the agent shows everything that a rank prints on the console.
    """

    def __init__(self) -> None:
        self._fd: int | None = None

    def open(self, path: Path) -> None:
        """
        Append the events to the file `path` from now on. If the file cannot be opened, the events
        are logged like all other events of the process.
        """
        before, self._fd = self._fd, None
        if before is not None:
            os.close(before)
        with suppress(OSError):
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def info(self, event: str, **facts: object) -> None:
        """
        Log an event of level info.
        """
        log = structlog.get_logger()
        if self._fd is not None:
            # do not use the global settings of structlog, because in the process of a rank these
            # are the settings of the user's script
            log = structlog.wrap_logger(
                _Lines(self._fd), processors=_PROCESSORS, wrapper_class=structlog.BoundLogger
            )
        log.info(event, **facts)


quiet_log = QuietLog()
"""The log of this process for events that go only to the log file of the rank."""

_PROCESSORS: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    structlog.processors.format_exc_info,
    structlog.processors.LogfmtRenderer(key_order=["at", "level", "event"]),
]


def configure_logs(*, verbose: bool = False) -> None:
    """
    Write events as lines like `at=2026-01-31T12:00:00.123456Z level=info event=rank_silent rank=3`
    to stderr. With `verbose`, also write the events of level debug.
    """
    structlog.configure(
        processors=_PROCESSORS,
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.DEBUG if verbose else logging.INFO
        ),
        # write to the stream that is sys.stderr now, which a test or a caller may have replaced,
        # and not to structlog's default stream
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Stream(sys.stderr))),
        cache_logger_on_first_use=True,
    )
