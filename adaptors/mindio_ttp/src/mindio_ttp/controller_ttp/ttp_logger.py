"""
The logger that the library MindIO offers to training programs, in its module
`mindio_ttp.controller_ttp.ttp_logger` (MindIO TFT 7.3.0).

The messages are in printf form. The messages are written to the same log file as the log lines of
this package.
"""

from enum import Enum
from typing import Any

from mindio_ttp import logs


class LEVEL(Enum):
    """
    The levels of log lines in the library MindIO.
    """

    DEBUG = 0
    INFO = 1
    WARNING = 2
    ERROR = 3


TID = 100000
"""The log of the library MindIO shows the number of a thread modulo this constant. This package
does not use the constant, and keeps it for programs that import it."""

_log = logs.get_logger()


class Logger:
    """
    A logger for calls such as `LOGGER.info("rank:%s", rank)`.

    If a message cannot be formatted with its arguments, the unformatted message and the arguments
    are written. So no process fails because of a log line.
    """

    @staticmethod
    # Any: the values to be formatted have any type
    def format(msg: str, *args: Any, **kwargs: Any) -> str:
        """
        Return the message `msg` with `args` inserted in printf form. If that is not possible,
        return the message followed by the arguments.
        """
        try:
            return str(msg) % args if args else str(msg)
        except (TypeError, ValueError):
            return f"{msg} {args!r}"

    # Any: the values to be formatted have any type
    def debug(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """
        Write a debug line.
        """
        _log.debug(self.format(msg, *args))

    # Any: the values to be formatted have any type
    def info(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """
        Write an info line.
        """
        _log.info(self.format(msg, *args))

    # Any: the values to be formatted have any type
    def warning(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """
        Write a warning line.
        """
        _log.warning(self.format(msg, *args))

    # Any: the values to be formatted have any type
    def error(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """
        Write an error line.
        """
        _log.error(self.format(msg, *args))

    # Any: the values to be formatted have any type
    def exception(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """
        Write an error line with the traceback of the exception that is being handled.
        """
        _log.exception(self.format(msg, *args))


LOGGER = Logger()
