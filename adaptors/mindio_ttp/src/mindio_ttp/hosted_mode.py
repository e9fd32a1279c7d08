"""
Functions for an adaptor of tft other than `mindio`, if the training programs of that adaptor also
call the library MindIO. The adaptor for MindSpore is an example.

The other adaptor captures the training state and sends the state to other ranks. The program calls
the functions of `mindio_ttp.framework_ttp` as usual. Of the functions that the program registers,
tft calls only those that save or rename a checkpoint, end the process or decrypt a password. The
other adaptor decides when a checkpoint is saved and renamed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tft
from mindio_ttp.checks import Refused
from mindio_ttp.processor import processor
from tft.errors import JobEnded, OrderRefused


def for_mindspore() -> None:
    """
    Treat the training program as a program for MindSpore, as if the environment variable
    MINDIO_FOR_MINDSPORE were set.

    Call this function before the program registers functions.
    """
    processor.for_mindspore()


def start(master_ip: str, port: int, adaptor: str) -> tft.Session:
    """
    Join the job as the function `tft_start_processor` does, but with the adaptor of tft that has
    the name `adaptor`. Return the session. The controller has the address `master_ip` and `port`.

    The caller must then pass the objects of the training state to `session.adopt`. Raises an
    `Exception` if the process cannot join the job, or if the job uses another adaptor.
    """
    processor.start(master_ip, port, "", adaptor)
    session = processor.session
    if session.adaptor != adaptor:
        raise Refused(
            f"the job was started with --adaptor {session.adaptor}, but the training script needs "
            f"--adaptor {adaptor}: give this option to `tft run`"
        )
    return session


def count_by(position: Callable[[], int]) -> None:
    """
    Set the function `position`, which returns the step to whose end the training state belongs. The
    step is numbered by the program's own count.

    `position` is called whenever this rank enters its training loop.
    """
    processor.position = position


def enter() -> None:
    """
    Report that this rank enters its training loop. Return when all ranks have entered their
    training loops. Raises `JobEnded` if the job ends before that.
    """
    processor.enter()
    if processor.exit_code is not None:
        raise JobEnded(processor.exit_code)


def in_window() -> bool:
    """
    Return whether the update window is open.

    The window is open after the program has called `tft_start_updating_os`, until it calls
    `tft_end_updating_os`.
    """
    return processor.window


def finish() -> bool:
    """
    Report that the program has trained all its steps. Return True when all ranks have trained all
    their steps.

    Return False if this rank must train further, because all ranks were set back to an earlier
    step. The program must then report that it has left its training loop, and call
    `tft_wait_next_action`. Raises `JobEnded` if the job ends before all ranks have trained all
    their steps.
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
    Return the number that the program itself gives to `step`, a step by tft's count. Raises
    `OrderRefused` if that number is not known yet.
    """
    return processor.program.program_step(step)


def save(step: int, ranks: Sequence[int]) -> None:
    """
    Call the function that the program has registered to save a checkpoint. `step` is the step of
    the checkpoint, by the program's own count. `ranks` are the ranks that save.

    Raises `OrderRefused` if the program has registered no such function.
    """
    if not processor.handlers.has("save_ckpt"):
        raise OrderRefused(
            "the state cannot be saved, because the training script has registered no function "
            "that saves it: call tft_register_save_ckpt_handler"
        )
    info: list[dict[str, Any]] = [{"type": 0, "ranks": list(ranks)}]
    processor.handlers.call("save_ckpt", step, info, processor.program.args)


def rename(step: int) -> None:
    """
    Call the function of the program that gives the checkpoint of `step` its final name, if the
    program has registered such a function. Call `rename` when all ranks have saved their parts.
    """
    if processor.handlers.has("rename"):
        processor.handlers.call("rename", step)
