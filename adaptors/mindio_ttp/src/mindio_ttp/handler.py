"""
The decorator of a training function: it is entered again after every incident.
"""

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mindio_ttp import checks, utils
from mindio_ttp.checks import Refused
from mindio_ttp.classification import Found, Handle, Patterns
from mindio_ttp.processor import processor
from mindio_ttp.words import ReportState
from tft.errors import Interrupted, JobEnded

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
    if not fault_pattern:
        raise Refused(f"{call}: fault_pattern is empty, and every text has that in it")
    if fault_type not in ReportState.__members__:
        names = ", ".join(ReportState.__members__)
        raise Refused(f"{call}: fault_type is one of {names}, not {fault_type!r}")
    handle = checks.function(call, fault_handle)
    patterns.add(fault_pattern, ReportState[fault_type], handle)


def tft_exception_handler(func: Callable[P, R]) -> Callable[P, R]:
    """
    A training function that is called once more, with the same arguments, after every incident. Raises
    `TypeError` for what cannot be called; the function raises `JobEnded` when the job ends before it has
    returned.
    """
    checks.function("tft_exception_handler", func)

    @functools.wraps(func)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        processor.keep_args(list(args))
        while True:
            processor.enter()
            _leave_if_over()
            try:
                result = func(*args, **kwargs)
                processor.finish()
            except RuntimeError as error:
                found = patterns.classify(error, repairs=processor.told.uce)
            except Interrupted:
                found = Found(name="FORCE STOP", state=ReportState.RS_NORMAL, code="")
            except Exception:
                processor.report(ReportState.RS_UNKNOWN, "")
                _leave_if_over()
                raise
            else:
                _leave_if_over()
                if processor.completed:
                    return result
                continue  # others have not come to the end: back with them
            # here no traceback holds the frames of the loop any more
            processor.report(found.state, found.code)
            processor.wait()
            _collect()

    return guarded


def _leave_if_over() -> None:
    if processor.exit_code is not None:
        raise JobEnded(processor.exit_code)


def _collect() -> None:
    gc.collect()  # what the frames have held is needed for the state that comes
