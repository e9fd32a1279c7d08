"""
Carries out the actions of chaos (deliberate faults) in the process that gets the fault: kill or
stop the process, block its training thread, or raise an exception.
"""

import ctypes
import os
import signal
from typing import Any, NoReturn, assert_never

from tft.spi import TrainingFault
from tft_chaos.spec import Hang, Kill, Raise, Stop

# the type of objects of torch and MindSpore: `Any`, because this package imports no framework
Theirs = Any


class ImitatedFault(TrainingFault, RuntimeError):
    """
    The exception that imitates a fault of a device or a connection. It is also a `RuntimeError`,
    because frameworks raise a `RuntimeError` for such faults.
    """


class ChaosMissed(RuntimeError):
    """
    Raised when chaos cannot make the fault at the place that the spec (the argument of `--chaos`)
    names, because the spec does not fit the job.
    """


def act(action: Kill | Stop | Hang | Raise) -> None:
    """
    Carry out an action of chaos on the calling thread or on its process.

    A `Raise` raises its exception. A `Stop` returns when another process has sent SIGCONT. A `Kill`
    or a `Hang` never returns.
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

    This imitates a thread that hangs in a driver: no signal handler, exception or timeout ends the
    wait. The C function `pause` cannot be used, because it returns after every signal. With
    `gil=True` the thread keeps Python's global interpreter lock.
    """
    # PyDLL keeps the GIL while a C function runs, and CDLL releases the GIL
    library = ctypes.PyDLL(None) if gil else ctypes.CDLL(None)
    # 64 bytes have room for any pthread_mutex_t, and zero bytes make an unlocked mutex
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
    raise AssertionError("chaos: hang did not block the thread: a locked mutex was locked again")
