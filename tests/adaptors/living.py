"""
Measures of the memory that this process keeps in use.
"""

import ctypes
import gc

import torch
from torch import Tensor


def live_bytes() -> int:
    """
    Return the bytes of all live tensors. Memory that several tensors share is counted once.
    """
    gc.collect()
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and each.layout is torch.strided:
            # Python has no object for a gradient until the gradient is read
            for tensor in (each, each.grad) if each.is_leaf else (each,):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _Allocated(ctypes.Structure):
    """
    The C structure `struct mallinfo2` of glibc, which describes the memory that `malloc` manages.
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
    Return the bytes that glibc's allocator has handed out and that are not yet freed.

    These bytes include tensors that no Python object refers to, and all other memory of the
    process.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Allocated
    told = libc.mallinfo2()
    return int(told.uordblks + told.hblkhd)
