"""
Imports early the modules that TorchTitan imports, because the other ranks wait while a replacement
process starts.

TorchTitan itself is not imported here. It looks for devices when it is imported, and a process that
has used a device cannot be forked. torch's compiler looks for devices, too. But its import takes
most of the time, so it is imported here if torch was built without support for a device.
"""

from contextlib import suppress
from importlib import import_module

import torch
from tft_pytorch.preload import without_threads_of_arrow

_MODULES = (
    "datasets",
    "spmd_types",
    "tokenizers",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.pipelining.schedules",
    "torch.utils.tensorboard",
    "torch_checkpointing",
    "torchdata.stateful_dataloader",
    "triton",
    "tyro",
)
_LOOK_FOR_DEVICES = (
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
    "torch.nn.attention.flex_attention",
)


def preload() -> None:
    """
    Import the modules that TorchTitan needs, as far as they are installed. This takes 3 s.
    """
    built_for_device = torch.accelerator.current_accelerator() is not None
    with without_threads_of_arrow():
        for name in (*_MODULES, *(() if built_for_device else _LOOK_FOR_DEVICES)):
            with suppress(ImportError):
                import_module(name)
