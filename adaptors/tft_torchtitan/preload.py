"""
Imports early what TorchTitan imports. A replacement process starts while the other ranks wait.

TorchTitan itself is not among it: it looks for devices when it is imported, and a process that has
used a device cannot be forked. But nearly all of its time is that of modules of torch.
"""

from contextlib import suppress
from importlib import import_module

from tft_pytorch.preload import without_threads_of_arrow

_MODULES = (
    "datasets",
    "spmd_types",
    "tokenizers",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.pipelining.schedules",
    "torch.distributed.tensor.experimental",
    "torch.nn.attention.flex_attention",
    "torch.utils.tensorboard",
    "torch_checkpointing",
    "torchdata.stateful_dataloader",
    "triton",
    "tyro",
)


def preload() -> None:
    """
    Import the modules that TorchTitan needs, as far as they are installed. This takes 3 s.
    """
    with without_threads_of_arrow():
        for name in _MODULES:
            with suppress(ImportError):
                import_module(name)
