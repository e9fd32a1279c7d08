"""
Files that others read while we write: whole, or as they were before.
"""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """
    Write a file that nobody sees half written. Raises `OSError` as any write.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)
