"""
For an adaptor of tft's that knows a program's framework: it keeps and moves the state, and the program calls
`framework_ttp` as ever. Of the functions that the program registers those that save and rename are called,
when the adaptor asks for it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tft
from mindio_ttp.checks import Refused
from mindio_ttp.processor import processor
from tft.errors import JobEnded, OrderRefused


def for_mindspore() -> None:
    """
    The program is one for MindSpore, as MINDIO_FOR_MINDSPORE has it. Before anything is registered.
    """
    processor.for_mindspore()


def start(master_ip: str, port: int, adaptor: str) -> tft.Session:
    """
    As `tft_start_processor`, with an adaptor of tft's by its name. The session that was joined is to be
    given what makes up the state. Raises an `Exception` where the job uses another adaptor.
    """
    processor.start(master_ip, port, "", adaptor)
    session = processor.session
    if session.adaptor != adaptor:
        raise Refused(
            f"the job was started with --adaptor {session.adaptor}, and this program keeps its state "
            f"with --adaptor {adaptor}: start it with that"
        )
    return session


def count_by(position: Callable[[], int]) -> None:
    """
    `position` says of which step the state is, as the program counts; it is asked when the loop is
    entered.
    """
    processor.position = position


def enter() -> None:
    """
    Into the loop, when all ranks are there. Raises `JobEnded` where the job ends instead.
    """
    processor.enter()
    if processor.exit_code is not None:
        raise JobEnded(processor.exit_code)


def in_window() -> bool:
    """
    Whether the state is being changed: `tft_start_updating_os` was called, and no `tft_end_updating_os`
    after it.
    """
    return processor.window


def finish() -> bool:
    """
    The program has trained all it was to; returns when all have. False: it is to train on, since the others
    were brought back to an earlier step. It reports that it has left its loop, and waits for what is next.
    Raises `JobEnded` where the job ends instead.
    """
    processor.finish()
    if processor.exit_code is not None:
        raise JobEnded(processor.exit_code)
    return not processor.returned


def exit_code() -> int:
    """
    How the job has ended for this rank, when it has.
    """
    return processor.exit_code or 0


def program_step(step: int) -> int:
    """
    What the program calls a step of tft's.
    """
    return processor.program.program_step(step)


def save(step: int, ranks: Sequence[int]) -> None:
    """
    Have the program save what it has, of a step as the program counts; `ranks` are those that save.
    Raises `OrderRefused` where it cannot.
    """
    if not processor.handlers.has("save_ckpt"):
        raise OrderRefused(
            "the program has registered no function that saves: tft_register_save_ckpt_handler"
        )
    info: list[dict[str, Any]] = [{"type": 0, "ranks": list(ranks)}]
    processor.handlers.call("save_ckpt", step, info, processor.program.args)


def rename(step: int) -> None:
    """
    All have saved: have the program give it its name.
    """
    if processor.handlers.has("rename"):
        processor.handlers.call("rename", step)
