"""
MindIO's logger as programs call it (`mindio_ttp.controller_ttp.ttp_logger` of MindIO TFT 7.3.0): messages in
printf form, which go where this package's lines go.
"""

from enum import Enum
from typing import Any

from mindio_ttp import logs


class LEVEL(Enum):
    """
    The levels of MindIO's log.
    """

    DEBUG = 0
    INFO = 1
    WARNING = 2
    ERROR = 3


TID = 100000
"""MindIO shows a thread by the rest of its number by this one."""

_log = logs.get_logger()


class Logger:
    """
    `LOGGER.info("rank:%s", rank)`. What cannot be formatted is written as it is: no rank is lost over a line.
    """

    @staticmethod
    def format(msg: str, *args: Any, **kwargs: Any) -> str:  # Any: as in `logging`
        """
        Return the message with its arguments in their places.
        """
        try:
            return str(msg) % args if args else str(msg)
        except (TypeError, ValueError):
            return f"{msg} {args!r}"

    def debug(self, msg: str, *args: Any, **kwargs: Any) -> None:  # Any: as in `logging`
        """
        Write a line of this level.
        """
        _log.debug(self.format(msg, *args))

    def info(self, msg: str, *args: Any, **kwargs: Any) -> None:  # Any: as in `logging`
        """
        Write a line of this level.
        """
        _log.info(self.format(msg, *args))

    def warning(self, msg: str, *args: Any, **kwargs: Any) -> None:  # Any: as in `logging`
        """
        Write a line of this level.
        """
        _log.warning(self.format(msg, *args))

    def error(self, msg: str, *args: Any, **kwargs: Any) -> None:  # Any: as in `logging`
        """
        Write a line of this level.
        """
        _log.error(self.format(msg, *args))

    def exception(self, msg: str, *args: Any, **kwargs: Any) -> None:  # Any: as in `logging`
        """
        Write an error and the traceback of the exception that is handled.
        """
        _log.exception(self.format(msg, *args))


LOGGER = Logger()
