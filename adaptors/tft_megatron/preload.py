"""
Imports the modules that Megatron needs before they are used. The other ranks wait while a
replacement starts, so its start must be short.
"""

import tft_pytorch.preload

from tft_megatron.versions import check_megatron


def preload() -> None:
    """
    Import the modules; this takes some seconds. Starts no thread and touches no device, so that the
    process can be forked.

    Raises `UsageError` if megatron-core is missing, or is another version.
    """
    check_megatron()
    tft_pytorch.preload.preload()

    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (groups that send nothing)
