"""
Starts and supervises the process of the loggers, from the controller's process. The controller
never waits for a logger, except at the end of the job for a limited time.
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
"""Seconds for which the controller waits at the end of the job until the loggers have sent the
remaining values."""
FIRST, LONGEST = 1.0, 60.0
"""Seconds before the process of the loggers is started again after it has ended: `FIRST` after a
process that had run for more than `STEADY` seconds. If processes end sooner, the successive pauses
are 1, 2, 4, 8, 16, 32 and then always `LONGEST` seconds."""
STEADY = 60.0
"""Seconds after which a process of the loggers counts as working. This is also the shortest time
between two remarks to the operator that the same logger fails."""
LOOK = 0.5
"""Seconds between two checks whether a logger fails."""
LASTING = 2
"""The number of failures in a row after which the operator gets a remark that a logger fails. A
single failed request causes no remark."""

log = structlog.get_logger()


class Supervisor:
    """
    Starts the process of the loggers, and starts it again when it dies. Tells the process through a
    file which steps are final, so that their values can be sent.
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
        """The process of the loggers that was started last. None if no process was started yet."""
        self._keeper = threading.Thread(target=self._keep, name="loggers", daemon=True)

    def start(self) -> None:
        """
        Start the process of the loggers. A separate thread, which ends with the controller, watches
        the process.
        """
        with suppress(NotADirectoryError):  # the method `_write` below reports this error
            self._final = Final.of(self._directory)
            for name in self._names:
                # remove the record of failures in an earlier run
                (self._directory / name / FAILED).unlink(missing_ok=True)
        self._final.result = ""
        self._write()
        threading.Thread(target=self._tell, name="loggers-final", daemon=True).start()
        threading.Thread(target=self._watch, name="loggers-watch", daemon=True).start()
        self._keeper.start()

    def final(self, step: int) -> None:
        """
        Tell the process of the loggers that all steps up to `step` are final.
        """
        with self._lock:
            back = self._final.reached(step)
        if back:
            # write the file now, not later on the thread of `_tell`: if the controller were killed
            # before, the loggers would never learn that the job has gone back
            log.warning("logged_steps_come_again", after=step)
            self._write()
        self._news.set()

    def remarks(self) -> list[Remark]:
        """
        Return the remarks since the last call: about loggers that have begun to fail, and about
        loggers that work again.
        """
        with self._lock:
            found, self._remarks = self._remarks, []
        return found

    def ends(self, result: str) -> None:
        """
        Record how the job ends, for the loggers (see `Final.result`).
        """
        self._result = result

    def close(self) -> None:
        """
        Tell the process of the loggers that the job is over. Wait at most `LIMIT` seconds until the
        process has sent all values, and kill it if it has not.

        Do nothing if this controller ends before the job does. The process then ends by itself, and
        the next controller starts another process.
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
            with suppress(OSError):  # this file is in the run directory, whose disk may be full
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
        Return the loggers that fail now, by name. For each, the result has the number of failures
        in a row (`times`) and the reason (`why`).
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
        Write the file that says which steps are final. Return an empty text, or the reason if the
        file cannot be written. The operator gets a remark when writing begins to fail, and when it
        works again.
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
        Run the process of the loggers, and start it again when it dies. Return when the process has
        ended without an error after the end of the job. After the end of the job, start it at most
        once more.
        """
        pause = 0.0
        while True:
            over, began = self._over.is_set(), time.monotonic()
            try:
                code: int | str = self._run()
            except OSError as error:
                code = str(error)
            ended = self._over.is_set() and code == 0
            if over or ended or self._given_up.is_set():
                return
            steady = time.monotonic() - began > STEADY
            pause = FIRST if steady else min(max(2 * pause, FIRST), LONGEST)
            log.warning("loggers_ended", code=code, again_s=pause)
            self._over.wait(pause)

    def _run(self) -> int:
        """
        Run the process of the loggers until it ends, and return its exit status. If the controller
        dies, the standard input of the process is closed, and the process ends too.
        """
        with (self._run_dir / "logs" / "loggers.log").open("ab") as out:
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True
            )
        self.process = process
        assert process.stdin is not None
        with process.stdin:
            return process.wait()
