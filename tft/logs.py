"""
The setup of logging: one line per event, `key=value`, on stderr.

Only the command line calls this setup. All other code gets a logger from structlog, and logs an
event name with keyword arguments.
"""

import logging
import sys

import structlog


def configure_logs(*, verbose: bool = False) -> None:
    """
    Write events as lines like `at=2026-01-31T12:00:00.123456Z level=info event=rank_silent rank=3`
    to stderr. With `verbose`, also write the events of level debug.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["at", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.DEBUG if verbose else logging.INFO
        ),
        # write to the stream that is sys.stderr now, which a test or a caller may have replaced,
        # and not to structlog's default stream
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
