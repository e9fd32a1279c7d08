"""
Many parts become one checkpoint: what whoever commits does, after an incident or between two steps.
"""

from collections.abc import Sequence
from pathlib import Path

import pluggy

from tft import checkpoint
from tft.checkpoint import Manifest
from tft.protocol.messages import SavedFile


def join(
    hook: pluggy.HookRelay,
    directory: Path,
    files: Sequence[SavedFile],
    *,
    step: int,
    world: int,
    adaptor: str,
) -> Manifest:
    """
    Have the adaptor join the parts that lie in `directory`; the manifest of them and of what it wrote.
    """
    joined = [
        checkpoint.digest_file(directory, name) for name in hook.tft_join(directory=directory) or ()
    ]
    return checkpoint.manifest(step=step, world=world, adaptor=adaptor, files=(*files, *joined))
