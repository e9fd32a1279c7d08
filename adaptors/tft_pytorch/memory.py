"""
Tensors as bytes: in place where a tensor lies contiguously in host memory, else by a copy.

Through numpy, because it alone gives a tensor's memory the buffer protocol; as bytes, because
numpy does not know bfloat16 and its like.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy
import torch

from tft.errors import OrderRefused
from tft.hooks import Buffer

_NUMPY_HAS = frozenset(
    {
        *(torch.float16, torch.float32, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """
    Writable bytes that stand for a tensor.
    """

    buffer: Buffer
    tensor: torch.Tensor
    staging: torch.Tensor | None
    """Where the bytes really are, when they are not the tensor's own."""

    def keep(self) -> None:
        """
        The bytes have come: make them the tensor's.
        """
        if self.staging is not None:
            with torch.no_grad():
                self.tensor.copy_(self.staging)


class Awaited:
    """
    Room that was made for what a description speaks of, until the content has come.
    """

    def __init__(self) -> None:
        self._made: tuple[bytes, list[Room]] | None = None

    def make(self, meta: bytes, tensors: Mapping[str, torch.Tensor]) -> list[Buffer]:
        """
        Room for these tensors, in their order. What was made before counts no more.
        """
        rooms = [writable(name, tensor) for name, tensor in tensors.items()]
        self._made = meta, rooms
        return [room.buffer for room in rooms]

    def filled(self, shard: str, meta: bytes) -> dict[str, torch.Tensor]:
        """
        The content has come: the tensors, by name. Raises `OrderRefused` where no room was made for this
        description.
        """
        if self._made is None or self._made[0] != meta:
            raise OrderRefused(f"no room was made for this description of the shard {shard!r}")
        rooms, self._made = self._made[1], None
        for room in rooms:
            room.keep()
        return {room.buffer.name: room.tensor for room in rooms}


def in_place(tensor: torch.Tensor) -> bool:
    """
    Whether the tensor's elements, in order, are one stretch of host memory.
    """
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """
    The memory of a tensor that is `in_place`. The view keeps it alive.
    """
    flat = tensor.detach()
    if flat.dtype in _NUMPY_HAS:  # views of arrays cost half of what views of tensors cost
        array = flat.numpy()
        return array.reshape(-1).view(numpy.uint8).data
    return flat.reshape(-1).view(torch.uint8).numpy().data


def readable(name: str, tensor: torch.Tensor) -> Buffer:
    """
    The tensor's content in row-major order.
    """
    return Buffer(name=name, view=flat_bytes(tensor if in_place(tensor) else _staging(tensor)))


def writable(name: str, tensor: torch.Tensor) -> Room:
    """
    Room for the tensor's content in row-major order.
    """
    staging = None if in_place(tensor) else _staging(tensor)
    view = flat_bytes(tensor if staging is None else staging)
    return Room(buffer=Buffer(name=name, view=view), tensor=tensor, staging=staging)


def _staging(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()
