"""
Starts and finds the controller of a job, for the manager of a cluster. The controller is a process
that runs the command `tft lead`.

There is one controller process for each address and job. The controller outlives the process of the
manager that has started it. The next process of the manager finds the controller by two files in a
directory of this user:

    NAME.lock     locked by the controller as long as it runs; contains the pid of the controller
    NAME          the socket at which the controller listens
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
    The process of the command `tft lead` (the controller) of one job at one address. The process
    may not exist yet, or may have ended.
    """

    def __init__(self, job: str, world: int, host: str, port: int) -> None:
        mark = hashlib.sha256(f"{job} {world}".encode()).hexdigest()[:12]
        self.desk = _room() / f"{host}-{port}-{mark}"
        """The path of the socket at which the controller listens."""
        self._lock = self.desk.with_name(f"{self.desk.name}.lock")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, words: Sequence[str]) -> bool:
        """
        Start a process of the command `tft lead` (the controller) with the arguments `words`, and
        return True. Return False if a controller of this job runs already.
        """
        lock = self._take()
        if lock is None:
            if self.code() is not None:
                # forget the process, because another process has started the running controller
                self._process = None
            return False
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tft", "lead", *words],
                env=environment.with_orchestrator(self.desk),
                stdin=subprocess.DEVNULL,
                # the controller inherits the lock file, and keeps the file locked until the
                # controller ends
                pass_fds=(lock,),
                start_new_session=True,
            )
            os.truncate(lock, 0)
            os.pwrite(lock, f"{self._process.pid}\n".encode(), 0)
        finally:
            os.close(lock)
        return True

    def lives(self) -> bool:
        """
        Return True if a controller (`tft lead`) of this job is running, no matter which process has
        started the controller.
        """
        lock = self._take()
        if lock is None:
            return True
        os.close(lock)
        return False

    def tidy(self) -> None:
        """
        Remove the socket of the controller and its lock file, if no controller (`tft lead`) of this
        job is running.
        """
        lock = self._take()
        if lock is not None:
            self.desk.unlink(missing_ok=True)
            self._lock.unlink()
            os.close(lock)

    def code(self) -> int | None:
        """
        Return the exit status of the controller process (`tft lead`) that this object has started.

        Return None if the process is still running, or if this object has started no process.
        """
        return None if self._process is None else self._process.poll()

    def pid(self) -> str:
        """
        Return the pid of the controller process (`tft lead`) of this job, as a text for a message.
        Return "unknown" if the lock file contains no pid or does not exist.
        """
        with suppress(FileNotFoundError):
            return self._lock.read_text().strip() or "unknown"
        return "unknown"

    def _take(self) -> int | None:
        """
        Lock the lock file of the controller, and return the descriptor of the file. Return None if
        the file is locked already, by a running controller (`tft lead`).
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
            # close this lock file, because the method `tidy` in another process has removed the
            # file
            os.close(lock)


def _room() -> Path:
    """
    Return the directory for the sockets and lock files of the controllers of this user. Create the
    directory if it does not exist.

    Raises `Refused` if the directory belongs to another user, or if other users can open it. A user
    who can open the socket of a controller can control the job.
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
            "this directory, or set TMPDIR to another directory"
        )
    return room
