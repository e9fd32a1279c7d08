"""
Plain values of torch: tensors and torch's random generators, beside what `tft.spi.plain_values`
copies and makes again.

Tensors stay tensors in the plain form, those of a device as copies in host memory.
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
"""The bytes of an array beyond which it is not copied, since no state has room for it."""
_FRAMEWORKS = frozenset(
    {
        "torch", "lightning", "torchmetrics", "transformers", "accelerate", "datasets", "peft", "trl",
        "tft", "tft_pytorch",
    }
)  # fmt: skip
"""Packages whose dataclasses are left alone: they may be the bookkeeping of a framework."""


def is_fixed(value: Any) -> bool:  # Any: a value that is plain
    """
    Return True if a plain value cannot be changed in place.
    """
    if type(value) in (tuple, frozenset, torch.Size):
        return all(map(is_fixed, value))
    return type(value) in SCALARS or isinstance(value, Enum | PurePath | numpy.generic | complex)


def on_device(host: Tensor) -> dict[str, object]:
    """
    Return the plain form of a tensor on the device of its rank. `host` is a copy of it.
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
# Tensors on the CPU are not copied, but detached. Those that were on a device are placed on the
# device that `placed` is given, which is another one if they come from another rank.
plain, placed, marked = _VALUES.plain, _VALUES.placed, _VALUES.marked
may_be_plain, into, put_back = _VALUES.may_be_plain, _VALUES.into, _VALUES.put_back
