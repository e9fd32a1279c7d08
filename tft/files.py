"""
Functions that write files for other processes, so that a reader finds either the whole old content
or the whole new content, that sync files to the disk, and that look whether it has room.
"""

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a write for which the disk has no room, no inode left, or a quota that is used up."""

_ROOM = 1 << 16
"""Less room than this, in bytes, is none: a line of the story may not fit."""


def write_whole(path: Path, text: str) -> None:
    """
    Write a file with the content `text`, so that other processes never read a half-written file. An
    existing file is replaced, and a symbolic link keeps its target. A device or a pipe, such as
    /dev/stdout, is written to. Raises `OSError` if the file cannot be written.
    """
    if path.is_relative_to("/dev") or (path.exists() and not path.is_file()):
        # append: /dev/stdout may be a file that has the output of the command
        with path.open("a") as device:
            device.write(text)
        return
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError:
        # what a full disk has taken of it is no use, and keeps room from others
        with suppress(OSError):
            draft.unlink()
        raise


def room_lacks(directory: Path) -> str:
    """
    Return why nothing more can be written into a directory: its disk is full, or has no inode
    left, or a quota is used up. Return an empty text if it has room, or if that cannot be found out.
    """
    probe, made = directory / f".room.{os.getpid()}", False
    try:
        # only a write meets a quota, and the room that a disk keeps for root
        with probe.open("wb") as file:
            made = True
            file.write(bytes(_ROOM))
    except OSError as error:
        if error.errno == errno.EDQUOT:
            return f"a quota on the disk of {directory} is used up"
        if error.errno == errno.ENOSPC:
            full = f"the disk of {directory} is full"
            return full if made else f"the disk of {directory} has no inode left for another file"
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return ""


def pid_file(run_dir: Path, name: str) -> Path:
    """
    Return the path of the pid file of a process. `name` is the name of the process.
    """
    return run_dir / "pids" / f"{name}.pid"


def write_pid(run_dir: Path, name: str, pid: int) -> str | None:
    """
    Write the pid file of a process for people and other commands. Nothing in the job reads it, so
    the job goes on if it cannot be written, as on a full disk. Return a sentence then.
    """
    path = pid_file(run_dir, name)
    try:
        write_whole(path, f"{pid}\n")
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    return None


def read_object(path: Path) -> dict[str, Any]:  # Any: parsed JSON
    """
    Return the JSON object in a file, or an empty dict if there is no such file or it has no JSON
    object. A file can be empty if the machine has failed while it was written.
    """
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def sync(path: Path) -> None:
    """
    Wait until the content of a file is on the disk (fsync). For a directory, wait until the names
    of its files are on the disk. Raises `OSError` if the path cannot be opened or synced.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
