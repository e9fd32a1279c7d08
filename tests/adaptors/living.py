"""
What a process keeps alive.
"""

import ctypes
import gc

import torch
from torch import Tensor


def live_bytes() -> int:
    """
    The bytes of all tensors there are, memory that several share counted once.
    """
    gc.collect()
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and each.layout is torch.strided:
            # a gradient has no object in Python before somebody asks for it
            for tensor in (each, each.grad) if each.is_leaf else (each,):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _Allocated(ctypes.Structure):
    """
    glibc's `struct mallinfo2`.
    """

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


def allocated_bytes() -> int:
    """
    What is in use of the memory that glibc has given away: tensors that no Python object leads to,
    too, and all else.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Allocated
    told = libc.mallinfo2()
    return int(told.uordblks + told.hblkhd)
