"""
Starts and finds the controller of a job for the manager of a cluster. The controller is a process
that runs the command `tft lead`.

There is one such process for each address and job. The process outlives the manager that has
started it. The next manager finds the process by two files in a directory of this user:

    NAME.lock     locked by the process as long as it runs; contains its pid
    NAME          the socket of the controller
"""

import fcntl
import hashlib
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mindio_ttp import environment
from mindio_ttp.checks import Refused

_MODE = 0o700


class Lead:
    """
    The `tft lead` process of one job at one address. The process may not exist yet, or may have
    ended.
    """

    def __init__(self, job: str, world: int, host: str, port: int) -> None:
        mark = hashlib.sha256(f"{job} {world}".encode()).hexdigest()[:12]
        self.desk = _room() / f"{host}-{port}-{mark}"
        """The path of the socket at which the controller listens."""
        self._lock = self.desk.with_name(f"{self.desk.name}.lock")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, words: Sequence[str]) -> bool:
        """
        Start `tft lead` with the arguments `words`, and return True. Return False if a `tft lead`
        of this job runs already.
        """
        lock = self._take()
        if lock is None:
            if self.code() is not None:
                self._process = None  # another process has started the running `tft lead`
            return False
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tft", "lead", *words],
                env=environment.with_orchestrator(self.desk),
                stdin=subprocess.DEVNULL,
                pass_fds=(lock,),  # the child keeps the file locked until it ends
                start_new_session=True,
            )
            os.truncate(lock, 0)
            os.pwrite(lock, f"{self._process.pid}\n".encode(), 0)
        finally:
            os.close(lock)
        return True

    def lives(self) -> bool:
        """
        Return True if a `tft lead` of this job is running, whichever process has started it.
        """
        lock = self._take()
        if lock is None:
            return True
        os.close(lock)
        return False

    def tidy(self) -> None:
        """
        Remove the socket and the lock file if no `tft lead` of this job is running.
        """
        lock = self._take()
        if lock is not None:
            self.desk.unlink(missing_ok=True)
            self._lock.unlink()
            os.close(lock)

    def code(self) -> int | None:
        """
        Return the exit status of the `tft lead` that this object has started.

        Return None if it is still running, or if this object has started none.
        """
        return None if self._process is None else self._process.poll()

    def pid(self) -> str:
        """
        Return the pid of the `tft lead` of this job, as a text for a message. Return "unknown" if
        the lock file has no pid.
        """
        with suppress(FileNotFoundError):
            return self._lock.read_text().strip() or "unknown"
        return "unknown"

    def _take(self) -> int | None:
        """
        Lock the lock file and return its descriptor. Return None if a `tft lead` has locked it.
        """
        while True:
            lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), self._lock.stat()):
                    return lock
            os.close(lock)  # another process has removed the file in `tidy` meanwhile


def _room() -> Path:
    """
    Return the directory for the sockets and lock files of this user. Create it if it does not
    exist.

    Raises `Refused` if another user can open the directory, because a user who can open the socket
    can control the job.
    """
    room = Path(tempfile.gettempdir()) / f"tft-mindio-{os.getuid()}"
    with suppress(FileExistsError):
        room.mkdir(mode=_MODE)
    found = room.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or mode != _MODE:
        raise Refused(
            f"tft_start_controller: {room} must be a directory that only user {os.getuid()} can "
            f"open (mode 700), but it belongs to user {found.st_uid} and has mode {mode:o}: remove "
            "it, or set TMPDIR to another directory"
        )
    return room
