"""
The hooks of the adaptor for Lightning: those of the adaptor for PyTorch, and a preload of
Lightning. tft finds this module through the adaptor's Python entry point.
"""

from tft.spi import hookimpl
from tft_lightning.versions import check_lightning
from tft_pytorch import adaptor as _pytorch

check_lightning()

globals().update(
    {name: hook for name, hook in vars(_pytorch).items() if name.startswith("tft_")}
)


@hookimpl
def tft_preload() -> None:
    """
    Import what a process of the job would import late, and Lightning, which takes longest.
    """
    # imported here, because only a process that preloads modules needs them
    import lightning.pytorch
    import tft_lightning.strategy  # noqa: F401 (the script imports it)
    from tft_pytorch.preload import preload

    preload()
