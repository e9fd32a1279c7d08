"""
The decorator of a training function: it is entered again after every incident.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from mindio_ttp import checks, device, logs, utils
from mindio_ttp.checks import Refused
from mindio_ttp.classification import Found, Handle, Patterns
from mindio_ttp.processor import FAULTS, processor
from mindio_ttp.words import ReportState
from tft.errors import Interrupted, JobEnded

log = logs.get_logger()

P = ParamSpec("P")
R = TypeVar("R")

patterns = Patterns(can_repair=utils.tft_can_do_uce_repair)
"""What the texts of errors stand for, in this process."""


def tft_register_exception_handler(
    fault_pattern: str, fault_type: str, fault_handle: Handle
) -> None:
    """
    Errors whose text has `fault_pattern` in it are a `fault_type`, the name of a `ReportState`.
    `fault_handle` gets the text and says the name of what it is.
    """
    call = "tft_register_exception_handler"
    pattern = checks.text(call, "fault_pattern", fault_pattern)  # every text has an empty one in it
    if checks.text(call, "fault_type", fault_type) not in ReportState.__members__:
        names = ", ".join(ReportState.__members__)
        raise Refused(f"{call}: fault_type is one of {names}, not {fault_type!r}")
    handle = checks.function(call, fault_handle)
    patterns.add(pattern, ReportState[fault_type], handle)


def tft_exception_handler(func: Callable[P, R]) -> Callable[P, R]:
    """
    Call a training function again after every incident. Its positional arguments are one list for the whole job,
    which every function of the program is handed and may change: what stands in the list is what the training
    function is called with next. Source: `wrapper` of `ttp_decorator.py`, lines 926 to 939 at mind-cluster
    22bb3d98. Raises `TypeError` for what cannot be called; the function raises `JobEnded` when the job ends
    before it has returned.
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
                continue  # others have not come to the end: back with them
            # here no traceback holds the frames of the loop any more
            processor.report(found.state, found.code, found.said)
            processor.wait()
            device.release_memory()

    return guarded


def _loses_memory(error: RuntimeError) -> bool:
    """
    Whether an error of one of the program's functions says that its device has lost memory.
    """
    found = patterns.classify(error, repairs=processor.told.uce)
    return found.state in (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED)


def _found(error: RuntimeError) -> Found:
    """
    What has happened. What cannot be known, or came before there was a loop, is raised.
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
    Nobody can go on from this error. Before training has begun the process ends by it, which is seen.
    """
    if processor.begun:
        log.error("loop_left", state=ReportState.RS_UNKNOWN.name, exc_info=error)
        processor.report(ReportState.RS_UNKNOWN, "", f"{type(error).__name__}: {error}")
        _leave_if_over()


def _leave_if_over() -> None:
    if processor.exit_code is not None:
        raise JobEnded(processor.exit_code)
