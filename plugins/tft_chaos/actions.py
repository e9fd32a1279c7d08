"""
What a strike does to the process it happens in.
"""

import ctypes
import os
import signal
from collections.abc import Mapping
from typing import Any, NoReturn, assert_never

from tft_chaos.spec import FaultName, Hang, Kill, Raise, Stop

Theirs = Any  # an object of the framework's: used by its methods, no framework is imported


class MemoryFault(RuntimeError):
    """
    Stands for a memory fault of the device. Adaptors read the kind off the class.
    """

    tft_fault_kind = "memory"


class NetworkFault(RuntimeError):
    """
    Stands for a broken connection.
    """

    tft_fault_kind = "network"


class NumericFault(RuntimeError):
    """
    Stands for numbers gone bad.
    """

    tft_fault_kind = "numeric"


class ChaosMissed(RuntimeError):
    """
    The victim could not be brought to where its spec wants it: the spec does not fit the job.
    """


_FAULTS: Mapping[FaultName, type[Exception]] = {
    "memory": MemoryFault,
    "network": NetworkFault,
    "numeric": NumericFault,
    "bug": ValueError,
}


def act(action: Kill | Stop | Hang | Raise) -> None:
    """
    Do it to the calling thread or its process. Returns only after `stop`, when somebody has
    continued the process.
    """
    match action:
        case Kill():
            os.kill(os.getpid(), signal.SIGKILL)
        case Stop():
            os.kill(os.getpid(), signal.SIGSTOP)
        case Hang(gil=gil):
            _hang(gil=gil)
        case Raise(kind=kind):
            raise _FAULTS[kind](f"chaos: kind={kind}")
        case _:
            assert_never(action)


def _hang(*, gil: bool) -> NoReturn:
    """
    Wait in C for a mutex that this thread itself holds, as a thread stuck in a driver waits: no
    signal handler, no exception and no timeout brings it back. `pause` would not do: it returns
    after every signal.
    """
    library = ctypes.PyDLL(None) if gil else ctypes.CDLL(None)  # CDLL lets go of the GIL
    mutex = ctypes.create_string_buffer(64)  # larger than any pthread_mutex_t; zeros: initialised
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
    raise AssertionError("a mutex was taken twice")


def flip(tensor: Theirs, element: int) -> None:
    """
    Flip the highest bit of the mantissa of one element: its value changes by a third or more, and
    stays a number.
    """
    place = tensor.detach().view(-1)[element : element + 1]
    copy = place.cpu().clone()
    # little-endian IEEE floats and bfloat16: sign and exponent fill the highest byte and one bit
    byte = ctypes.c_uint8.from_address(copy.data_ptr() + copy.element_size() - 2)
    byte.value ^= 0x40
    place.copy_(copy)
