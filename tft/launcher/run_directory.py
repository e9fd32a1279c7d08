"""
The run directory as the launcher uses it.

This module decides whether a run may use the directory, writes the files of the launcher, and finds
out which launchers use the directory now.

    job.json        the command that was run, with its settings
    logs/           the standard error of each process
    pids/           the pid of each process, as text; a launcher keeps its own file locked
    job.name        the name of the job, for nodes that were not given one
    story.jsonl     written by the controller; it exists if there has been a run here
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
    ".given-up": "the job has since gone back to an earlier step",
}
"""The reasons why a checkpoint is not read, by the suffix of its directory."""


def launcher_name(node: int) -> str:
    """
    Return the name of a node's launcher, as used for its log and its pid file. Node -1 is a
    launcher without a node.
    """
    return {-1: "lead", 0: "run"}.get(node, f"run-{node}")


def pid_file(run_dir: Path, part: str) -> Path:
    """
    Return the path of the pid file of a process. `part` is the name of the process.
    """
    return run_dir / "pids" / f"{part}.pid"


def log_file(run_dir: Path, part: str) -> Path:
    """
    Return the path of the file for the standard error of a process. `part` is the name of the
    process.
    """
    return run_dir / "logs" / f"{part}.log"


def new_run_dir() -> Path:
    """
    Return the path of a new run directory. Its name sorts by time and is not used by another run.
    """
    return Path("tft-runs", f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}")


def holds_story(run_dir: Path) -> bool:
    """
    Return True if there has been a run in this directory.
    """
    return (run_dir / STORY).exists()


def living_run(run_dir: Path) -> str | None:
    """
    Return the id of the run whose nodes train in this directory without a leader, or None if there
    is no such run.

    A node counts if its launcher is alive and was started before the last entry of the story. A
    launcher that was started later belongs to the next run.
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


def check_no_launcher(run_dir: Path) -> None:
    """
    Check that no `tft run` trains in this directory, for a controller that is started by hand.
    Raises `UsageError` if one does: it has a controller of its own.
    """
    for path in sorted((run_dir / "pids").glob("run*.pid")):
        if _is_locked(path):
            raise UsageError(
                f"the run directory {run_dir} is in use by `tft run` (process "
                f"{path.read_text().strip()}), which has started a controller itself: choose "
                "another --run-dir"
            )


def check_run_dir(
    settings: JobSettings,
    node: int,
    *,
    leads: bool = True,
    may_begin: bool = False,
    goes_on: bool = False,
) -> None:
    """
    Check whether this run may use its directory. Nothing is written.

    If `leads` is True, this launcher starts the controller of the job. If `goes_on` is True, the
    nodes train already, and the controller only takes over their job. Checkpoints and story are
    checked only if `leads` is True and `goes_on` is False. If `may_begin` is True, a run that is to
    resume may begin anew if there is no checkpoint.

    Raises `UsageError` if the run may not use the directory, and `CheckpointCorrupt` if the
    checkpoint to resume from is damaged.
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
        # only the leading node checks checkpoints and story: here the leading node may already have
        # begun the story of this run
        return
    if settings.resume:
        if may_begin:
            _check_unfinished(run_dir)
        store = checkpoint.checkpoint_store_of(settings)
        directory = resumable(store) if may_begin else checkpoint.newest(store)
        if directory is not None:
            _check_resumable(settings, directory)
        elif not may_begin:
            raise UsageError(
                f"there is no usable checkpoint in {store.directory} to resume from: name the "
                "--checkpoint-dir that has one, or start a new job without --resume in another "
                "--run-dir"
            )
    elif holds_story(run_dir):
        raise UsageError(
            f"{run_dir} holds the story (the record of all events) of an earlier run: add --resume "
            "to continue that run, or choose another --run-dir"
        )
    elif (earlier := checkpoint.newest(checkpoint.checkpoint_store_of(settings))) is not None:
        raise UsageError(
            f"{earlier} is a checkpoint of an earlier run: add --resume to continue from it, or "
            "choose another --checkpoint-dir or --checkpoint-name"
        )


def make_run_dir(run_dir: Path) -> None:
    """
    Create the run directory and its folders `logs` and `pids`, if they are missing.

    Raises `UsageError` if that is not possible.
    """
    try:
        for folder in ("logs", "pids"):
            (run_dir / folder).mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise UsageError(
            f"the run directory {run_dir} cannot be made: {refused.strerror}"
        ) from None


@contextmanager
def run_dir_of(
    settings: JobSettings, node: int, *, leads: bool = True, goes_on: bool = False
) -> Iterator[None]:
    """
    Use the run directory for this launcher: create it if necessary, and lock it against other
    launchers of this node.

    The leading node removes unfinished and old checkpoints on entry and on exit. With `goes_on` it
    does not remove them on entry, because the nodes may be writing a checkpoint.

    Raises `UsageError` if the directory cannot be made, or if another launcher uses it.
    """
    make_run_dir(settings.run_dir)
    with _locked(settings, node) as lock:
        pid = f"{os.getpid()}\n".encode()
        # the file must not be replaced by renaming, because the lock belongs to this file
        os.pwrite(lock, pid, 0)
        os.truncate(lock, len(pid))
        store = checkpoint.checkpoint_store_of(settings)
        if leads and not goes_on:
            checkpoint.sweep(store)
        yield
        if leads:
            checkpoint.sweep(store)


def resumable(store: CheckpointStore) -> Path | None:
    """
    Return the newest checkpoint that is undamaged and contains the rank-local state of all ranks.

    If there is no such checkpoint, return the newest checkpoint of all. None: there is no
    checkpoint.
    """
    found = checkpoint.committed(store)
    for directory in found:
        if not unfit(store, directory):
            return directory
    return found[0] if found else None


def unfit(store: CheckpointStore, directory: Path) -> str:
    """
    Return why a job cannot resume from a checkpoint, or "" if it can. Every file is read.
    """
    return _unfit(store, directory, checkpoint.verify)


def known_unfit(store: CheckpointStore, directory: Path) -> str:
    """
    Return why a job cannot resume from a checkpoint, as far as its manifest shows. Empty: the
    manifest shows no obstacle. The other files are not read.
    """
    return _unfit(store, directory, checkpoint.manifest_of)


def passed_over(store: CheckpointStore, chosen: Path | None) -> list[str]:
    """
    Return the newer directories that `--resume` skips, as one sentence for each.

    `chosen` is the checkpoint to resume from; None: there is none.
    """
    at = -1 if chosen is None else store.step_of(chosen)
    return [
        f"{directory} is newer and is skipped: {_UNREAD[mark]}"
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
        f"{directory} holds no RNG and data position of ranks {manifest.without_local_state}, "
        "which were lost with their node: it can be loaded by hand, but not resumed"
    )


def shared_name(run_dir: Path) -> str:
    """
    Return the name that all launchers in this run directory share, also in later runs.

    The first caller writes a random name, which nobody can guess, and later callers read it.
    """
    path = run_dir / NAME
    mine = path.with_name(f"{NAME}.{secrets.token_hex(4)}")
    made = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(made, secrets.token_hex(8).encode())
    os.close(made)
    with suppress(FileExistsError):
        # os.link is atomic, also on a file system that machines share: only one caller succeeds
        os.link(mine, path)
    mine.unlink()
    return path.read_text()


def write_job(settings: JobSettings, command: Sequence[str]) -> None:
    """
    Write `job.json`. `command` is the script and its arguments.
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
    The name of the job that runs in a run directory, and how to reach the job.
    """

    job: str
    broker: str
    log: Path
    """The log file of the controller."""
    curve: Path | None = None
    """The directory with the keys of the job. None: it has no keys."""


def job_there(run_dir: Path) -> JobThere:
    """
    Return how to reach the job that runs in a run directory.

    Raises `UsageError` if no job runs there, if its record is not readable, or if the job is over.
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
        raise UsageError(
            f"no job runs in {run_dir}: this directory has no file {JOB}; name the run directory "
            "of a running job"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise UsageError(
            f"{path} cannot be read as the description of a job: {type(wrong).__name__}: {wrong}"
        ) from None
    # job.json is written at the start of a run: an older report.json belongs to an earlier run
    if report.exists() and report.stat().st_mtime_ns >= path.stat().st_mtime_ns:
        result = json.loads(report.read_text())["result"]
        raise UsageError(f"the job in {run_dir} is over, with the result {result!r}")
    return there


def checkpoint_store_there(run_dir: Path) -> CheckpointStore:
    """
    Return where the checkpoints of a run directory are, according to the job.json of its last run.
    """
    default = CheckpointStore(directory=run_dir / "checkpoints")
    # without a readable job.json (no run yet, or another version of tft) the default holds
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads((run_dir / JOB).read_text())["settings"]
        return CheckpointStore(
            directory=Path(told["checkpoint_dir"]), name=str(told["checkpoint_name"])
        )
    return default


class FreshReport:
    """
    The report of the run that begins now. The report of an earlier run in the same directory is
    ignored.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / REPORT
        self._earlier = self._stamp()
        before = {} if self._earlier is None else self._read()
        self._told = {name: len(before.get(name, ())) for name in ("incidents", "missed")}

    def incidents(self) -> list[dict[str, Any]]:  # Any: parsed JSON
        """
        Return the incidents of this run. Those of earlier runs, with which the report of a resumed
        job begins, are left out.
        """
        return self._new("incidents")

    def missed(self) -> list[dict[str, Any]]:  # Any: parsed JSON
        """
        Return the periodic checkpoints that this run could not write. Those of earlier runs are
        left out.
        """
        return self._new("missed")

    def _new(self, name: str) -> list[dict[str, Any]]:  # Any: parsed JSON
        if self.text() is None:
            return []
        entries: list[dict[str, Any]] = self._read()[name]
        return entries[self._told[name] :]

    def result(self) -> str:
        """
        Return the result of the job, such as `completed`. Empty: the report is not written yet.
        """
        return "" if self.text() is None else str(self._read()["result"])

    def why(self) -> str:
        """
        Return why the job ended. Empty: the report is not written yet.
        """
        return "" if self.text() is None else str(self._read()["why"])

    def steps(self) -> int:
        """
        Return the number of steps that were trained; 0 if the report is not written yet.
        """
        return 0 if self.text() is None else int(self._read()["steps"])

    def _read(self) -> dict[str, Any]:  # Any: parsed JSON
        report: dict[str, Any] = json.loads(self._path.read_text())
        return report

    def text(self) -> str | None:
        """
        Return the text of the report; None if it is not written yet.
        """
        if self._stamp() == self._earlier:
            return None
        return self._path.read_text()

    def exit_code(self) -> int | None:
        """
        Return the exit code of the job from the report; None if the report is not written yet.
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
    Return the last line of a log that is not blank, or "" if there is no such line.
    """
    return next(
        (line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()),
        "",
    )


def in_use(run_dir: Path, node: int) -> bool:
    """
    Return True if a launcher of this node is running in the run directory.
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
    Open and lock the launcher's pid file, and yield the descriptor. The kernel unlocks the file
    when the launcher ends.

    Raises `UsageError` if another launcher holds the lock.
    """
    path = pid_file(settings.run_dir, launcher_name(node))
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode().strip()
            raise UsageError(
                f"the run directory {settings.run_dir} is in use by another `tft run` (process "
                f"{holder}): end that process, or choose another --run-dir"
            ) from None
        yield lock
    finally:
        os.close(lock)


def _check_unfinished(run_dir: Path) -> None:
    report = run_dir / REPORT
    if report.exists() and json.loads(report.read_text())["result"] == "completed":
        raise UsageError(
            f"the job in {run_dir} has completed: choose another --run-dir for a new job"
        )


def _check_resumable(settings: JobSettings, directory: Path) -> None:
    manifest = checkpoint.verify(directory)
    checkpoint.check_name(checkpoint.checkpoint_store_of(settings), directory, manifest)
    if lacking := _lacking(directory, manifest):
        raise UsageError(lacking)
    if manifest.world != settings.world:
        raise UsageError(
            f"the checkpoint {directory} was written by a job of {manifest.world} ranks, so a job "
            f"of {settings.world} ranks cannot resume from it: choose --nnodes and "
            f"--nproc-per-node so that the job has {manifest.world} ranks"
        )
    if manifest.adaptor != settings.adaptor:
        raise UsageError(
            f"the checkpoint {directory} was written by the adaptor {manifest.adaptor!r}, so a job "
            f"with the adaptor {settings.adaptor!r} cannot resume from it: start the job with "
            f"--adaptor {manifest.adaptor}"
        )
