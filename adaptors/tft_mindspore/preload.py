"""
Imports MindSpore before training begins. The other ranks wait while a replacement starts, so a
replacement must not spend its start on imports.
"""

import importlib.util

from tft.errors import UsageError


def preload() -> None:
    """
    Import MindSpore, which takes 2 s and more. Raises `UsageError` if it is not installed.

    Processes can be forked after this import: MindSpore starts no thread before its first
    operation, and a process that was forked before that operation computes the same losses.
    """
    if importlib.util.find_spec("mindspore") is None:
        raise UsageError(
            "the adaptor mindspore needs MindSpore, which is not installed here: "
            "pip install 'tft-bus[mindspore]'"
        )
    import mindspore  # noqa: F401 (imported early)
