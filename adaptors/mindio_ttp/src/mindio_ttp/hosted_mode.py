"""
Functions for another adaptor of tft, such as that for MindSpore, whose programs call MindIO.

That adaptor captures the state and sends it to other ranks, and the program calls `framework_ttp`
as usual. Of the functions that the program registers, only those are called that save or rename a
checkpoint, end the process or decrypt a password. The adaptor decides when a checkpoint is saved
and renamed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tft
from mindio_ttp.checks import Refused
from mindio_ttp.processor import processor
from tft.errors import JobEnded, OrderRefused


def for_mindspore() -> None:
    """
    Treat the program as a program for MindSpore, as if MINDIO_FOR_MINDSPORE were set.

    Call this function before the program registers functions.
    """
    processor.for_mindspore()


def start(master_ip: str, port: int, adaptor: str) -> tft.Session:
    """
    Join the job as `tft_start_processor` does, with the named adaptor of tft. Return the session.

    The caller must then pass the objects of the training state to `session.adopt`. Raises an
    `Exception` if the job uses another adaptor.
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
    Set the function `position`, which returns the step of the program to which the state belongs.

    `position` is called whenever this rank enters its training loop.
    """
    processor.position = position


def enter() -> None:
    """
    Report that this rank enters its training loop. Return when all ranks have entered their loops.
    Raises `JobEnded` if the job ends instead.
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
    Report that the program has trained all its steps. Return True when all ranks have trained all
    their steps.

    Return False if this rank must train further, because the other ranks were set back to an
    earlier step. The program must then report that it has left its loop, and wait for the next
    action. Raises `JobEnded` if the job ends instead.
    """
    processor.finish()
    if processor.exit_code is not None:
        raise JobEnded(processor.exit_code)
    return not processor.returned


def exit_code() -> int:
    """
    Return the exit code of the job for this rank. Return 0 while the job has not ended.
    """
    return processor.exit_code or 0


def program_step(step: int) -> int:
    """
    Return the program's number for a step of the job. Raises `OrderRefused` if it is not known yet.
    """
    return processor.program.program_step(step)


def save(step: int, ranks: Sequence[int]) -> None:
    """
    Call the program's function that saves a checkpoint. `step` is the step by the program's count.
    `ranks` are the ranks that save.

    Raises `OrderRefused` if the program has registered no such function.
    """
    if not processor.handlers.has("save_ckpt"):
        raise OrderRefused(
            "the program has registered no save function: call tft_register_save_ckpt_handler"
        )
    info: list[dict[str, Any]] = [{"type": 0, "ranks": list(ranks)}]
    processor.handlers.call("save_ckpt", step, info, processor.program.args)


def rename(step: int) -> None:
    """
    Call the program's function that gives the checkpoint its final name, if it has registered one.
    Call this function when all ranks have saved.
    """
    if processor.handlers.has("rename"):
        processor.handlers.call("rename", step)
