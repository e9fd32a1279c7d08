"""
Patches of torch that let a CPU replace the device: tensors "on npu" or "on cuda" are on the CPU.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from torch_npu import npu

FACTORIES = ("tensor", "zeros", "empty", "ones", "full", "arange", "rand", "randn")


def _is_device(place: Any) -> bool:
    """
    Return whether a `device=` names an accelerator, by its type or by its bare number.
    """
    number = isinstance(place, int) and not isinstance(place, bool)
    return number or (
        isinstance(place, str | torch.device) and str(place).startswith(("npu", "cuda"))
    )


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*arguments: Any, **named: Any) -> Any:
        place = named.get("device")
        return make(*arguments, **(named | {"device": "cpu"} if _is_device(place) else named))

    return made


def _moved(move: Callable[..., Any]) -> Callable[..., Any]:
    def moved(self: torch.Tensor, *to: Any, **named: Any) -> Any:
        to = tuple("cpu" if _is_device(each) else each for each in to)
        if _is_device(named.get("device")):
            named["device"] = "cpu"
        return move(self, *to, **named)

    return moved


def install() -> None:
    """
    Patch torch for this process.
    """
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    for name in (*FACTORIES, "empty_like", "zeros_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor.to = _moved(tensor.to)
    tensor.npu = tensor.cuda = lambda self, *_, **__: self
    plain = tensor.type  # Megatron compares the result with "torch.cuda.FloatTensor"
    tensor.type = lambda self, *to: (
        plain(self, *to) if to else plain(self).replace("torch.", "torch.cuda.", 1)
    )
    for name in ("Stream", "Event", "current_stream", "default_stream"):
        setattr(cuda, name, getattr(npu, name))
    cuda.stream = lambda _: contextlib.nullcontext()
    for name in (
        "current_device", "device_count", "set_device", "synchronize", "empty_cache",
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    ):  # fmt: skip
        setattr(cuda, name, getattr(npu, name))
    for place in (cuda, cuda.random):
        place.get_rng_state, place.set_rng_state = npu.get_rng_state, npu.set_rng_state
    cuda.default_generators = (torch.default_generator,) * npu.device_count()
    cuda._lazy_call = lambda call, **_: call()  # Megatron's tracker of random states uses it
    cuda.manual_seed = torch.default_generator.manual_seed
