"""
What MindSpore imports, imported early: a replacement starts while the other ranks wait.
"""

import importlib.util

from tft.errors import UsageError


def preload() -> None:
    """
    Import it, which takes 2 s and more. It starts no thread before the first operation, and the same
    losses come of a process that was forked then; so ranks can be. Raises `UsageError` where it cannot be had.
    """
    if importlib.util.find_spec("mindspore") is None:
        raise UsageError(
            "the adaptor mindspore needs MindSpore, which is not installed here: "
            "pip install 'tft-bus[mindspore]'"
        )
    import mindspore  # noqa: F401 (for its imports)

    import tft_mindspore.adopted
    import tft_mindspore.checkpoints  # noqa: F401 (for their imports)
