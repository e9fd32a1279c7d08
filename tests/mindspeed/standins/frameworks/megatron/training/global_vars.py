"""
Megatron's global objects: the arguments and the timers.
"""

from typing import Any

from megatron.core.timers import Timers

_GLOBAL_ARGS: Any = None
_GLOBAL_TIMERS: Any = None


def get_args() -> Any:
    """
    Return the arguments. Raises `AssertionError` before they were set.
    """
    assert _GLOBAL_ARGS is not None, "args is not initialized."
    return _GLOBAL_ARGS


def get_timers() -> Any:
    """
    Return the timers. Raises `AssertionError` before they were set.
    """
    assert _GLOBAL_TIMERS is not None, "timers is not initialized."
    return _GLOBAL_TIMERS


def set_global_variables(args: Any) -> None:
    """
    Set the arguments and create the timers. A program calls this once, before anything else.
    """
    global _GLOBAL_ARGS
    _GLOBAL_ARGS = args
    _set_timers(args)


def _set_timers(args: Any) -> None:
    """
    Create the timers. Raises `AssertionError` if they exist already, as Megatron does.
    """
    global _GLOBAL_TIMERS
    assert _GLOBAL_TIMERS is None, "timers is already initialized."
    _GLOBAL_TIMERS = Timers(args.timing_log_level, args.timing_log_option)
