"""
The decorator `tft_exception_handler` for the training function of a program. The decorated function
calls the training function again after every incident.
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
    Make errors whose text contains `fault_pattern` count as errors of the type `fault_type`.

    `fault_type` is the name of a `ReportState` (the reason why a rank has left its training loop).
    `fault_handle` is a function that takes the text of such an error and returns the name of the
    error. If that name is `fault_pattern`, the error has the type `fault_type`. Any other name must
    be known already, and the error then has the type of that name.
    """
    call = "tft_register_exception_handler"
    # refuse an empty pattern, because an empty pattern would match every error
    pattern = checks.text(call, "fault_pattern", fault_pattern)
    if checks.text(call, "fault_type", fault_type) not in ReportState.__members__:
        names = ", ".join(ReportState.__members__)
        raise Refused(f"{call}: fault_type must be one of {names}, not {fault_type!r}")
    handle = checks.function(call, fault_handle)
    patterns.add(pattern, ReportState[fault_type], handle)


def tft_exception_handler(func: Callable[P, R]) -> Callable[P, R]:
    """
    Return a function that calls the training function `func` again after every incident.

    The positional arguments of the training function are kept in one list for the whole job. Every
    registered function of the program receives this list as `args`, and may change it. The next
    call of the training function gets the entries of the list as its arguments. Source: `wrapper`
    in MindIO's `ttp_decorator.py` (lines 926 to 939 at commit 22bb3d98 of the repository
    mind-cluster).

    Raises `TypeError` if `func` cannot be called. The returned function raises `JobEnded` if the
    job ends before all ranks have trained all their steps.
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
                # enter the loop again, because the ranks must train earlier steps once more
                continue
            # Report the error only after the `except` block. Within that block, the traceback would
            # keep the frames of the training loop and the device memory of these frames alive.
            processor.report(found.state, found.code, found.said)
            processor.wait()
            device.release_memory()

    return guarded


def _loses_memory(error: RuntimeError) -> bool:
    """
    Return whether `error`, which a registered function of the program has raised, says that the
    device has lost memory.
    """
    found = patterns.classify(error, repairs=processor.told.uce)
    return found.state in (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED)


def _found(error: RuntimeError) -> Found:
    """
    Classify `error`, which has ended the training function, by its text. Return the result.

    The program can register functions that take part in the classification. If such a function
    fails, raise the exception of that function. If `error` is a fault, and training had not begun
    yet, raise `error` itself.
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
    Report `error`, after which this process cannot continue. Raises `JobEnded` when the job has
    ended for this rank.

    Do nothing if training has not begun yet. The process then ends with the error, and the agent
    notices the end of the process.
    """
    if processor.begun:
        log.error("loop_left", state=ReportState.RS_UNKNOWN.name, exc_info=error)
        processor.report(ReportState.RS_UNKNOWN, "", f"{type(error).__name__}: {error}")
        _leave_if_over()


def _leave_if_over() -> None:
    if processor.exit_code is not None:
        raise JobEnded(processor.exit_code)
