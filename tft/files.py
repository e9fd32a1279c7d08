"""
Writing of files that other processes read, so that a reader finds either the old or the new
content; and syncing of files to the disk.
"""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """
    Write a file so that no reader sees it half written. Raises `OSError` if it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def sync(path: Path) -> None:
    """
    Sync a file, or the list of files in a directory, to the disk. Returns when the data is on the
    disk. Raises `OSError`.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
