"""
The actions of chaos on the process in which they are carried out.
"""

import ctypes
import os
import signal
from typing import Any, NoReturn, assert_never

from tft.spi import TrainingFault
from tft_chaos.spec import Hang, Kill, Raise, Stop

Theirs = Any  # an object of the framework, used by its methods: no framework is imported


class ImitatedFault(TrainingFault, RuntimeError):
    """
    Imitates a fault of a device or a connection, for which frameworks raise `RuntimeError`.
    """


class ChaosMissed(RuntimeError):
    """
    Raised when the fault could not be made at the place that the spec names, because the spec does
    not fit the job.
    """


def act(action: Kill | Stop | Hang | Raise) -> None:
    """
    Carry out the action on the calling thread or on its process.

    Returns only for a `Stop`, after another process has continued this one. Raises the exception of
    a `Raise`.
    """
    match action:
        case Kill():
            os.kill(os.getpid(), signal.SIGKILL)
        case Stop():
            os.kill(os.getpid(), signal.SIGSTOP)
        case Hang(gil=gil):
            _hang(gil=gil)
        case Raise(kind=kind):
            text = f"chaos: kind={kind}"
            raise ValueError(text) if kind == "bug" else ImitatedFault(text, kind=kind)
        case _:
            assert_never(action)


def _hang(*, gil: bool) -> NoReturn:
    """
    Block for ever in C, on a mutex that this thread itself holds.

    A thread that hangs in a driver waits in the same way: no signal handler, exception or timeout
    ends the wait. `pause` cannot be used, because it returns after every signal. With `gil` the
    thread keeps Python's global interpreter lock.
    """
    library = ctypes.PyDLL(None) if gil else ctypes.CDLL(None)  # CDLL releases the GIL
    mutex = ctypes.create_string_buffer(64)  # larger than any pthread_mutex_t; zeros: initialised
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
    raise AssertionError("a mutex was taken twice")
