"""Replacements that let megatron-core 0.16 run without CUDA. No shipped file uses them."""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch


class _Stream:
    """A stand-in for a CUDA stream or event. Work on a CPU is complete when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, _: str) -> Callable[..., "_Stream"]:
        return lambda *_: _Stream()


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*arguments: Any, **named: Any) -> Any:
        on_cuda = str(named.get("device", "")).startswith("cuda")
        return make(*arguments, **(named | {"device": "cpu"} if on_cuda else named))

    return made


def install() -> None:
    """Replace the parts of CUDA that Megatron uses. Call it once, before anything is built."""
    # The comment on each line names the file of Megatron that needs it.
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    from torch import _dynamo

    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    _dynamo.config.disable = True  # core/jit.py: fused functions would be compiled by g++
    cuda.current_device = lambda: torch.device("cpu")  # distributed/: the device of buffers
    for name in ("tensor", "zeros", "empty", "ones", "full"):  # optimizer/*.py: device="cuda"
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor.cuda = lambda self, *_: self  # optimizer/grad_scaler.py; models/, tied embeddings
    plain = tensor.type  # optimizer/*.py compares this with "torch.cuda.FloatTensor"
    tensor.type = lambda self, *to: (
        plain(self, *to) if to else plain(self).replace("torch.", "torch.cuda.", 1)
    )
    for name in ("Stream", "Event", "current_stream", "default_stream"):  # distributed/, moe/
        setattr(cuda, name, _Stream)
    cuda.stream = lambda _: contextlib.nullcontext()  # as above
    cuda.synchronize = lambda: None  # pipeline_parallel/p2p_communication.py
    cuda.get_rng_state = lambda *_: torch.get_rng_state()  # tensor_parallel/random.py: the tracker
    cuda.manual_seed = torch.default_generator.manual_seed  # as above
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # as above
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # as above
    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # hides "CPU RNG state changed"
    moe.te_general_gemm = None  # the router reads this name, which only TransformerEngine defines
    dispatcher.maybe_move_tensor_to_cpu = lambda t, as_numpy=False, **_: (
        t.numpy() if as_numpy and t is not None else t
    )  # the all-to-all of experts needs lists instead of tensors
