"""
Keeps the process of the loggers, from the process of the controller. Nothing here waits for a
logger, except at the end of the job for a limited time.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from tft.spi import Remark, leave_word
from tft_loggers.final import Final
from tft_loggers.places import FAILED, STATE, read

LIMIT = 30.0
"""Seconds that the loggers get at the end of the job to send what is left."""
FIRST, LONGEST = 1.0, 60.0
"""Seconds before the ended process of the loggers is started again. The first pause is `FIRST`, and
later pauses grow up to `LONGEST`."""
STEADY = 60.0
"""If the process has lived for this many seconds, the next pause is `FIRST` again. The operator
gets another remark about a failing logger only after this time."""
LOOK = 0.5
"""Seconds between two looks at whether the loggers fail."""
LASTING = 2
"""The operator gets a remark about a logger that has failed this many times in a row. A single
failed request causes no remark."""

log = structlog.get_logger()


class Supervisor:
    """
    Starts the process of the loggers, starts it again when it dies, and tells it by a file up to
    which step the steps are final.
    """

    def __init__(self, run_dir: Path, job: str, names: Sequence[str]) -> None:
        self._run_dir = run_dir
        self._directory = run_dir / STATE
        self._names = names
        self._failing: set[str] = set()
        self._remarked: dict[str, float] = {}
        self._remarks: list[Remark] = []
        self._unwritten = False
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
        """The process of the loggers that was started last. None: no process was started yet."""
        self._keeper = threading.Thread(target=self._keep, name="loggers", daemon=True)

    def start(self) -> None:
        """
        Start the process, on a thread of its own that ends with the controller.
        """
        with suppress(NotADirectoryError):  # `_write` says so
            self._final = Final.of(self._directory)
            for name in self._names:
                (self._directory / name / FAILED).unlink(missing_ok=True)  # of an earlier run
        self._final.result = ""
        self._write()
        threading.Thread(target=self._tell, name="loggers-final", daemon=True).start()
        threading.Thread(target=self._watch, name="loggers-watch", daemon=True).start()
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

    def remarks(self) -> list[Remark]:
        """
        Return the remarks about loggers that fail, and that work again, since the last call.
        """
        with self._lock:
            found, self._remarks = self._remarks, []
        return found

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
        unwritten = self._write()
        self._over.set()
        self._news.set()
        self._keeper.join(LIMIT)
        if self._keeper.is_alive() or unwritten:
            failures = {} if unwritten else self._failures()
            why = unwritten or f"the loggers have not ended {LIMIT:.0f} s after the job"
            if failures:
                why = "; ".join(f"{name}: {found['why']}" for name, found in failures.items())
            names = " ".join(failures) or "NAME"
            rest = f"{sys.executable} -m tft_loggers {self._run_dir} {names}"
            log.warning("values_not_all_sent", why=why, rest=f"{rest} sends the rest")
            with suppress(OSError):  # the file of the last words may be on the same full disk
                leave_word(
                    self._run_dir,
                    f"not all values of session.log were sent ({why}); `{rest}` sends the rest",
                )
            self._given_up.set()
            if self.process is not None:
                self.process.kill()

    # Any: parsed JSON
    def _failures(self) -> Mapping[str, Mapping[str, Any]]:
        """
        Return the failing loggers by name: how often each has failed in a row (`times`), and `why`.
        """
        found = {name: read(self._directory / name / FAILED) for name in self._names}
        return {name: failure for name, failure in found.items() if failure}

    def _watch(self) -> None:
        while not self._over.wait(LOOK):
            try:
                failures = self._failures()
            except OSError:
                continue
            for name in self._names:
                self._judge(name, failures.get(name))

    def _judge(self, name: str, failure: Mapping[str, Any] | None) -> None:  # Any: parsed JSON
        now, remark = time.monotonic(), None
        if failure is None and name in self._failing:
            self._failing.discard(name)
            remark = Remark(event="logger_failed_over", facts={"logger": name})
        elif failure is not None and failure["times"] >= LASTING and name not in self._failing:
            if now - self._remarked.get(name, now - STEADY) < STEADY:
                return
            self._failing.add(name)
            self._remarked[name] = now
            remark = Remark(event="logger_failed", facts={"logger": name, "why": failure["why"]})
        if remark is not None:
            with self._lock:
                self._remarks.append(remark)

    def _write(self) -> str:
        """
        Write up to which step the steps are final. Return why that cannot be written, or "". Remark
        when it fails the first time, and when it can be written again.
        """
        with self._lock:
            why = ""
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._final.write(self._directory)
            except OSError as error:
                why = f"{self._directory} cannot be written ({error.strerror or error})"
            if bool(why) == self._unwritten:
                return why
            self._unwritten = bool(why)
            remark = Remark(event="values_not_sent", facts={"why": why})
            if not why:
                remark = Remark(event="values_not_sent_over", facts={})
            self._remarks.append(remark)
        if why:
            log.warning("values_not_sent", why=why)
        return why

    def _tell(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            if self._over.is_set():
                return
            self._write()

    def _keep(self) -> None:
        """
        Run the process of the loggers, and start it again when it dies, until it has ended without
        an error after the end of the job. After the end of the job it is started at most once more.
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
