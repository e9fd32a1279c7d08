"""
Makes and reads the description of a shard's tensors. The description is sent before the tensors, so
that the receiver can reserve memory for each tensor.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tft.errors import MalformedMessage
from tft.spi import unpack
from tft_pytorch.trees import expect


def byte_tensor(content: bytes) -> torch.Tensor:
    """
    Return a tensor with a copy of `content` as its bytes. torch takes the states of its random
    generators as such tensors.
    """
    if not content:  # `torch.frombuffer` takes no empty content
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """
    Return the name that the type `dtype` has in the module `torch`, such as `float32`.
    """
    return str(dtype).removeprefix("torch.")


def listed(tensors: Mapping[str, Tensor]) -> list[list[object]]:
    """
    Return a list with the name, type, shape and kind of device of each tensor, as plain values.
    """
    return [
        [name, dtype_name(tensor.dtype), list(tensor.shape), tensor.device.type]
        for name, tensor in tensors.items()
    ]


def read(meta: bytes, form: int) -> dict[str, Any]:  # Any: unpacked, checked by the caller
    """
    Unpack the description `meta` of a shard, and return the unpacked description. Raises
    `MalformedMessage` if the version of the description is not `form`.
    """
    told = expect(unpack(meta), dict, "the description of a shard")
    if told.get("form") != form:
        raise MalformedMessage(
            f"the description of a shard has the format number {told.get('form')!r}, but this "
            f"version of tft reads format {form}: use the version of tft that wrote the description"
        )
    return told


def described(told: Mapping[str, Any]) -> list[tuple[str, torch.dtype, list[int], str]]:
    """
    Return a list with the name, type, shape and kind of device of each tensor in `told`, the
    unpacked description of a shard.

    Raises `MalformedMessage` for a type that this version of torch does not have.
    """
    found = []
    for name, type_name, shape, device in told["tensors"]:
        dtype = getattr(torch, type_name, None)
        if not isinstance(dtype, torch.dtype):
            raise MalformedMessage(
                f"the tensor {name} of a received or saved shard has the type {type_name!r}, which "
                "the torch on this rank does not have: use the same version of torch"
            )
        found.append((str(name), dtype, shape, str(device)))
    return found
