"""
The decorator `tft_exception_handler` for a training function. The decorator calls the training
function again after every incident.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from mindio_ttp import checks, device, logs, utils
from mindio_ttp.checks import Refused
from mindio_ttp.classification import Found, Handle, Patterns
from mindio_ttp.constants import ReportState
from mindio_ttp.processor import FAULTS, processor
from tft.errors import Interrupted, JobEnded

log = logs.get_logger()

P = ParamSpec("P")
R = TypeVar("R")

patterns = Patterns(can_repair=utils.tft_can_do_uce_repair)
"""The patterns with which this process classifies errors by their text."""


def tft_register_exception_handler(
    fault_pattern: str, fault_type: str, fault_handle: Handle
) -> None:
    """
    Classify errors whose text contains `fault_pattern` as `fault_type`, the name of a
    `ReportState`.

    `fault_handle` is a function that takes the text of the error and returns the name of the error.
    """
    call = "tft_register_exception_handler"
    # an empty pattern is refused too, because it would match every error
    pattern = checks.text(call, "fault_pattern", fault_pattern)
    if checks.text(call, "fault_type", fault_type) not in ReportState.__members__:
        names = ", ".join(ReportState.__members__)
        raise Refused(f"{call}: fault_type must be one of {names}, not {fault_type!r}")
    handle = checks.function(call, fault_handle)
    patterns.add(pattern, ReportState[fault_type], handle)


def tft_exception_handler(func: Callable[P, R]) -> Callable[P, R]:
    """
    Return a function that calls the training function `func` again after every incident.

    The positional arguments are kept in one list for the whole job. Every registered function of
    the program receives this list and may change it. The next call of the training function gets
    the entries of the list. Source: `wrapper` of `ttp_decorator.py`, lines 926 to 939 at
    mind-cluster 22bb3d98.

    Raises `TypeError` if `func` cannot be called. The returned function raises `JobEnded` when the
    job ends before it has returned.
    """
    checks.function("tft_exception_handler", func)

    @functools.wraps(func)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        kept: list[Any] = list(args)
        processor.keep_args(kept)
        processor.program.loses_memory = _loses_memory
        while True:
            processor.enter()
            _leave_if_over()
            try:
                result = func(*kept, **kwargs)
                processor.finish()
            except RuntimeError as error:
                found = _found(error)
            except Interrupted:
                found = Found(name="FORCE STOP", state=ReportState.RS_NORMAL, code="")
            except Exception as error:
                _give_up(error)
                raise
            else:
                _leave_if_over()
                if processor.completed:
                    return result
                continue  # `finish` has returned because the ranks must train earlier steps again
            # Report after the `except` block: within it, the traceback would keep the frames of the
            # training loop and their device memory alive.
            processor.report(found.state, found.code, found.said)
            processor.wait()
            device.release_memory()

    return guarded


def _loses_memory(error: RuntimeError) -> bool:
    """
    Return whether an error in a registered function of the program says that the device has lost
    memory.
    """
    found = patterns.classify(error, repairs=processor.told.uce)
    return found.state in (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED)


def _found(error: RuntimeError) -> Found:
    """
    Classify `error` by its text, and return the result. If a function that the program has
    registered for this fails, raise the exception of that function. If `error` is a fault and
    training had not begun, raise `error` itself.
    """
    try:
        found = patterns.classify(error, repairs=processor.told.uce)
    except Exception as wrong:
        log.exception("not_classified", error=str(error))
        _give_up(wrong)
        raise
    if found.state in FAULTS:
        if not processor.begun:
            raise error
        log.error("loop_left", state=found.state.name, exc_info=error)
    return found


def _give_up(error: Exception) -> None:
    """
    Report an error after which this process cannot continue.

    Report nothing before training has begun, because the process then ends with the error, and the
    agent sees that it ends.
    """
    if processor.begun:
        log.error("loop_left", state=ReportState.RS_UNKNOWN.name, exc_info=error)
        processor.report(ReportState.RS_UNKNOWN, "", f"{type(error).__name__}: {error}")
        _leave_if_over()


def _leave_if_over() -> None:
    if processor.exit_code is not None:
        raise JobEnded(processor.exit_code)
