"""
Imports MindSpore in the fork server, before any rank needs MindSpore. All other ranks wait while
the new process of a lost rank starts, so that process must not spend time on imports.
"""

import importlib.util

from tft.errors import UsageError


def preload() -> None:
    """
    Import MindSpore, which takes at least 2 s. Raises `UsageError` if MindSpore is not installed.

    Processes can be forked after this import, because MindSpore starts no thread before its first
    operation. A process that is forked before that operation computes the same losses as a process
    that is not forked.
    """
    if importlib.util.find_spec("mindspore") is None:
        raise UsageError(
            "the adaptor mindspore needs MindSpore, which is not installed here: "
            "pip install 'tft-bus[mindspore]'"
        )
    import mindspore  # noqa: F401 (imported early)
