"""
Keeps the process of the loggers, from the process of the controller. Nothing here waits for a
logger, except at the end of the job for a limited time.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from tft_loggers.final import Final
from tft_loggers.places import STATE

LIMIT = 30.0
"""Seconds that the loggers get at the end of the job to send what is left."""
FIRST, LONGEST = 1.0, 60.0
"""Seconds before the process of the loggers is started again: the first time, and at most."""
STEADY = 60.0
"""If the process has lived for this many seconds, the next pause is the first one again."""

log = structlog.get_logger()


class Supervisor:
    """
    Starts the process of the loggers, starts it again when it dies, and tells it by a file up to
    which step the steps are final.
    """

    def __init__(self, run_dir: Path, job: str, names: Sequence[str]) -> None:
        self._run_dir = run_dir
        self._directory = run_dir / STATE
        self._command = [
            sys.executable, "-P", "-m", "tft_loggers", "--child", "--job", job,
            str(run_dir), *names,
        ]  # fmt: skip
        self._final = Final()
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._over = threading.Event()
        self._given_up = threading.Event()
        self._result = ""
        self.process: subprocess.Popen[bytes] | None = None
        """The last process that was started. None: none was yet."""
        self._keeper = threading.Thread(target=self._keep, name="loggers", daemon=True)

    def start(self) -> None:
        """
        Start the process, on a thread of its own that ends with the controller.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        self._final = Final.of(self._directory)
        self._final.result = ""
        self._write()
        threading.Thread(target=self._tell, name="loggers-final", daemon=True).start()
        self._keeper.start()

    def final(self, step: int) -> None:
        """
        Tell the process that all steps up to `step` are final.
        """
        with self._lock:
            back = self._final.reached(step)
        if back:
            # written at once: if this process were killed first, nobody would learn of it
            log.warning("logged_steps_come_again", after=step)
            self._write()
        self._news.set()

    def ends(self, result: str) -> None:
        """
        Note how the job ends.
        """
        self._result = result

    def close(self) -> None:
        """
        Tell the process that the job is over, and wait until it has sent everything, for `LIMIT`
        seconds at most. Then kill it.

        If this controller ends before the job does, nothing is done: the process ends by itself,
        and the next controller starts another.
        """
        if not self._result:
            return
        with self._lock:
            self._final.result = self._result
        self._write()
        self._over.set()
        self._news.set()
        self._keeper.join(LIMIT)
        if self._keeper.is_alive():
            log.warning(
                "values_not_all_sent",
                why=f"the loggers have not ended {LIMIT:.0f} s after the job",
                rest=f"{sys.executable} -m tft_loggers {self._run_dir} NAME sends the rest",
            )
            self._given_up.set()
            if self.process is not None:
                self.process.kill()

    def _write(self) -> None:
        try:
            with self._lock:
                self._final.write(self._directory)
        except OSError as error:
            log.warning("values_not_sent", why=f"{self._directory} cannot be written: {error}")

    def _tell(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            if self._over.is_set():
                return
            self._write()

    def _keep(self) -> None:
        """
        Run the process again and again, until it ends by itself after the end of the job. If it has
        died before, it is run once more then.
        """
        pause = FIRST
        while True:
            over, began = self._over.is_set(), time.monotonic()
            try:
                code: int | str = self._run()
            except OSError as error:
                code = str(error)
            ended = self._over.is_set() and code == 0
            if over or ended or self._given_up.is_set():
                return
            pause = FIRST if time.monotonic() - began > STEADY else min(2 * pause, LONGEST)
            log.warning("loggers_ended", code=code, again_s=pause)
            self._over.wait(pause)

    def _run(self) -> int:
        """
        Run the process until it ends, and return its exit status. It ends when its standard input
        is closed, as when this process dies.
        """
        with (self._run_dir / "logs" / "loggers.log").open("ab") as out:
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True
            )
        self.process = process
        assert process.stdin is not None
        with process.stdin:
            return process.wait()
