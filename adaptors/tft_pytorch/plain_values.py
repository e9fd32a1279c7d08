"""
Copies values of the user's objects in a form that can be packed, and makes the values again. In
addition to the types that `tft.spi.plain_values` handles, this module handles tensors and torch's
random generators.

In that form (the plain form) a tensor stays a tensor. A tensor on a device is copied to host
memory.
"""

from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy
import torch
from torch import Tensor

from tft.spi.plain_values import (
    SCALARS,
    NotPlain,
    PlainValues,
    of_kind,
)
from tft_pytorch.owned_generators import made, put_back_into, read

_LARGE = 512 * 1024
"""The most bytes of a numpy array that is copied. A larger array is not copied, because the
rank-local state has no room for it."""
_FRAMEWORKS = frozenset(
    {
        "torch", "lightning", "torchmetrics", "transformers", "accelerate", "datasets", "peft", "trl",
        "tft", "tft_pytorch",
    }
)  # fmt: skip
"""Packages whose dataclasses do not count as plain values, because they may be the bookkeeping of a
framework, which tft must not restore."""


def is_fixed(value: Any) -> bool:  # Any: a value that is plain
    """
    Return True if a plain value cannot be changed in place.
    """
    kind = type(value)
    if kind in SCALARS or kind is Tensor:  # the most frequent ones
        return kind is not Tensor
    if kind in (tuple, frozenset, torch.Size):
        return all(map(is_fixed, value))
    return isinstance(value, Enum | PurePath | numpy.generic | complex)


def on_device(host: Tensor) -> dict[str, object]:
    """
    Return the plain form of a tensor that is on a device. `host` is a copy of it in host memory.
    """
    return of_kind("device", host)


def _tensor(value: Tensor, depth: int) -> Any:
    if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        raise NotPlain
    host = value.detach().cpu()
    return host if value.device.type == "cpu" else on_device(host)


def _size(value: torch.Size, depth: int) -> Any:
    return of_kind("size", list(value))


def _generator(value: torch.Generator, depth: int) -> Any:
    return of_kind("torch.Generator", read("attribute", value))


def _put_generator_back(old: torch.Generator, value: torch.Generator) -> torch.Generator:
    put_back_into(old, read("attribute", value)[1])
    return old


_VALUES = PlainValues(
    forms={Tensor: _tensor, torch.Size: _size, torch.Generator: _generator},
    makers={
        "device": lambda parts, place: parts.to(place),
        "size": lambda parts, place: torch.Size(parts),
        "torch.Generator": lambda parts, place: made(*parts),
    },
    fillers=(
        (Tensor, lambda old, value: value.to(old.device)),
        (torch.Generator, _put_generator_back),
    ),
    frameworks=_FRAMEWORKS,
    large=_LARGE,
)
# `plain` detaches tensors on the CPU, but does not copy them. Tensors that were on a device are put
# on the device that is passed to `placed`, because a state may come from another rank, which has
# another device.
plain, placed, marked = _VALUES.plain, _VALUES.placed, _VALUES.marked
may_be_plain, put_back = _VALUES.may_be_plain, _VALUES.put_back
into, into_owned = _VALUES.into, _VALUES.into_owned
