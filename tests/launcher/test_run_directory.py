"""
The run directory: who may use it, and what the launcher leaves in it.
"""

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
    check_no_launcher,
    check_run_dir,
    checkpoint_store_there,
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
    A job whose run directory is not made yet.
    """
    return JobSettings(job="j", run_dir=tmp_path / "run", broker="127.0.0.1:29400")


def test_a_controller_by_hand_is_refused_where_a_launcher_lives(settings: JobSettings) -> None:
    """
    When somebody starts `tft controller` in the directory of a living `tft run`, then it is refused
    before anything is written: the file by which the job is found would name another broker.
    """
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


def test_the_launcher_is_found_by_its_pid_file(settings: JobSettings) -> None:
    """
    When a run begins, then its directory is made and says which process looks after it.
    """
    with run_dir_of(settings, node=0):
        assert (settings.run_dir / "pids" / "run.pid").read_text() == f"{os.getpid()}\n"
        assert (settings.run_dir / "logs").is_dir()


def test_two_launchers_do_not_share_a_run_directory(settings: JobSettings) -> None:
    """
    When a run is under way, then another in its directory is refused, before and at its start.
    """
    with run_dir_of(settings, node=0):
        with pytest.raises(UsageError, match=f"in use by another `tft run` .process {os.getpid()}"):
            check_run_dir(settings, node=0)
        with pytest.raises(UsageError, match="in use"), run_dir_of(settings, node=0):
            pass


def test_the_launchers_of_two_nodes_share_a_run_directory(settings: JobSettings) -> None:
    """
    When node 0 of a job is under way, then node 1 of it may use the same directory.
    """
    with run_dir_of(settings, node=0):
        check_run_dir(settings, node=1)
        with run_dir_of(settings, node=1):
            assert (settings.run_dir / "pids" / "run-1.pid").exists()


def test_a_run_directory_is_free_again_after_its_run(settings: JobSettings) -> None:
    """
    When a run is over, then its pid file does not keep the next one away.
    """
    with run_dir_of(settings, node=0):
        pass

    check_run_dir(settings, node=0)


def test_a_run_lives_as_long_as_a_node_that_was_there_before_its_last_word(
    settings: JobSettings,
) -> None:
    """
    When a story is told and a launcher of a node that had begun before its end lives, then the run is there to be led
    again; not when the nodes have ended, came after the story, or the job is over.
    """
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


def test_a_run_that_is_led_again_is_not_looked_at_for_checkpoints(settings: JobSettings) -> None:
    """
    When the nodes of a run train while it is led from here again, then what they write into its directory stays,
    finished or not.
    """
    writing = settings.checkpoints / "step-00000008.round-1.1.partial"
    with run_dir_of(settings, node=-1):
        writing.mkdir(parents=True)
    assert not writing.exists()
    writing.mkdir(parents=True)
    settings.run_dir.joinpath("story.jsonl").touch()
    check_run_dir(settings, node=-1, goes_on=True)
    with run_dir_of(settings, node=-1, goes_on=True):
        assert writing.exists()


def test_a_run_that_may_begin_needs_no_checkpoint(settings: JobSettings) -> None:
    """
    When an earlier run left no checkpoint, then one that must resume is refused, and one that may begin
    is not, unless the earlier one has completed.
    """
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


def test_an_earlier_story_is_not_written_over(settings: JobSettings) -> None:
    """
    When the directory holds a story, then a new run in it is refused with a way out.
    """
    settings.run_dir.mkdir()
    (settings.run_dir / "story.jsonl").touch()

    with pytest.raises(UsageError, match="add --resume to continue it"):
        check_run_dir(settings, node=0)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"nproc_per_node": 4}, "is of a job of 2 ranks and cannot be resumed with 4"),
        ({"adaptor": "fake"}, "written by the adaptor 'pytorch' and cannot be resumed with 'fake'"),
    ],
)
def test_another_job_cannot_resume_a_checkpoint(
    settings: JobSettings, other: dict[str, Any], sentence: str
) -> None:
    """
    When the world size or the adaptor is not the checkpoint's, then both are in the sentence.
    """
    saved(settings)
    again = replace(settings, nproc_per_node=2, resume=True)

    check_run_dir(again, node=0)
    with pytest.raises(UsageError, match=sentence):
        check_run_dir(replace(again, **other), node=0)


def test_a_damaged_checkpoint_is_refused(settings: JobSettings) -> None:
    """
    When a byte of a checkpoint has changed, then the file, the digest it should have and the one
    it has are named.
    """
    file = saved(settings) / "private-rank0.bin"
    expected = checkpoint.digest_file(file.parent, file.name).digest
    file.write_bytes(b"positiom")
    found = checkpoint.digest_file(file.parent, file.name).digest

    with pytest.raises(CheckpointCorrupt, match=rf"{file.name}.*{expected}.*{found}"):
        check_run_dir(replace(settings, nproc_per_node=2, resume=True), node=0)


def test_a_run_begins_among_no_checkpoints_of_another(settings: JobSettings) -> None:
    """
    When there are checkpoints already under the name that a run is to use, then it is refused with a
    way out: it would set them aside as it goes on from the beginning. Under another name it is not.
    """
    own = replace(settings, checkpoint_dir=settings.run_dir.parent / "kept", nproc_per_node=2)
    saved(own)

    with pytest.raises(UsageError, match="is a checkpoint of an earlier run: add --resume"):
        check_run_dir(own, node=0)
    check_run_dir(replace(own, resume=True), node=0)
    check_run_dir(replace(own, checkpoint_name="second-{step}"), node=0)


def test_the_checkpoints_of_a_run_are_found_where_it_was_told_to_put_them(
    settings: JobSettings,
) -> None:
    """
    When a run was given a directory and a name for its checkpoints, then its run directory says so; one
    without a run has them where they are by default.
    """
    own = replace(
        settings, checkpoint_dir=settings.run_dir.parent / "kept", checkpoint_name="{step}"
    )
    assert checkpoint_store_there(settings.run_dir) == checkpoint_store_of(settings)
    settings.run_dir.mkdir()
    write_job(own, ["train.py"])
    assert checkpoint_store_there(settings.run_dir) == checkpoint_store_of(own)


def test_a_file_is_no_directory_for_checkpoints(settings: JobSettings) -> None:
    """
    When checkpoints are to be kept where a file is, then that is the sentence.
    """
    file = settings.run_dir.parent / "kept"
    file.touch()

    with pytest.raises(UsageError, match=r"--checkpoint-dir .*kept is not a directory"):
        check_run_dir(replace(settings, checkpoint_dir=file), node=0)


def test_a_checkpoint_that_was_not_finished_is_none(settings: JobSettings) -> None:
    """
    When all there is was never committed, then there is nothing to resume from.
    """
    final = saved(settings)
    final.rename(checkpoint.partial(final))

    with pytest.raises(UsageError, match="there is no usable checkpoint in"):
        check_run_dir(replace(settings, nproc_per_node=2, resume=True), node=0)


def test_a_checkpoint_that_lacks_a_rank_is_not_what_a_job_goes_on_from_by_itself(
    settings: JobSettings,
) -> None:
    """
    When the newest checkpoint lacks the rank-local state of a rank, then a run that may begin takes an older
    one that has all of it, and is refused where there is none: it must not begin in silence.
    """
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


def test_what_a_job_goes_on_from_by_itself_is_whole(settings: JobSettings) -> None:
    """
    When the newest checkpoint is damaged, then a run that may begin takes an older one that is whole.
    """
    settings = replace(settings, nproc_per_node=2, resume=True)
    older, newest = saved(settings), saved(settings, step=9)
    assert resumable(checkpoint_store_of(settings)) == newest
    (newest / "private-rank0.bin").write_bytes(b"positiom")

    assert resumable(checkpoint_store_of(settings)) == older
    check_run_dir(settings, node=0, may_begin=True)
    with pytest.raises(
        CheckpointCorrupt, match=r"private-rank0\.bin differs from what was written"
    ):
        check_run_dir(settings, node=0)


def saved(settings: JobSettings, *, step: int = 7, ranks: int = 2) -> Path:
    """
    A checkpoint of two ranks of the adaptor `pytorch`, or with the rank-local state of one alone.
    """
    final = checkpoint_store_of(settings).place(step)
    partial = checkpoint.partial(final)
    partial.mkdir(parents=True)
    files = [checkpoint.write_private(partial, rank, b"position") for rank in range(ranks)]
    manifest = checkpoint.manifest(step=step, world=2, adaptor="pytorch", files=files)
    checkpoint.commit(partial, final, manifest)
    return final


def test_a_file_is_no_run_directory(settings: JobSettings) -> None:
    """
    When the run directory is a file, then that is the sentence.
    """
    settings.run_dir.touch()

    with pytest.raises(UsageError, match="is not a directory"):
        check_run_dir(settings, node=0)


def test_what_was_run_is_kept(settings: JobSettings) -> None:
    """
    When a run begins, then its command and settings can be read in its directory.
    """
    settings.run_dir.mkdir()
    write_job(settings, ["train.py", "--steps", "60"])

    kept = json.loads((settings.run_dir / "job.json").read_text())
    assert kept["command"] == ["train.py", "--steps", "60"]
    assert kept["settings"]["job"] == "j"
    assert os.listdir(settings.run_dir) == ["job.json"]


def test_the_report_of_an_earlier_run_is_not_this_ones(settings: JobSettings) -> None:
    """
    When a resumed run has not written its report, then the one that is there is not taken for it.
    """
    settings.run_dir.mkdir()
    written = settings.run_dir / "report.json"
    written.write_text('{"exit_code": 3, "incidents": []}')
    report = FreshReport(settings.run_dir)

    assert report.exit_code() is None
    written.write_text('{"exit_code": 0}')
    assert report.exit_code() == 0


def test_what_is_newer_and_passed_over_is_named(settings: JobSettings) -> None:
    """
    When directories of later steps lie beside the checkpoint that a job goes on from, then each is named with the
    reason why it is not read.
    """
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


def test_the_last_line_of_a_log_is_found_whatever_its_bytes(tmp_path: Path) -> None:
    """
    When a log has bytes that are no text, then its last line is shown all the same: it says why a
    part has ended.
    """
    log = tmp_path / "agent.log"
    log.write_bytes(b"\xff\xfe\nno place for rank 3\n\n")
    assert last_line(log) == "no place for rank 3"
