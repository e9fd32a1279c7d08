"""
Files that others read while we write, whole or as they were before; and what is to be on the disk.
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


def sync(path: Path) -> None:
    """
    Return when a file, or what a directory lists, is on the disk. Raises `OSError`.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
