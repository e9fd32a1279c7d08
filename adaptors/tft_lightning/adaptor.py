"""
The hooks of the adaptor for Lightning: those of the adaptor for PyTorch, and a preload of
Lightning. tft finds this module through the adaptor's Python entry point.
"""

from tft_pytorch import adaptor as _pytorch

from tft.spi import hookimpl
from tft_lightning.versions import check_lightning

# the hooks of the adaptor for PyTorch under their names, as tft looks for them in this module
globals().update({name: hook for name, hook in vars(_pytorch).items() if name.startswith("tft_")})


@hookimpl
def tft_preload() -> None:
    check_lightning()
    # imported here, because only a process that preloads modules needs them
    from tft_pytorch.preload import preload

    import tft_lightning.strategy  # noqa: F401 (the script imports it, and Lightning with it)

    preload()
