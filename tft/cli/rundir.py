"""
The run directory as the launcher sees it: whether a run may use it, what the launcher writes
there, and who is using it now.

    job.json        what was run, and with which settings
    logs/           what each part had to say
    pids/           the process of each part, as text; that of the launcher is locked by it
    job.name        the name of the job, where its nodes could not be told one
    story.jsonl     written by the controller: its presence is the sign of an earlier run
    report.json     written by the controller at the end
"""

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tft import checkpoint
from tft.checkpoint import CheckpointStore, Manifest
from tft.config import JobSettings
from tft.errors import CheckpointCorrupt, UsageError
from tft.files import write_whole

JOB = "job.json"
NAME = "job.name"
STORY = "story.jsonl"
REPORT = "report.json"
_UNREAD = {
    "": f"it has no {checkpoint.MANIFEST}",
    ".partial": "it was never finished",
    ".given-up": "the job has turned back to an earlier step since",
}
"""By what stands behind the name of a checkpoint: why it is not read."""


def launcher_name(node: int) -> str:
    """
    The name of a node's launcher among the parts of the job.
    """
    return {-1: "lead", 0: "run"}.get(node, f"run-{node}")


def pid_file(run_dir: Path, part: str) -> Path:
    """
    Where the pid of a part is kept.
    """
    return run_dir / "pids" / f"{part}.pid"


def log_file(run_dir: Path, part: str) -> Path:
    """
    Where the standard error of a part is kept.
    """
    return run_dir / "logs" / f"{part}.log"


def new_run_dir() -> Path:
    """
    A directory that no other run has, named so that a listing is in the order of the runs.
    """
    return Path("tft-runs", f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}")


def holds_story(run_dir: Path) -> bool:
    """
    Whether there has been a run in this directory.
    """
    return (run_dir / STORY).exists()


def living_run(run_dir: Path) -> str | None:
    """
    The run whose nodes train in this directory without anyone who leads it; None: there is none.

    A node counts whose launcher lives and was there before the last word of the story: one that came later has been
    started for the next run.
    """
    try:
        told = (run_dir / STORY).stat().st_mtime_ns
        began = (run_dir / JOB).stat().st_mtime_ns
        run = str(json.loads((run_dir / JOB).read_text())["settings"]["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    report = run_dir / REPORT
    if report.exists() and report.stat().st_mtime_ns >= began:
        return None
    for path in sorted((run_dir / "pids").glob("run*.pid")):
        with suppress(OSError):
            if path.stat().st_mtime_ns <= told and _is_locked(path):
                return run
    return None


def check_run_dir(
    settings: JobSettings,
    node: int,
    *,
    leads: bool = True,
    may_begin: bool = False,
    goes_on: bool = False,
) -> None:
    """
    Raises `UsageError` where this run may not use its directory, and `CheckpointCorrupt` where
    what it is to resume from is damaged. With `may_begin` a run that is to resume may find nothing
    to resume from; a run that `goes_on` is led from here again. Nothing is written.
    """
    run_dir = settings.run_dir
    if run_dir.exists() and not run_dir.is_dir():
        raise UsageError(f"--run-dir {run_dir} is not a directory")
    if settings.checkpoints.exists() and not settings.checkpoints.is_dir():
        raise UsageError(f"--checkpoint-dir {settings.checkpoints} is not a directory")
    if pid_file(run_dir, launcher_name(node)).exists():
        with _locked(settings, node):
            pass
    if not leads or goes_on:
        return  # who leads decides; it may have begun the story before this node looks
    if settings.resume:
        if may_begin:
            _check_unfinished(run_dir)
        store = checkpoint.checkpoint_store_of(settings)
        directory = resumable(store) if may_begin else checkpoint.newest(store)
        if directory is not None:
            _check_resumable(settings, directory)
        elif not may_begin:
            raise UsageError(f"there is no usable checkpoint in {store.directory} to resume from")
    elif holds_story(run_dir):
        raise UsageError(
            f"{run_dir} holds the story of an earlier run: add --resume to continue it, or "
            "choose another --run-dir"
        )
    elif (earlier := checkpoint.newest(checkpoint.checkpoint_store_of(settings))) is not None:
        raise UsageError(
            f"{earlier} is a checkpoint of an earlier run: add --resume to continue from it, or choose "
            "another --checkpoint-dir or --checkpoint-name"
        )


@contextmanager
def run_dir_of(
    settings: JobSettings, node: int, *, leads: bool = True, goes_on: bool = False
) -> Iterator[None]:
    """
    The run directory, made if need be, and used by no other launcher of this node meanwhile. Where a run `goes_on`, its
    nodes may be writing a checkpoint.
    """
    try:
        for folder in ("logs", "pids"):
            (settings.run_dir / folder).mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise UsageError(
            f"the run directory {settings.run_dir} cannot be made: {refused.strerror}"
        ) from None
    with _locked(settings, node) as lock:
        pid = f"{os.getpid()}\n".encode()
        os.pwrite(lock, pid, 0)  # not by renaming: it is this very file that is locked
        os.truncate(lock, len(pid))
        store = checkpoint.checkpoint_store_of(settings)
        if leads and not goes_on:
            checkpoint.sweep(store)
        yield
        if leads:
            checkpoint.sweep(store)


def resumable(store: CheckpointStore) -> Path | None:
    """
    The newest checkpoint that is whole and holds the private state of all ranks; if none does, the newest
    of all.
    """
    found = checkpoint.committed(store)
    for directory in found:
        if not unfit(store, directory):
            return directory
    return found[0] if found else None


def unfit(store: CheckpointStore, directory: Path) -> str:
    """
    Return why a job cannot go on from a checkpoint; empty where it can. Every file is read.
    """
    return _unfit(store, directory, checkpoint.verify)


def known_unfit(store: CheckpointStore, directory: Path) -> str:
    """
    Return the same by its manifest alone: empty means that nothing is known against it.
    """
    return _unfit(store, directory, checkpoint.manifest_of)


def passed_over(store: CheckpointStore, chosen: Path | None) -> list[str]:
    """
    Return what `--resume` passes over that is newer than what it goes on from, a sentence for each.
    """
    at = -1 if chosen is None else store.step_of(chosen)
    return [
        f"{directory} is newer and is passed over: {_UNREAD[mark]}"
        for step, mark, directory in store.held()
        if at is not None
        and step > at
        and mark in _UNREAD
        and (mark or not (directory / checkpoint.MANIFEST).is_file())
    ]


def _unfit(store: CheckpointStore, directory: Path, look: Callable[[Path], Manifest]) -> str:
    try:
        manifest = look(directory)
        checkpoint.check_name(store, directory, manifest)
    except CheckpointCorrupt as damaged:
        return str(damaged)
    return _lacking(directory, manifest)


def _lacking(directory: Path, manifest: Manifest) -> str:
    if not manifest.without_local_state:
        return ""
    return (
        f"{directory} holds no RNG and data position of ranks {manifest.without_local_state}, which were lost with "
        "their node: it can be loaded by hand, but not resumed"
    )


def shared_name(run_dir: Path) -> str:
    """
    A name that nobody can guess, and that all who ask in this run directory are given, in later runs
    too: whoever comes first makes it up.
    """
    path = run_dir / NAME
    mine = path.with_name(f"{NAME}.{secrets.token_hex(4)}")
    made = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(made, secrets.token_hex(8).encode())
    os.close(made)
    with suppress(FileExistsError):
        os.link(mine, path)  # whole at once, and for one of them only, between machines too
    mine.unlink()
    return path.read_text()


def write_job(settings: JobSettings, command: Sequence[str]) -> None:
    """
    Keep what was run: `command` is the script and its arguments.
    """
    facts = {
        **asdict(settings),
        "run_dir": str(settings.run_dir),
        "checkpoint_dir": str(settings.checkpoints),
        "curve": settings.curve and str(settings.curve),
    }
    written = {"command": list(command), "directory": str(Path.cwd()), "settings": facts}
    write_whole(settings.run_dir / JOB, json.dumps(written, indent=2) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobThere:
    """
    Where to find the job of a run directory.
    """

    job: str
    broker: str
    log: Path
    """Of its controller."""
    curve: Path | None = None
    """Where its keys are, if it has some."""


def job_there(run_dir: Path) -> JobThere:
    """
    The job that runs in a run directory. Raises `UsageError` where there is none, and where it is
    over.
    """
    path, report = run_dir / JOB, run_dir / REPORT
    try:
        settings = json.loads(path.read_text())["settings"]
        there = JobThere(
            job=str(settings["job"]),
            broker=str(settings["broker"]),
            log=log_file(run_dir, "controller"),
            curve=Path(settings["curve"]) if settings.get("curve") else None,
        )
    except FileNotFoundError:
        raise UsageError(f"no job runs in {run_dir}: there is no {JOB}") from None
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise UsageError(
            f"{path} does not say which job runs there: {type(wrong).__name__}: {wrong}"
        ) from None
    # the one is written when a run begins, the other when it ends
    if report.exists() and report.stat().st_mtime_ns >= path.stat().st_mtime_ns:
        result = json.loads(report.read_text())["result"]
        raise UsageError(f"the job in {run_dir} is over, with the result {result!r}")
    return there


def checkpoint_store_there(run_dir: Path) -> CheckpointStore:
    """
    Where the checkpoints of a run directory are: where its last run was told to put them.
    """
    default = CheckpointStore(directory=run_dir / "checkpoints")
    with suppress(OSError, ValueError, KeyError, TypeError):  # no run, or one of another tft
        told = json.loads((run_dir / JOB).read_text())["settings"]
        return CheckpointStore(
            directory=Path(told["checkpoint_dir"]), name=str(told["checkpoint_name"])
        )
    return default


class FreshReport:
    """
    The report of the run that begins now, not that of an earlier one in the same directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / REPORT
        self._earlier = self._stamp()
        before = {} if self._earlier is None else self._read()
        self._told = {name: len(before.get(name, ())) for name in ("incidents", "missed")}

    def incidents(self) -> list[dict[str, Any]]:  # Any: JSON
        """
        The incidents of this run alone; a resumed job's report begins with the earlier ones.
        """
        return self._new("incidents")

    def missed(self) -> list[dict[str, Any]]:  # Any: JSON
        """
        The same of the periodic checkpoints that could not be written.
        """
        return self._new("missed")

    def _new(self, name: str) -> list[dict[str, Any]]:  # Any: JSON
        if self.text() is None:
            return []
        entries: list[dict[str, Any]] = self._read()[name]
        return entries[self._told[name] :]

    def result(self) -> str:
        """
        How the job ended; empty while that is not written.
        """
        return "" if self.text() is None else str(self._read()["result"])

    def why(self) -> str:
        """
        Why the job ended; empty while that is not written.
        """
        return "" if self.text() is None else str(self._read()["why"])

    def steps(self) -> int:
        """
        How many steps were trained; 0 while that is not written.
        """
        return 0 if self.text() is None else int(self._read()["steps"])

    def _read(self) -> dict[str, Any]:  # Any: JSON
        report: dict[str, Any] = json.loads(self._path.read_text())
        return report

    def text(self) -> str | None:
        """
        What it says; None while it is not written.
        """
        if self._stamp() == self._earlier:
            return None
        return self._path.read_text()

    def exit_code(self) -> int | None:
        """
        The exit code it says the job has; None while it is not written.
        """
        text = self.text()
        return None if text is None else int(json.loads(text)["exit_code"])

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns


def last_line(log: Path) -> str:
    """
    What a part said last.
    """
    return next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "")


def in_use(run_dir: Path, node: int) -> bool:
    """
    Whether a launcher of this node lives.
    """
    return _is_locked(pid_file(run_dir, launcher_name(node)))


def _is_locked(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


@contextmanager
def _locked(settings: JobSettings, node: int) -> Iterator[int]:
    """
    The launcher's pid file, open and locked: the kernel unlocks it when its holder is gone.
    """
    path = pid_file(settings.run_dir, launcher_name(node))
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode().strip()
            raise UsageError(
                f"{settings.run_dir} is in use by another `tft run` (process {holder})"
            ) from None
        yield lock
    finally:
        os.close(lock)


def _check_unfinished(run_dir: Path) -> None:
    report = run_dir / REPORT
    if report.exists() and json.loads(report.read_text())["result"] == "completed":
        raise UsageError(
            f"the job in {run_dir} has completed: choose another --run-dir for another one"
        )


def _check_resumable(settings: JobSettings, directory: Path) -> None:
    manifest = checkpoint.verify(directory)
    checkpoint.check_name(checkpoint.checkpoint_store_of(settings), directory, manifest)
    if lacking := _lacking(directory, manifest):
        raise UsageError(lacking)
    if manifest.world != settings.world:
        raise UsageError(
            f"{directory} is of a job of {manifest.world} ranks and cannot be resumed with "
            f"{settings.world}"
        )
    if manifest.adaptor != settings.adaptor:
        raise UsageError(
            f"{directory} was written by the adaptor {manifest.adaptor!r} and cannot be resumed "
            f"with {settings.adaptor!r}"
        )
