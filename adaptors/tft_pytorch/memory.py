"""
Gives access to the content of tensors as bytes. The bytes are the tensor's own memory if the tensor
is contiguous in host memory, else a copy.

This module views tensors as numpy arrays, because only numpy offers the buffer protocol for their
memory. The arrays have bytes as elements, because numpy does not know bfloat16 and similar types.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy
import torch

from tft.errors import OrderRefused
from tft.spi import Buffer, DeviceBuffer
from tft_pytorch import device

_NUMPY_HAS = frozenset(
    {
        *(torch.float16, torch.float32, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """
    Writable memory for the content of a tensor that is about to arrive.
    """

    buffer: Buffer
    tensor: torch.Tensor
    staging: torch.Tensor | None
    """The separate tensor into whose memory the content arrives, if it cannot arrive in the memory
    of `tensor` itself. None if it can."""

    def keep(self) -> None:
        """
        Copy the arrived bytes into the tensor, if the bytes were not written into the tensor's own
        memory. Called when all bytes have arrived.
        """
        if self.staging is not None:
            with torch.no_grad():
                self.tensor.copy_(self.staging)


class Awaited:
    """
    The memory that is reserved for the tensors of one shard, until their content has arrived.
    """

    def __init__(self) -> None:
        self._made: tuple[bytes, list[Room]] | None = None

    def make(self, meta: bytes, tensors: Mapping[str, torch.Tensor]) -> list[Buffer]:
        """
        Reserve memory for the content of `tensors`, in their order, and return this memory as
        buffers. Memory that an earlier call has reserved is dropped.
        """
        rooms = [writable(name, tensor) for name, tensor in tensors.items()]
        self._made = meta, rooms
        return [room.buffer for room in rooms]

    def filled(self, shard: str, meta: bytes) -> dict[str, torch.Tensor]:
        """
        Return the tensors by name, with the content that has arrived.

        Raises `OrderRefused` if no memory was reserved for a shard with the packed description
        `meta`.
        """
        if self._made is None or self._made[0] != meta:
            raise OrderRefused(
                f"the shard {shard!r} has arrived from another rank, but its description is not "
                "the one for which this rank has reserved memory"
            )
        rooms, self._made = self._made[1], None
        for room in rooms:
            room.keep()
        return {room.buffer.name: room.tensor for room in rooms}


def in_place(tensor: torch.Tensor) -> bool:
    """
    Return whether the tensor's elements, in order, are one contiguous piece of host memory.
    """
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """
    Return a view of a tensor's memory as bytes. `in_place` must be True for the tensor. The view
    keeps the memory alive.
    """
    flat = tensor.detach()
    if flat.dtype in _NUMPY_HAS:  # a view made by numpy takes half the time of a view made by torch
        array = flat.numpy()
        return array.reshape(-1).view(numpy.uint8).data
    return flat.reshape(-1).view(torch.uint8).numpy().data


def readable(name: str, tensor: torch.Tensor) -> Buffer:
    """
    Return a buffer with the tensor's content in row-major order.
    """
    return Buffer(name=name, view=flat_bytes(tensor if in_place(tensor) else _staging(tensor)))


def offered(name: str, tensor: torch.Tensor) -> Buffer | DeviceBuffer:
    """
    Return a buffer with the tensor's content in row-major order, to be sent to another rank. The
    content of a tensor on a device is copied to the host only when it is sent.
    """
    if in_place(tensor) or not tensor.is_contiguous():
        return readable(name, tensor)
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return DeviceBuffer(
        name=name,
        size=flat.numel(),
        copy=device.copier(flat),
        host_memory=partial(device.host_memory, tensor.device),
    )


def writable(name: str, tensor: torch.Tensor) -> Room:
    """
    Return memory for the content of `tensor` in row-major order: the tensor's own memory if it is
    contiguous in host memory, else new memory.
    """
    staging = None
    # the new memory need not have the old content, which will be overwritten
    if not in_place(tensor):
        staging = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    view = flat_bytes(tensor if staging is None else staging)
    return Room(buffer=Buffer(name=name, view=view), tensor=tensor, staging=staging)


def _staging(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()
