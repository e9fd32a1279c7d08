"""
Imports MindSpore early: a replacement starts while the other ranks wait.
"""

import importlib.util

from tft.errors import UsageError


def preload() -> None:
    """
    Import MindSpore, which takes 2 s and more. Raises `UsageError` if it is not installed.

    MindSpore starts no thread before the first operation, and a process that was forked before it
    computes the same losses. So ranks can be forked.
    """
    if importlib.util.find_spec("mindspore") is None:
        raise UsageError(
            "the adaptor mindspore needs MindSpore, which is not installed here: "
            "pip install 'tft-bus[mindspore]'"
        )
    import mindspore  # noqa: F401 (for its imports)
