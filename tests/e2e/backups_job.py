"""
The GPT example, with processes that die or are slow while they copy their state to host memory.

    backups_job.py [--dies RANK,STEP] [--lags RANK,STEP] ARGUMENTS OF train.py

A rank that dies kills itself in the middle of its copy of STEP. A rank that lags does not finish its
copy of STEP before its training thread waits for it.
"""

import argparse
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import tft_pytorch.backups
from tft_pytorch.backups import Backups
from tft_pytorch.device import Devices, copy_to_host
from torch import Tensor

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt"

parser = argparse.ArgumentParser()
parser.add_argument("--dies", default="-1,-1")
parser.add_argument("--lags", default="-1,-1")
args, rest = parser.parse_known_args()
dies, lags = ([int(word) for word in told.split(",")] for told in (args.dies, args.lags))


keep = Backups.keep
copying = -1
"""The step whose copy is being made."""


def strikes(told: list[int]) -> bool:
    """
    Return whether the first process of this rank is struck in the present copy.
    """
    first = os.environ["TFT_INCARNATION"] == "0"
    return first and told == [int(os.environ["RANK"]), copying]


def begin(self: Backups, step: int, *told: Any, **more: Any) -> Callable[[], None] | None:
    """
    Begin a copy. A process that is to die in it does not go on with the step. Any: as in `keep`.
    """
    global copying
    copying = step
    wait = keep(self, step, *told, **more)
    if strikes(dies):
        threading.Event().wait()
    return wait


def copy(copies: Iterable[tuple[Tensor, Tensor]], devices: Devices) -> None:
    """
    Copy as the adaptor does, and strike this process when its turn has come.
    """
    if threading.current_thread() is threading.main_thread():
        return copy_to_host(copies, devices)  # what is copied at once
    pairs = list(copies)
    copy_to_host(pairs[: len(pairs) // 2], devices)
    if strikes(dies):
        os.kill(os.getpid(), signal.SIGKILL)
    if strikes(lags):
        await_waiting()
    return copy_to_host(pairs[len(pairs) // 2 :], devices)


def await_waiting() -> None:
    """
    Wait until the training thread waits for the copy.
    """
    never = threading.Event()
    while True:
        frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
        while frame is not None:
            if frame.f_code is Backups.wait.__code__:
                return
            frame = frame.f_back
        never.wait(0.005)


Backups.keep = begin  # type: ignore[method-assign]  # with the strike in it
tft_pytorch.backups.copy_to_host = copy  # type: ignore[attr-defined]  # its import from `device`
sys.path.insert(0, str(EXAMPLE))
sys.argv = [str(EXAMPLE / "train.py"), *rest]
runpy.run_path(sys.argv[0], run_name="__main__")
