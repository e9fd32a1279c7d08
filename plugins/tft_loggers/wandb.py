"""
The logger `wandb`. It sends all values of a job to one run of Weights & Biases. Later processes of
the loggers and resumed runs of the job continue that run.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import structlog

from tft.spi import LoggerJob, write_whole

BLOCK, FILE_HEAD, HEAD = 32768, 7, 7
"""Sizes in bytes in a file of wandb: of a block, of the header of the file, and of the header of
each piece of a record (see `records`)."""
WHOLE, LAST = 1, 4
"""Values of the field `kind` in the header of a piece. `WHOLE` means that the piece is a whole
record, and `LAST` that it is the last piece of a record."""

log = structlog.get_logger()


class Wandb:
    """
    Sends values to a run of wandb.
    """

    def __init__(self, run: Any, run_dir: Path) -> None:  # Any: wandb is imported late
        self._run = run
        self._run_dir = run_dir

    def log(self, step: int, values: Mapping[str, float], at: float, *, again: bool) -> None:
        if again:
            # wandb drops values of a step before its newest step, so they cannot be corrected
            log.warning("wandb_not_corrected", step=step, names=sorted(values))
            return
        self._run.log(dict(values), step=step)

    def last_step(self) -> int | None:
        if self._run.offline:
            files = self._run_dir.glob(f"wandb/offline-run-*-{self._run.id}/*.wandb")
            return max((step for file in files for step in _steps(file.read_bytes())), default=-1)
        # subtract 1, because wandb's `step` is the number of the next step
        return int(self._run.step) - 1 if self._run.resumed else -1

    def flush(self) -> bool:
        # no value is confirmed, because wandb sends values in the background and does not say when
        # they are sent
        return False

    def close(self, result: str) -> None:
        self._run.finish(exit_code=0 if result in ("completed", "dumped") else 1)


def open_logger(job: LoggerJob) -> Wandb:
    """
    Return the logger of a job. The project and the account come from wandb's own environment
    variables.
    """
    import wandb

    note = job.directory / "run_id"
    known = note.read_text() if note.exists() else None
    run = wandb.init(
        id=known,
        resume="allow",
        name=job.run_dir.name if known is None else None,
        dir=str(job.run_dir),
        config={"tft": {"job": job.job, "run_dir": str(job.run_dir)}},
        settings=wandb.Settings(console="off", silent=True),
    )
    if known is None:
        write_whole(note, run.id)
    return Wandb(run, job.run_dir)


def _steps(content: bytes) -> Iterator[int]:
    """
    Yield the steps in `content`, the content of a file that wandb has written in its offline mode.
    Stop at an incomplete record, which a process may have left when it was killed.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    for raw in records(content):
        try:
            record = wandb_internal_pb2.Record.FromString(raw)
        except DecodeError:
            return
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                if "_step" in (item.key, *item.nested_key):
                    yield int(json.loads(item.value_json))


def records(content: bytes) -> Iterator[bytes]:
    """
    Yield the records in `content`, the content of a file of wandb. The file has the format of a log
    of LevelDB: it consists of blocks, and a record is cut into pieces so that no piece crosses the
    end of a block. Each piece begins with a header, which has a checksum (four bytes), the size of
    the piece (two bytes) and its kind (one byte).
    """
    at, record = FILE_HEAD, b""
    while at + HEAD <= len(content):
        left = BLOCK - at % BLOCK
        size, kind = struct.unpack_from("<HB", content, at + 4) if left >= HEAD else (0, 0)
        if kind == 0:  # no further piece is in this block, so go on with the next block
            at += left
            continue
        piece = content[at + HEAD : at + HEAD + size]
        if len(piece) < size:
            return
        record += piece
        at += HEAD + size
        if kind in (WHOLE, LAST):
            yield record
            record = b""
