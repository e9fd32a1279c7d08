"""
What Megatron imports, imported early: a replacement starts while the other ranks wait.
"""

import tft_pytorch.preload

from tft_megatron.versions import check_megatron


def preload() -> None:
    """
    Import it: some seconds. Starts no thread, and touches no device, so that the process can be
    forked. Raises `UsageError` where there is no Megatron, or another one.
    """
    check_megatron()
    tft_pytorch.preload.preload()

    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (of the groups that send nothing)
