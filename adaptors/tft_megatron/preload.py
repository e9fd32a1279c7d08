"""
Imports the modules that Megatron needs, before the user's script starts. The other ranks wait while
a replacement process starts, so this process must not spend that time on imports.
"""

import tft_pytorch.preload

from tft_megatron.versions import check_megatron


def preload() -> None:
    """
    Import the modules that Megatron needs, which takes some seconds. Start no thread and touch no
    device, so that the process can be forked.

    Raises `UsageError` if megatron-core is missing, or is another version.
    """
    check_megatron()
    tft_pytorch.preload.preload()

    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (for pretended groups)
