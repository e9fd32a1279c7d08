"""
The hooks of the adaptor for Lightning: those of the adaptor for PyTorch, and a preload of
Lightning. tft finds this module through the adaptor's Python entry point.
"""

from tft_pytorch import adaptor as _pytorch
from tft_pytorch.adaptor import *  # noqa: F403 (all hooks, and those that will be added)

from tft.spi import hookimpl
from tft_lightning.versions import LIGHTNING


@hookimpl  # type: ignore[no-redef]  # replaces the hook that was imported with *
def tft_preload() -> None:
    LIGHTNING.check()
    # imported here, because only a process that preloads modules needs it
    import tft_lightning.strategy  # noqa: F401 (the script imports it, and Lightning with it)

    _pytorch.tft_preload()
