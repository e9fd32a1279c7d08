"""
The setup of logging: one line per event, `key=value`, on stderr.

Only the command line calls this setup. All other code gets a logger from structlog, and logs an
event name with keyword arguments. A rank writes events that nobody needs to see on a console to its
log file only.
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
    What structlog calls with the text of an event. Each event is one write, because the agent writes
    the output of the rank to the same file.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def info(self, text: str) -> None:
        """
        Write a line. A line that cannot be written, because the disk is full, is left out.
        """
        with suppress(OSError):
            os.write(self._fd, f"{text}\n".encode(errors="backslashreplace"))


class _Stream:
    """
    A stream for structlog. If it cannot be written, because the disk is full or the terminal is
    closed, nothing is raised: a process of tft must not end because of that.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """
        Write a text, or leave it out.
        """
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        """
        Hand on what was written. What cannot be handed on is tried again later.
        """
        with suppress(OSError):
            self._stream.flush()


class QuietLog:
    """
    The events of a rank that go to its log file, and not to the console: the agent shows all that a
    rank prints.
    """

    def __init__(self) -> None:
        self._fd: int | None = None

    def open(self, path: Path) -> None:
        """
        Append the events to this file from now on. If it cannot be opened, events are logged as all
        others.
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
            # not with the settings of structlog: here they are those of the user's script
            log = structlog.wrap_logger(
                _Lines(self._fd), processors=_PROCESSORS, wrapper_class=structlog.BoundLogger
            )
        log.info(event, **facts)


quiet_log = QuietLog()
"""The quiet log of this process."""

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
