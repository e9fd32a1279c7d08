"""
Imports MindSpore before it is used. The other ranks wait while a replacement starts, so its start
must be short.
"""

import importlib.util

from tft.errors import UsageError


def preload() -> None:
    """
    Import MindSpore, which takes 2 s and more. Raises `UsageError` if it is not installed.

    MindSpore starts no thread before its first operation. A process that was forked before the
    first operation computes the same losses. So ranks can be forked after the import.
    """
    if importlib.util.find_spec("mindspore") is None:
        raise UsageError(
            "the adaptor mindspore needs MindSpore, which is not installed here: "
            "pip install 'tft-bus[mindspore]'"
        )
    import mindspore  # noqa: F401 (for its imports)
