"""
The hooks of the adaptor for Transformers. tft finds this module through the adaptor's Python entry
point.

The hooks are those of the adaptor for PyTorch, except that Transformers is imported early too.
"""

import tft_pytorch.adaptor

from tft.spi import hookimpl

globals().update(
    {name: hook for name, hook in vars(tft_pytorch.adaptor).items() if name.startswith("tft_")}
)


@hookimpl
def tft_preload() -> None:
    # imported here, because only a process that preloads modules needs the module `preload`
    from tft_transformers.preload import preload

    preload()
