"""
Functions for files that other processes read. They write a file so that a reader finds either the
whole old or the whole new content, sync a file to the disk, and find out whether the disk is full.
"""

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""The error numbers of a write that has failed because the disk is full or has no free inode, or
because a quota is used up."""

_ROOM = 1 << 16
"""The number of bytes that must still fit on a disk. A disk with less room counts as full, because
a line of the story (the record of the job's events) may not fit."""


_OUTPUTS = frozenset({Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd")})
"""The directories with the open files of a process. /dev/shm is none of them: it is an ordinary file
system, in which a run directory may be."""


def write_whole(path: Path, text: str) -> None:
    """
    Write a file with the content `text`, so that other processes never read a half-written file. An
    existing file is replaced, and a symbolic link keeps its target. If `path` is a device or a
    pipe, such as /dev/stdout, the text is appended. Raises `OSError` if the file cannot be written.
    """
    if path.parent in _OUTPUTS or (path.exists() and not path.is_file()):
        # append to it, because /dev/stdout may be a regular file that already has other output of
        # this command
        with path.open("a") as device:
            device.write(text)
        return
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError:
        # remove the incomplete draft, which would only take up room on a full disk
        with suppress(OSError):
            draft.unlink()
        raise


def room_lacks(directory: Path) -> str:
    """
    Return why nothing more can be written into a directory: its disk is full, or has no inode left,
    or a quota is used up. Return an empty text if the disk has room, or if this cannot be found
    out.
    """
    probe, made = directory / f".room.{os.getpid()}", False
    try:
        # try to write, because only a write shows that a quota is used up, or that the rest of the
        # disk is reserved for root
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
    Write the pid file of a process, for people and for other commands. The job does not read the
    file, so it continues if the file cannot be written, as on a full disk. In this case return a
    sentence that says why, otherwise None.
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
