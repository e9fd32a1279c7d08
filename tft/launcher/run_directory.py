"""
The run directory, which contains the files of a run, as the launcher (`tft run`) uses it.

This module decides whether a new run may use the directory, writes the launcher's own files there,
and finds out which launchers use the directory now. The directory contains:

    job.json        the command that was run, with its settings
    logs/           the standard error of each process
    pids/           the pid of each process, as text; a launcher keeps its own file locked
    job.name        the name of the job, for launchers that were not given a name
    story.jsonl     the recorded events of the job, written by the controller during each run
    progress.jsonl  the steps and states of the job over time, written by the controller
    report.json     the report of the job, written by the controller at the end
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
from tft.files import pid_file, read_object, room_lacks, write_whole

JOB = "job.json"
NAME = "job.name"
STORY = "story.jsonl"
REPORT = "report.json"
_UNREAD = {
    "": f"it has no {checkpoint.MANIFEST}",
    ".partial": "it was never finished",
    ".given-up": "the job has since gone back to an earlier step, or has ended because of wrong numbers",
}
"""The reasons why `--resume` skips a checkpoint, by the suffix of the checkpoint's directory."""


def launcher_name(node: int) -> str:
    """
    Return the name of the launcher of a node, which is used for the launcher's pid file. Node -1
    stands for a launcher without a node (`tft lead`).
    """
    return {-1: "lead", 0: "run"}.get(node, f"run-{node}")


def log_file(run_dir: Path, part: str) -> Path:
    """
    Return the path of the file for the standard error of a process. `part` is the name of the
    process.
    """
    return run_dir / "logs" / f"{part}.log"


def new_run_dir() -> Path:
    """
    Return a path for a new run directory. Its name contains the time and a random number, so that
    names sort by time and no other run has the same name.
    """
    return Path("tft-runs", f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}")


def holds_story(run_dir: Path) -> bool:
    """
    Return True if an earlier run has used the directory `run_dir`. Such a directory has a story: the
    events of the run, which its controller has recorded.
    """
    return (run_dir / STORY).exists()


def living_run(run_dir: Path) -> str | None:
    """
    Return the id of the run of this directory if its nodes still train, although its controller may
    have ended. Return None if there is no such run.

    The nodes still train if the run has written no report and the launcher of some node is alive.
    The launcher must have been started before the last entry of the story was written, because a
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
            if path.stat().st_mtime_ns <= told and is_locked(path):
                return run
    return None


def check_no_launcher(run_dir: Path) -> None:
    """
    Check that no `tft run` uses this directory. Raises `UsageError` if some `tft run` does. This
    check is for a controller that is started by hand: a running `tft run` has a controller already.
    """
    for path in sorted((run_dir / "pids").glob("run*.pid")):
        if is_locked(path):
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
    Check whether the launcher of `node` may use the run directory. Nothing is written.

    If `leads` is True, this launcher starts the controller of the job. If `goes_on` is True, the
    nodes train already, and the new controller only takes over their job. Checkpoints and story are
    checked only if `leads` is True and `goes_on` is False. If `may_begin` is True, a run that is to
    resume begins at step 0 when there is no checkpoint.

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
        # Checkpoints and story are checked only before the controller starts. Here the controller
        # of this run may already have begun a story, which would be taken for that of an earlier
        # run.
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
    Create the run directory and its folders `logs` and `pids`, unless they exist.

    Raises `UsageError` if they cannot be created.
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
    Reserve the run directory for this launcher during a `with` block. The directory is created if
    necessary. Meanwhile no second launcher of the same node can use the directory.

    If `leads` is True, unfinished and old checkpoints are removed before and after the block. If
    `goes_on` is True, they are not removed before the block, because the nodes train already and
    may be writing a checkpoint.

    Raises `UsageError` if the directory cannot be created, if nothing can be written there, or if
    another launcher of this node uses the directory.
    """
    make_run_dir(settings.run_dir)
    with _locked(settings, node) as lock:
        store = checkpoint.checkpoint_store_of(settings)
        if leads and not goes_on:
            checkpoint.sweep(store)  # unfinished checkpoints may have filled the disk
        if lacks := room_lacks(settings.run_dir):
            raise UsageError(f"{lacks}: make room, or choose another --run-dir")
        pid = f"{os.getpid()}\n".encode()
        # write the pid into the existing pid file: a new file with the same name would not be
        # locked
        os.pwrite(lock, pid, 0)
        os.truncate(lock, len(pid))
        yield
        if leads:
            checkpoint.sweep(store)


def resumable(store: CheckpointStore) -> Path | None:
    """
    Return the newest checkpoint that is undamaged and contains the rank-local state of all ranks.

    If no checkpoint is like that, return the newest checkpoint of all. Return None if there is no
    checkpoint.
    """
    found = checkpoint.committed(store)
    for directory in found:
        if not unfit(store, directory):
            return directory
    return found[0] if found else None


def unfit(store: CheckpointStore, directory: Path) -> str:
    """
    Return why a job cannot resume from a checkpoint, or "" if the job can. Every file of the
    checkpoint is read and verified.
    """
    return _unfit(store, directory, checkpoint.verify)


def known_unfit(store: CheckpointStore, directory: Path) -> str:
    """
    Return why a job cannot resume from a checkpoint, as far as the checkpoint's manifest (its list
    of files) shows. Return "" if the manifest shows no obstacle. The other files are not read.
    """
    return _unfit(store, directory, checkpoint.manifest_of)


def passed_over(store: CheckpointStore, chosen: Path | None) -> list[str]:
    """
    Return one sentence for each checkpoint directory that is newer than `chosen`, but that
    `--resume` skips. The sentence says why the directory is skipped.

    `chosen` is the checkpoint to resume from, or None if there is no such checkpoint.
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
        "which had left the job or were lost with their node: it can be loaded by hand, but not "
        "resumed"
    )


def shared_name(run_dir: Path) -> str:
    """
    Return the name of the job that all launchers with this run directory use, also in later runs.

    The first launcher that calls this function writes a random name to a file. Later launchers read
    the name from this file.
    """
    path = run_dir / NAME
    mine = path.with_name(f"{NAME}.{secrets.token_hex(4)}")
    made = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(made, secrets.token_hex(8).encode())
    os.close(made)
    with suppress(FileExistsError):
        # `os.link` is atomic, also on a shared file system: if several launchers come here at the
        # same time, only one of them creates the file
        os.link(mine, path)
    mine.unlink()
    return path.read_text()


def write_job(settings: JobSettings, command: Sequence[str]) -> None:
    """
    Write the file `job.json`, which contains the settings of the job and its command. `command` is
    the script and its arguments.
    """
    facts = {
        **asdict(settings),
        "run_dir": str(settings.run_dir),
        "checkpoint_dir": str(settings.checkpoints),
        "curve": settings.curve and str(settings.curve),
        "export": settings.export and str(settings.export),
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
    """The directory with the keys of the job. None: the bus of the job is not encrypted."""


def job_there(run_dir: Path) -> JobThere:
    """
    Return the name of the job that runs in a run directory, and how to reach this job.

    Raises `UsageError` if no job has run there, if `job.json` cannot be read, or if the job is
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
        raise UsageError(
            f"no job runs in {run_dir}: this directory has no file {JOB}; name the run directory "
            "of a running job"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise UsageError(
            f"{path} cannot be read as the description of a job: {type(wrong).__name__}: {wrong}"
        ) from None
    # The launcher writes job.json at the start of a run. So a report.json that is older than
    # job.json belongs to an earlier run.
    if report.exists() and report.stat().st_mtime_ns >= path.stat().st_mtime_ns:
        result = read_object(report).get("result", "unknown")
        raise UsageError(f"the job in {run_dir} is over, with the result {result!r}")
    return there


def checkpoint_store_there(run_dir: Path) -> CheckpointStore:
    """
    Return the place of the checkpoints that belong to a run directory. The file `job.json` of the
    last run in this directory names the place.
    """
    default = CheckpointStore(directory=run_dir / "checkpoints")
    # if job.json cannot be read (there was no run yet, or another version of tft has written the
    # file), return the default place
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads((run_dir / JOB).read_text())["settings"]
        return CheckpointStore(
            directory=Path(told["checkpoint_dir"]), name=str(told["checkpoint_name"])
        )
    return default


class RoomWatch:
    """
    Tells the operator once that the controller waits for room on the disk of the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._told = False

    def sentence(self) -> str:
        """
        Return a sentence about the disk if it has no room now. Return an empty text if it has room,
        if that cannot be found out, or if the sentence was returned before.
        """
        lacks = "" if self._told else room_lacks(self._run_dir)
        if not lacks:
            return ""
        self._told = True
        return f"{lacks}: the controller waits for room, and so do repairs and the end of the job"


class FreshReport:
    """
    The report of the run that begins when this object is created. A report that an earlier run has
    left in the same directory does not count.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / REPORT
        self._earlier = self._stamp()
        before = {} if self._earlier is None else self._read()
        self._told = {
            name: len(before.get(name, ())) for name in ("incidents", "missed", "begins_unlike")
        }

    def incidents(self) -> list[dict[str, Any]]:  # Any: parsed JSON
        """
        Return the incidents of this run. The report of a resumed job begins with the incidents of
        earlier runs; these incidents are left out.
        """
        return self._new("incidents")

    def missed(self) -> list[dict[str, Any]]:  # Any: parsed JSON
        """
        Return the periodic checkpoints that this run could not write. Checkpoints that earlier runs
        could not write are left out.
        """
        return self._new("missed")

    def begins_unlike(self) -> list[str]:
        """
        Return sentences that say which ranks began this run with different copies of a shard.
        """
        return self._new("begins_unlike")

    def _new(self, name: str) -> list[Any]:  # Any: parsed JSON
        if self.text() is None:
            return []
        entries: list[Any] = self._read()[name]
        return entries[self._told[name] :]

    def result(self) -> str:
        """
        Return the result of the job, such as `completed`, or "" if the report is not written yet.
        """
        return "" if self.text() is None else str(self._read()["result"])

    def why(self) -> str:
        """
        Return why the job ended, or "" if the report is not written yet.
        """
        return "" if self.text() is None else str(self._read()["why"])

    def steps(self) -> int:
        """
        Return the number of steps that were trained; 0 if the report is not written yet.
        """
        return 0 if self.text() is None else int(self._read()["steps"])

    def _read(self) -> dict[str, Any]:  # Any: parsed JSON
        return read_object(self._path)

    def text(self) -> str | None:
        """
        Return the text of the report, or None if the report is not written yet.
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
    Return True if a launcher of the node `node` uses the run directory now.
    """
    return is_locked(pid_file(run_dir, launcher_name(node)))


def is_locked(path: Path) -> bool:
    """
    Return True if a launcher holds the lock of its pid file `path`. The lock is seen in other
    containers too, and on other machines if the file system passes locks on. Return False if this
    cannot be found out.

    The file is opened for reading, because it may belong to another user.
    """
    try:
        with path.open() as file:
            # this takes the lock for a moment, in which no launcher can take it, but other calls of
            # this function can, because the lock is shared
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file is gone or unreadable, or the file system has no locks
        return False
    return False


@contextmanager
def _locked(settings: JobSettings, node: int) -> Iterator[int]:
    """
    Open and lock the pid file of the launcher of `node`, and yield the file descriptor. The lock
    ends with the `with` block, at the latest when the launcher ends.

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
    if read_object(run_dir / REPORT).get("result") == "completed":
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
