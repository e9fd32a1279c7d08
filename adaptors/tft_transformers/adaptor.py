"""
The hooks of the adaptor for Transformers. tft finds this module through the adaptor's Python entry
point.

The hooks are those of the adaptor for PyTorch, except that Transformers is imported early too.
"""

from tft_pytorch.adaptor import *  # noqa: F403 (all hooks, and those that will be added)

from tft.spi import hookimpl


@hookimpl  # type: ignore[no-redef]  # replaces the hook that was imported with *
def tft_preload() -> None:
    # imported here, because only a process that preloads modules needs the module `preload`
    from tft_transformers.preload import preload

    preload()
