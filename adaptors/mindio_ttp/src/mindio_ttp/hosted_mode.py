"""
The functions for an adaptor of tft that knows the program's framework.

Such an adaptor keeps and moves the state, and the program calls `framework_ttp` as usual. Of the
functions that the program registers, only those that save and rename are called, when the adaptor
asks for it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tft
from mindio_ttp.checks import Refused
from mindio_ttp.processor import processor
from tft.errors import JobEnded, OrderRefused


def for_mindspore() -> None:
    """
    Treat the program as one for MindSpore, as MINDIO_FOR_MINDSPORE does.

    Call it before anything is registered.
    """
    processor.for_mindspore()


def start(master_ip: str, port: int, adaptor: str) -> tft.Session:
    """
    Join the job as `tft_start_processor` does, with the named adaptor of tft. Return the session.

    The caller then gives the session the parts of the training state. Raises an `Exception` where
    the job uses another adaptor.
    """
    processor.start(master_ip, port, "", adaptor)
    session = processor.session
    if session.adaptor != adaptor:
        raise Refused(
            f"the job was started with --adaptor {session.adaptor}, but this program needs "
            f"--adaptor {adaptor}: start it with that adaptor"
        )
    return session


def count_by(position: Callable[[], int]) -> None:
    """
    Set the function that returns the step of the state, as the program counts.

    It is called when the loop is entered.
    """
    processor.position = position


def enter() -> None:
    """
    Enter the loop. Returns when all ranks have. Raises `JobEnded` where the job ends instead.
    """
    processor.enter()
    if processor.exit_code is not None:
        raise JobEnded(processor.exit_code)


def in_window() -> bool:
    """
    Return whether the update window is open.

    It is open after `tft_start_updating_os`, until `tft_end_updating_os`.
    """
    return processor.window


def finish() -> bool:
    """
    Report that the program has trained all its steps. Returns True when all ranks have.

    False: the program must train on, since the others were brought back to an earlier step. The
    program then reports that it has left its loop, and waits for the next action. Raises `JobEnded`
    where the job ends instead.
    """
    processor.finish()
    if processor.exit_code is not None:
        raise JobEnded(processor.exit_code)
    return not processor.returned


def exit_code() -> int:
    """
    Return the exit code of the job for this rank; 0 also while the job has not ended.
    """
    return processor.exit_code or 0


def program_step(step: int) -> int:
    """
    Return the program's number for a step of tft.
    """
    return processor.program.program_step(step)


def save(step: int, ranks: Sequence[int]) -> None:
    """
    Have the program save its state of `step`, as the program counts. `ranks` are the ranks that
    save.

    Raises `OrderRefused` where the program has no function that saves.
    """
    if not processor.handlers.has("save_ckpt"):
        raise OrderRefused(
            "the program has registered no save function: call tft_register_save_ckpt_handler"
        )
    info: list[dict[str, Any]] = [{"type": 0, "ranks": list(ranks)}]
    processor.handlers.call("save_ckpt", step, info, processor.program.args)


def rename(step: int) -> None:
    """
    Have the program give the checkpoint its final name, when all ranks have saved.
    """
    if processor.handlers.has("rename"):
        processor.handlers.call("rename", step)
