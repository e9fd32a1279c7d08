"""
Records the inputs of the model and the loss of each training step, so that digests of the inputs
and the loss can be compared.

torch has hooks for the modules of one model, but a script may compute its loss in other modules and
functions. So this module replaces `nn.Module.__call__` and `torch.autograd.backward` when the
recording begins.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tft_pytorch.part_digests import digest

Seen = Callable[[str, str], None]

_native: dict[str, Any] = {}  # Any: functions of torch, each with another signature
"""The original functions of torch that this module has replaced, by a short name."""


def watch_batches(seen: Seen) -> None:
    """
    From now on call `seen("batch", digest)` whenever the script calls a model with gradients
    enabled, and `seen("loss", digest)` for each backward pass. The digests are those of the model's
    inputs and of the loss.

    Only the present thread is watched. If a module calls another module, only the call of the outer
    module counts.
    """
    if not _native:
        _native["call"] = nn.Module.__call__
        _native["backward"] = torch.autograd.backward
    thread = threading.get_ident()
    inside = False

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or not torch.is_grad_enabled() or threading.get_ident() != thread:
            return _native["call"](self, *args, **kwargs)
        inputs = {str(at): each for at, each in enumerate(_tensors((args, kwargs)))}
        if inputs:
            seen("batch", f"{type(self).__name__}:{digest(None, inputs)}")
        inside = True
        try:
            return _native["call"](self, *args, **kwargs)
        finally:
            inside = False

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            seen("loss", digest(None, {str(at): each.detach() for at, each in enumerate(found)}))
        return _native["backward"](tensors, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    torch.autograd.backward = backward


def _tensors(tree: object) -> list[Tensor]:
    """
    Return the tensors in `tree`, the arguments of a call of a model, that are input data. Tensors
    that need a gradient do not count as input data.
    """
    if isinstance(tree, Tensor):
        return [] if tree.requires_grad else [tree]
    if isinstance(tree, dict):
        return [tensor for each in tree.values() for tensor in _tensors(each)]
    if isinstance(tree, list | tuple):
        return [tensor for each in tree for tensor in _tensors(each)]
    return []
