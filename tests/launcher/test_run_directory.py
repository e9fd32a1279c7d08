"""
The run directory: which runs may use it, and which files the launcher leaves in it.
"""

import errno
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tft import checkpoint
from tft.checkpoint import checkpoint_store_of
from tft.config import JobSettings
from tft.errors import CheckpointCorrupt, UsageError
from tft.launcher.run_directory import (
    FreshReport,
    RoomWatch,
    check_no_launcher,
    check_run_dir,
    checkpoint_store_there,
    in_use,
    last_line,
    living_run,
    passed_over,
    resumable,
    run_dir_of,
    write_job,
)


@pytest.fixture
def settings(tmp_path: Path) -> JobSettings:
    """
    Return the settings of a job whose run directory does not exist yet.
    """
    return JobSettings(job="j", run_dir=tmp_path / "run", broker="127.0.0.1:29400")


def test_controller_by_hand_is_refused_when_a_launcher_lives(settings: JobSettings) -> None:
    """When a `tft run` lives in a run directory, then a `tft controller` started by hand there is
    refused. The file `job.json` is unchanged."""
    check_no_launcher(settings.run_dir)
    with run_dir_of(settings, 1):
        write_job(settings, [])
        with pytest.raises(UsageError, match=r"in use by `tft run` .* choose another --run-dir"):
            check_no_launcher(settings.run_dir)
        command = [sys.executable, "-m", "tft", "controller", "--run-dir", str(settings.run_dir)]
        options = ["--job", "other", "--broker", "127.0.0.1:1"]
        before = (settings.run_dir / "job.json").read_text()
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, "choose another --run-dir" in done.stderr) == (2, True), (
            done.stderr
        )
        assert (settings.run_dir / "job.json").read_text() == before
    check_no_launcher(settings.run_dir)


def test_run_directory_has_the_pid_of_its_launcher(settings: JobSettings) -> None:
    """When a run begins, then its run directory is made, with the pid file of the launcher and a
    directory for logs."""
    with run_dir_of(settings, node=0):
        assert (settings.run_dir / "pids" / "run.pid").read_text() == f"{os.getpid()}\n"
        assert (settings.run_dir / "logs").is_dir()


def test_run_directory_of_a_living_launcher_is_refused(settings: JobSettings) -> None:
    """When a run is in progress, then another launcher of the same node is refused in its run
    directory, by the check before the start and at the start."""
    with run_dir_of(settings, node=0):
        with pytest.raises(UsageError, match=f"in use by another `tft run` .process {os.getpid()}"):
            check_run_dir(settings, node=0)
        with pytest.raises(UsageError, match="in use"), run_dir_of(settings, node=0):
            pass


def test_launchers_of_two_nodes_share_a_run_directory(settings: JobSettings) -> None:
    """When the launcher of node 0 runs, then the launcher of node 1 may use the same run directory."""
    with run_dir_of(settings, node=0):
        check_run_dir(settings, node=1)
        with run_dir_of(settings, node=1):
            assert (settings.run_dir / "pids" / "run-1.pid").exists()


def test_run_directory_is_free_after_its_run_has_ended(settings: JobSettings) -> None:
    """When a run has ended, then its run directory may be used by the next run."""
    with run_dir_of(settings, node=0):
        pass

    check_run_dir(settings, node=0)


def test_launcher_of_another_user_is_seen(settings: JobSettings) -> None:
    """When a pid file can only be read, as that of another user, then it is seen whether its launcher
    lives. When the file cannot even be read, then no launcher is taken to live."""
    path = settings.run_dir / "pids" / "run.pid"
    with run_dir_of(settings, node=0):
        path.chmod(0o444)
        assert in_use(settings.run_dir, 0)
    assert not in_use(settings.run_dir, 0)
    path.unlink()
    path.mkdir()
    assert not in_use(settings.run_dir, 0)


def test_run_lives_while_a_node_older_than_its_story_lives(
    settings: JobSettings,
) -> None:
    """When a launcher older than the last change of the story lives, then the run can be led again.
    It cannot when the nodes have ended, are newer than the story, or a report exists."""
    story, report = settings.run_dir / "story.jsonl", settings.run_dir / "report.json"
    mine = replace(settings, run="a1")
    assert living_run(settings.run_dir) is None
    with run_dir_of(settings, node=3, leads=False):
        write_job(mine, [])
        assert living_run(settings.run_dir) is None
        story.touch()
        assert living_run(settings.run_dir) == "a1"
        report.touch()
        assert living_run(settings.run_dir) is None
        report.unlink()
    assert living_run(settings.run_dir) is None
    with run_dir_of(settings, node=3, leads=False):
        os.utime(story, ns=(0, 0))
        assert living_run(settings.run_dir) is None


def test_continued_run_keeps_unfinished_checkpoints_of_its_nodes(settings: JobSettings) -> None:
    """When the nodes of a run train and the run is led again, then an unfinished checkpoint in the
    run directory is kept."""
    writing = settings.checkpoints / "step-00000008.round-1.1.partial"
    with run_dir_of(settings, node=-1):
        writing.mkdir(parents=True)
    assert not writing.exists()
    writing.mkdir(parents=True)
    settings.run_dir.joinpath("story.jsonl").touch()
    check_run_dir(settings, node=-1, goes_on=True)
    with run_dir_of(settings, node=-1, goes_on=True):
        assert writing.exists()


def test_run_that_may_begin_is_allowed_without_a_checkpoint(settings: JobSettings) -> None:
    """When an earlier run left no checkpoint, then a run that must resume is refused. A run that
    may begin is allowed, unless the earlier run has completed."""
    settings = replace(settings, resume=True)
    settings.run_dir.mkdir()
    (settings.run_dir / "story.jsonl").touch()
    with pytest.raises(UsageError, match="there is no usable checkpoint"):
        check_run_dir(settings, node=0)
    report = settings.run_dir / "report.json"
    report.write_text('{"result": "failed"}')
    check_run_dir(settings, node=0, may_begin=True)

    report.write_text('{"result": "completed"}')
    with pytest.raises(UsageError, match="has completed: choose another --run-dir"):
        check_run_dir(settings, node=0, may_begin=True)


def test_new_run_is_refused_when_the_directory_has_a_story(settings: JobSettings) -> None:
    """When the run directory has a story, then a new run is refused and the sentence names
    `--resume`."""
    settings.run_dir.mkdir()
    (settings.run_dir / "story.jsonl").touch()

    with pytest.raises(UsageError, match="add --resume to continue that run"):
        check_run_dir(settings, node=0)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            {"nproc_per_node": 4},
            "was written by a job of 2 ranks, so a job of 4 ranks cannot resume from it",
        ),
        (
            {"adaptor": "fake"},
            "written by the adaptor 'pytorch', so a job with the adaptor 'fake' cannot resume "
            "from it",
        ),
    ],
)
def test_resume_is_refused_when_world_size_or_adaptor_differs(
    settings: JobSettings, other: dict[str, Any], sentence: str
) -> None:
    """When the world size or the adaptor differs from the checkpoint's, then resuming is refused
    and the sentence names both values."""
    saved(settings)
    again = replace(settings, nproc_per_node=2, resume=True)

    check_run_dir(again, node=0)
    with pytest.raises(UsageError, match=sentence):
        check_run_dir(replace(again, **other), node=0)


def test_resume_from_a_damaged_checkpoint_is_refused(settings: JobSettings) -> None:
    """When a byte of a checkpoint has changed, then resuming is refused. The sentence names the
    file, the expected digest and the found digest."""
    file = saved(settings) / "local-state-rank0.bin"
    expected = checkpoint.digest_file(file.parent, file.name).digest
    file.write_bytes(b"positiom")
    found = checkpoint.digest_file(file.parent, file.name).digest

    with pytest.raises(CheckpointCorrupt, match=rf"{file.name}.*{expected}.*{found}"):
        check_run_dir(replace(settings, nproc_per_node=2, resume=True), node=0)


def test_new_run_is_refused_when_checkpoints_of_its_name_exist(settings: JobSettings) -> None:
    """When checkpoints with the name pattern of a new run exist, then the run is refused and the
    sentence names `--resume`. With another name pattern the run is allowed."""
    own = replace(settings, checkpoint_dir=settings.run_dir.parent / "kept", nproc_per_node=2)
    saved(own)

    with pytest.raises(UsageError, match="is a checkpoint of an earlier run: add --resume"):
        check_run_dir(own, node=0)
    check_run_dir(replace(own, resume=True), node=0)
    check_run_dir(replace(own, checkpoint_name="second-{step}"), node=0)


def test_checkpoint_directory_and_name_are_read_from_job_json(
    settings: JobSettings,
) -> None:
    """When a run has its own checkpoint directory and name, then they are read from its run
    directory. Without a run, the defaults are used."""
    own = replace(
        settings, checkpoint_dir=settings.run_dir.parent / "kept", checkpoint_name="{step}"
    )
    assert checkpoint_store_there(settings.run_dir) == checkpoint_store_of(settings)
    settings.run_dir.mkdir()
    write_job(own, ["train.py"])
    assert checkpoint_store_there(settings.run_dir) == checkpoint_store_of(own)


def test_file_as_checkpoint_directory_is_refused(settings: JobSettings) -> None:
    """When `--checkpoint-dir` is a file, then the run is refused and the sentence says that the
    path is not a directory."""
    file = settings.run_dir.parent / "kept"
    file.touch()

    with pytest.raises(UsageError, match=r"--checkpoint-dir .*kept is not a directory"):
        check_run_dir(replace(settings, checkpoint_dir=file), node=0)


def test_unfinished_checkpoint_is_not_resumed(settings: JobSettings) -> None:
    """When the only checkpoint was never committed, then resuming is refused, because no usable
    checkpoint exists."""
    final = saved(settings)
    final.rename(checkpoint.partial(final))

    with pytest.raises(UsageError, match="there is no usable checkpoint in"):
        check_run_dir(replace(settings, nproc_per_node=2, resume=True), node=0)


def test_checkpoint_without_the_state_of_a_rank_is_passed_over(
    settings: JobSettings,
) -> None:
    """When the newest checkpoint lacks the rank-local state of a rank, then a run that may begin
    takes an older whole checkpoint. When no such checkpoint exists, the run is refused."""
    settings = replace(settings, nproc_per_node=2, resume=True)
    newest = saved(settings, step=9, ranks=1)
    with pytest.raises(
        UsageError, match=r"step-00000009 holds no RNG and data position of ranks \[1\]"
    ):
        check_run_dir(settings, node=0, may_begin=True)
    assert resumable(checkpoint_store_of(settings)) == newest
    whole = saved(settings)

    assert resumable(checkpoint_store_of(settings)) == whole
    check_run_dir(settings, node=0, may_begin=True)
    with pytest.raises(UsageError, match="step-00000009 holds no RNG"):
        check_run_dir(settings, node=0)


def test_damaged_checkpoint_is_passed_over_by_a_run_that_may_begin(settings: JobSettings) -> None:
    """When the newest checkpoint is damaged, then a run that may begin takes an older whole
    checkpoint. A run that must resume is refused."""
    settings = replace(settings, nproc_per_node=2, resume=True)
    older, newest = saved(settings), saved(settings, step=9)
    assert resumable(checkpoint_store_of(settings)) == newest
    (newest / "local-state-rank0.bin").write_bytes(b"positiom")

    assert resumable(checkpoint_store_of(settings)) == older
    check_run_dir(settings, node=0, may_begin=True)
    with pytest.raises(
        CheckpointCorrupt, match=r"local-state-rank0\.bin differs from what was written"
    ):
        check_run_dir(settings, node=0)


def saved(settings: JobSettings, *, step: int = 7, ranks: int = 2) -> Path:
    """
    Write a checkpoint of two ranks with the adaptor `pytorch`. With `ranks` 1, only one rank has
    rank-local state.
    """
    final = checkpoint_store_of(settings).place(step)
    partial = checkpoint.partial(final)
    partial.mkdir(parents=True)
    files = [checkpoint.write_local_state(partial, rank, b"position") for rank in range(ranks)]
    manifest = checkpoint.manifest(step=step, world=2, adaptor="pytorch", files=files)
    checkpoint.commit(partial, final, manifest)
    return final


def test_file_as_run_directory_is_refused(settings: JobSettings) -> None:
    """When the run directory is a file, then the run is refused and the sentence says that the path
    is not a directory."""
    settings.run_dir.touch()

    with pytest.raises(UsageError, match="is not a directory"):
        check_run_dir(settings, node=0)


def test_command_and_settings_are_written_to_job_json(settings: JobSettings) -> None:
    """When a run begins, then `job.json` in its run directory has the command and the settings."""
    settings.run_dir.mkdir()
    write_job(settings, ["train.py", "--steps", "60"])

    kept = json.loads((settings.run_dir / "job.json").read_text())
    assert kept["command"] == ["train.py", "--steps", "60"]
    assert kept["settings"]["job"] == "j"
    assert os.listdir(settings.run_dir) == ["job.json"]


def test_report_of_an_earlier_run_is_ignored(settings: JobSettings) -> None:
    """When a resumed run has not written its report yet, then the report of the earlier run is
    ignored."""
    settings.run_dir.mkdir()
    written = settings.run_dir / "report.json"
    written.write_text('{"exit_code": 3, "incidents": []}')
    report = FreshReport(settings.run_dir)

    assert report.exit_code() is None
    written.write_text('{"exit_code": 0}')
    assert report.exit_code() == 0


def test_newer_unusable_checkpoint_directories_are_named(settings: JobSettings) -> None:
    """When directories of later steps exist beside the chosen checkpoint, then each directory is
    named with the reason why it is not used."""
    store = checkpoint_store_of(settings)
    chosen = store.place(4)
    chosen.mkdir(parents=True)
    (chosen / "manifest.json").touch()
    for name in (store.place(6).name, f"{store.place(8).name}.partial", store.place(2).name):
        (store.directory / name).mkdir()
    found = passed_over(store, chosen)
    assert [sentence.partition(": ")[2] for sentence in found] == [
        "it has no manifest.json", "it was never finished",
    ]  # fmt: skip
    assert str(store.place(6)) in found[0]


def test_last_line_of_a_log_with_invalid_text_is_found(tmp_path: Path) -> None:
    """When a log has bytes that are not valid text, then its last line is still found."""
    log = tmp_path / "agent.log"
    log.write_bytes(b"\xff\xfe\nno place for rank 3\n\n")
    assert last_line(log) == "no place for rank 3"


def on_full_disk(path: Path, mode: str) -> io.BufferedWriter:
    """
    Open a file as `Path.open` does, on a disk that has no room.
    """
    return io.BufferedWriter(io.FileIO("/dev/full", "w"))


def test_full_disk_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk of the run directory has no room, then one sentence says what waits for it. A
    disk with room, and one that cannot be asked, give none."""
    room = RoomWatch(tmp_path)
    assert room.sentence() == ""
    assert RoomWatch(tmp_path / "gone").sentence() == ""
    monkeypatch.setattr(Path, "open", on_full_disk)
    assert f"the disk of {tmp_path} is full: the controller waits for room" in room.sentence()
    assert room.sentence() == ""


def test_run_directory_on_a_full_disk_is_refused(
    settings: JobSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the disk of the run directory has no room at the start, then one sentence says so."""
    monkeypatch.setattr(Path, "open", on_full_disk)
    sentence = f"the disk of {settings.run_dir} is full: make room, or choose another --run-dir"
    with pytest.raises(UsageError, match=sentence), run_dir_of(settings, node=0):
        pass


@pytest.mark.parametrize(
    ("call", "number", "cause"),
    [
        ("open", errno.ENOSPC, "the disk of {} has no inode left for another file"),
        ("open", errno.EDQUOT, "a quota on the disk of {} is used up"),
        ("write", errno.EDQUOT, "a quota on the disk of {} is used up"),
        ("write", errno.ENOSPC, "the disk of {} is full"),
    ],
)
def test_other_lack_of_room_is_told_with_its_cause(
    call: str, number: int, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the disk has room, but a quota or the inodes are used up, then the sentence about what waits
    says so, and nothing is left in the run directory."""

    class Refusing(io.FileIO):
        def write(self, content: object) -> int:
            raise OSError(number, os.strerror(number))

    def refuse(path: Path, *how: object, **more: object) -> io.BufferedWriter:
        if call == "open":
            raise OSError(number, os.strerror(number))
        return io.BufferedWriter(Refusing(path, "w"))

    monkeypatch.setattr(Path, "open", refuse)
    expected = f"{cause.format(tmp_path)}: the controller waits for room"
    assert RoomWatch(tmp_path).sentence().startswith(expected)
    assert list(tmp_path.iterdir()) == []
