"""
Sends the rows of `values.jsonl` (the values of all final steps) to one logger, on a separate thread
for each logger.
"""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from tft.spi import LoggerJob, StepLogger
from tft_loggers.places import FAILED, SENT, STATE, VALUES, read, write

BATCH = 500
"""The number of rows that are given to the logger before each call of its `flush`."""
FIRST, LONGEST = 1.0, 60.0
"""Seconds before a logger that has failed is opened again: `FIRST` after the first failure, and
`LONGEST` at most. The successive pauses are 1, 2, 4, 8, 16, 32 and then always 60 seconds."""

log = structlog.get_logger()

Open = Callable[[LoggerJob], StepLogger]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """
    One row of `values.jsonl`, and the offset in bytes at which it ends.
    """

    end: int
    step: int
    unix: float
    values: dict[str, float]
    again: bool


class Sender:
    """
    Sends each row once to one logger. The offset up to which rows were sent is stored in a file, so
    that the next process of the loggers continues there.
    """

    def __init__(self, name: str, job: str, run_dir: Path, opener: Open, *, persists: bool) -> None:
        """
        `name` is the name of the logger, and `opener` is the function that opens it. `persists`
        says what happens if the logger still fails after the end of the run: True means to try
        again without end, and False to give up.
        """
        self._name = name
        self._path = run_dir / VALUES
        directory = run_dir / STATE / name
        directory.mkdir(parents=True, exist_ok=True)
        self._job = LoggerJob(job=job, run_dir=run_dir, directory=directory)
        self._state = directory / SENT
        self._failure = directory / FAILED
        self._fails = int(read(self._failure).get("times", 0))
        """How many attempts to send rows have failed in a row. The file `FAILED` contains the
        number too, so that the controller can tell the operator about a failing logger."""
        self._open = opener
        self._persists = persists
        self._logger: StepLogger | None = None
        self._asks = False
        """True if rows were given to the logger before it was opened last, and `flush` has not
        confirmed them. The logger is then asked for the last step that it has, and only later steps
        are sent."""
        self._last: int | None = None
        self._safe = self._offset = 0
        self._news = threading.Event()
        self._over = threading.Event()
        self._result = ""
        self.failed = False
        """True if the last attempt to send rows has failed."""
        self._thread = threading.Thread(target=self._run, name=f"log-{name}", daemon=True)

    def start(self) -> None:
        """
        Begin to send rows, on a thread that ends with the process.
        """
        self._thread.start()

    def news(self) -> None:
        """
        Wake the thread of this logger, because the file has new rows.
        """
        self._news.set()

    def finish(self, result: str) -> None:
        """
        Tell the thread that no more rows come, so that it ends after the last rows. `result` says
        how the run has ended; it is empty if that is not known.
        """
        self._result = result
        self._over.set()
        self._news.set()

    def join(self) -> None:
        """
        Wait until all rows are sent and the logger is closed.
        """
        self._thread.join()

    def _run(self) -> None:
        pause = FIRST
        while True:
            # read `_over` before the rows: if it is set now, all rows are in the file already, and
            # `_send_all` sends the last of them
            over = self._over.is_set()
            try:
                self._send_all()
                pause = FIRST
                if over:
                    self._close()
                self._works()
                if over:
                    return
            except (Exception, SystemExit) as error:  # noqa: BLE001 (a logger may raise anything)
                why = f"{type(error).__name__}: {error}"
                log.warning("values_not_sent", logger=self._name, why=why, again_s=pause)
                self._fail(why)
                self._logger = None
                if over and not self._persists:
                    return
                (threading.Event() if over else self._over).wait(pause)
                pause = min(2 * pause, LONGEST)
                continue
            self._news.wait()
            self._news.clear()

    def _works(self) -> None:
        self.failed = False
        if self._fails:
            self._fails = 0
            self._failure.unlink(missing_ok=True)

    def _fail(self, why: str) -> None:
        self.failed = True
        self._fails += 1
        with suppress(OSError):  # the disk may be full; the log has the reason of the failure
            write(self._failure, {"times": self._fails, "why": why})

    def _send_all(self) -> None:
        while rows := self._rows(self._begin()):
            last = self._opened()
            self._offset = rows[-1].end
            # Write the offset first. If this process is then killed, the next process knows that
            # the logger may already have these rows.
            self._note()
            for row in rows:
                if row.again or row.step > last:
                    self._sure().log(row.step, row.values, row.unix, again=row.again)
            if self._sure().flush():
                self._safe = self._offset
                self._note()

    def _begin(self) -> int:
        """
        Return the offset in `values.jsonl` of the next row to send. If the logger is not open, read
        the stored offset: the next row is then the first row that no `flush` has confirmed.
        """
        if self._logger is None:
            state = read(self._state)
            self._safe = self._offset = int(state.get("safe", 0))
            self._asks = int(state.get("given", 0)) > self._safe
        return self._offset

    def _note(self) -> None:
        write(self._state, {"safe": self._safe, "given": self._offset})

    def _opened(self) -> int:
        """
        Open the logger if it is not open. Return the last step of which the logger has values
        already. Return -1 if it need not be asked for this step, or cannot tell.
        """
        if self._logger is None:
            self._logger = self._open(self._job)
            self._last = self._logger.last_step() if self._asks else None
        return -1 if self._last is None else self._last

    def _sure(self) -> StepLogger:
        if self._logger is None:
            raise RuntimeError("the logger is not open")
        return self._logger

    def _close(self) -> None:
        if self._state.exists():
            self._opened()  # the logger must get the result of the run, even if no row is left
        if self._logger is not None:
            self._logger.close(self._result)
            self._safe = self._offset
            self._note()

    def _rows(self, offset: int) -> list[_Row]:
        """
        Return the rows of `values.jsonl` that begin at the offset `offset` (in bytes) or later, at
        most `BATCH` rows.
        """
        rows: list[_Row] = []
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return rows
        with file:
            file.seek(offset)
            for line in file:
                if len(rows) == BATCH or not line.endswith(b"\n"):
                    break
                offset += len(line)
                row = json.loads(line)
                rows.append(
                    _Row(
                        end=offset, step=row["step"], unix=row["unix"], values=row["values"],
                        again=row.get("again", False),
                    )
                )  # fmt: skip
        return rows
