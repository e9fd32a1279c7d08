"""`tft checkpoint recover` on the files of a lost rank and its replicas."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tft_mindspore.group_info import GroupInfo, read_group_info, write_group_info
from tft_mindspore.rank_files import Name, read_meta, write_meta
from tft_mindspore.recover import recover

from tft.errors import CheckpointCorrupt, UsageError


def content(rank: int, step: int = 0) -> bytes:
    """
    Return the content of a rank's file.

    The content equals that of the rank's replica, R + 4, except for one value.
    """
    parameter = bytes([rank % 4, step, *range(100)]) + bytes([rank])
    return b"\x0a" + bytes([len(parameter)]) + parameter


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Write the last checkpoints of eight ranks in the layout of MindSpore Transformers, and the
    group_info.pb of rank 0. The checkpoint of rank 0 is missing."""
    for rank in range(1, 8):
        name = Name(prefix="llama2_13b", rank=rank, epoch=5, step=1)
        directory = tmp_path / f"rank_{rank}"
        directory.mkdir()
        (directory / str(name)).write_bytes(content(rank))
        write_meta(directory, name)
    write_group_info(tmp_path / "group_info.pb", GroupInfo(replicas=(0, 4)))
    return tmp_path


def files(directory: Path) -> dict[str, bytes]:
    """
    Return the content of every file in a directory, by path.
    """
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def refused(job: Path, lost: int = 0, *, info: str = "group_info.pb") -> str:
    """
    Recover the checkpoint of rank `lost`, check that this is refused and changes no file, and
    return the message.
    """
    before = files(job)
    with pytest.raises((UsageError, CheckpointCorrupt)) as why:
        recover(job, job / info, lost, replace=False)
    assert files(job) == before
    return str(why.value).replace(f"{job}/", "").replace(str(job), "DIR")


def test_a_lost_checkpoint_is_copied_from_its_replica(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the checkpoint of rank 0 is lost, then rank 0 gets the checkpoint of rank 4 under its
    own name, and the `meta.json` of rank 0 names the file."""
    assert recover(job, job / "group_info.pb", 0, replace=False) == 0
    place = job / "rank_0"
    assert sorted(os.listdir(place)) == ["llama2_13b_rank_0-5_1.ckpt", "meta.json"]
    assert (place / "llama2_13b_rank_0-5_1.ckpt").read_bytes() == content(4)
    assert read_meta(place) == Name(prefix="llama2_13b", rank=0, epoch=5, step=1)
    said = capsys.readouterr().out
    assert said.startswith(
        f"{place}/llama2_13b_rank_0-5_1.ckpt: copied from rank 4, which held the same "
        f"state as rank 0; {len(content(4))} bytes with digest "
    )


def test_a_file_name_without_rank_is_kept(tmp_path: Path) -> None:
    """When MindSpore itself named the files, in either layout, then the newest file is copied under
    the same name, without a meta.json."""
    for form in ("rank_{}", "ckpt_dir{}"):
        job = tmp_path / form.format("s")
        for name in ("checkpoint-1_1875.ckpt", "checkpoint-2_1875.ckpt", "checkpoint-graph.meta"):
            path = job / form.format(4) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content(4, step=int("2_" in name)))
        info = job / form.format(4) / "group_info.pb"
        write_group_info(info, GroupInfo(replicas=(0, 4)))
        recover(job, info, 0, replace=False)
        there = files(job / form.format(0))
        assert there.pop("group_info.pb") == info.read_bytes()
        assert there == {"checkpoint-2_1875.ckpt": content(4, step=1)}


GROUPS = {"world": tuple(range(8)), "pair": (0, 4), "of 4": (4, 5, 6, 7)}


@pytest.mark.parametrize(
    ("of_replica", "of_lost"),
    [
        ("rank_4/group_info.pb", "rank_0/group_info.pb"),
        ("ckpt_dir4/group_info.pb", "ckpt_dir0/group_info.pb"),
        ("rank_4/infos/rank_4/group_info.pb", "rank_4/infos/rank_0/group_info.pb"),
        ("infos/group_info_rank_4.pb", "infos/group_info_rank_0.pb"),
    ],
)
@pytest.mark.parametrize("left", [None, b"", b"PK\x03\x04"])
def test_the_lost_rank_gets_a_group_info_file(
    of_replica: str, of_lost: str, left: bytes | None, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the file of a replica is given and the lost rank's own file is missing or damaged, then
    the file is written. It names the same ranks as holders, and the groups of the lost rank."""
    info, own = job / "infos" / of_replica, job / "infos" / of_lost
    write_group_info(info, GroupInfo(replicas=(0, 4), groups=GROUPS))
    if left is not None:
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_bytes(left)
    assert recover(job, info, 0, replace=False) == 0
    groups = {name: GROUPS[name] for name in ("world", "pair")}
    assert read_group_info(own) == GroupInfo(replicas=(0, 4), groups=groups)
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [f"{own}: written for rank 0 from {info}"]


def test_a_whole_group_info_file_is_kept(job: Path) -> None:
    """When the lost rank has a whole group_info.pb, then the file is kept, also when the rank's
    checkpoint is to be replaced."""
    info, own = job / "rank_4" / "group_info.pb", job / "rank_0" / "group_info.pb"
    write_group_info(info, GroupInfo(replicas=(0, 4)))
    write_group_info(own, GroupInfo(replicas=(4, 0), groups={"own": (0,)}))
    before = own.read_bytes()
    for replace in (False, True):
        recover(job, info, 0, replace=replace)
        assert own.read_bytes() == before


@pytest.mark.parametrize(
    "given", ["group_info.pb", "rank_40/group_info.pb", "rank_0/group_info.pb"]
)
def test_no_group_info_is_written_when_the_path_has_no_replica_rank(given: str, job: Path) -> None:
    """When the path of the given file names no rank, another rank than a replica, or the lost rank,
    then no group_info.pb is written."""
    info = job / "infos" / given
    write_group_info(info, GroupInfo(replicas=(0, 4)))
    recover(job, info, 0, replace=False)
    assert [path for path in job.rglob("*.pb") if path.parent != job] == [info]


def test_a_failed_group_info_write_is_reported_beside_the_recovered_checkpoint(job: Path) -> None:
    """When the directory of the group_info.pb cannot be made, then the checkpoint is recovered, and
    the message names the missing file."""
    info = job / "infos" / "rank_4" / "group_info.pb"
    write_group_info(info, GroupInfo(replicas=(0, 4)))
    (job / "infos" / "rank_0").write_text("a file")
    with pytest.raises(UsageError, match=r"infos/rank_0/group_info\.pb cannot be written: "):
        recover(job, info, 0, replace=False)
    assert (job / "rank_0" / "llama2_13b_rank_0-5_1.ckpt").read_bytes() == content(4)


def test_a_truncated_checkpoint_counts_as_lost(job: Path) -> None:
    """When the rank's own file is truncated, then the file counts as lost and is replaced."""
    place = job / "rank_0" / "llama2_13b_rank_0-5_1.ckpt"
    place.parent.mkdir()
    for left in (b"", content(0)[:-1]):
        place.write_bytes(left)
        recover(job, job / "group_info.pb", 0, replace=False)
        assert place.read_bytes() == content(4)


def test_a_whole_checkpoint_is_only_replaced_on_request(job: Path) -> None:
    """When the rank has a whole file of the replica's step, then the command is refused, unless the
    option to replace is given."""
    assert refused(job, lost=4) == (
        "DIR has no directory of rank 0, which held the same state as rank 4; expected is "
        "rank_0 or ckpt_dir0"
    )
    place = job / "rank_0" / "llama2_13b_rank_0-5_1.ckpt"
    place.parent.mkdir()
    place.write_bytes(content(0))
    assert refused(job) == (
        "the checkpoint of rank 0 is not lost: the file rank_0/llama2_13b_rank_0-5_1.ckpt is "
        "complete. Give the option --replace to replace this file anyway"
    )
    recover(job, job / "group_info.pb", 0, replace=True)
    assert place.read_bytes() == content(4)


def test_a_newer_whole_checkpoint_of_the_rank_is_kept(job: Path) -> None:
    """When the rank has a whole file of a later step than its replica, then the command is refused.
    When that file is damaged, the rank counts as lost."""
    newer = job / "rank_0" / "llama2_13b_rank_0-6_1.ckpt"
    newer.parent.mkdir()
    newer.write_bytes(content(0))
    assert refused(job).startswith(
        "the checkpoint of rank 0 is not lost: the file rank_0/llama2_13b_rank_0-6_1.ckpt is "
        "complete"
    )
    newer.write_bytes(b"")
    recover(job, job / "group_info.pb", 0, replace=False)
    assert (newer.parent / "llama2_13b_rank_0-5_1.ckpt").read_bytes() == content(4)


def test_an_older_checkpoint_of_the_rank_is_kept_beside_the_new_one(job: Path) -> None:
    """When the rank has a file of an earlier step, then the newest file of its replica is written
    beside it."""
    older = job / "rank_0" / "llama2_13b_rank_0-4_1.ckpt"
    older.parent.mkdir()
    older.write_bytes(content(0))
    recover(job, job / "group_info.pb", 0, replace=False)
    assert older.read_bytes() == content(0)
    assert (older.parent / "llama2_13b_rank_0-5_1.ckpt").read_bytes() == content(4)


@pytest.mark.parametrize("damage", [b"", content(4)[:-1], b"PK\x03\x04"])
def test_a_damaged_replica_is_refused_and_no_older_file_is_used(job: Path, damage: bytes) -> None:
    """When the only replica's newest file is damaged, then the command is refused, and no older
    file is used instead."""
    place = job / "rank_4"
    (place / "llama2_13b_rank_4-4_1.ckpt").write_bytes(content(4))
    (place / "llama2_13b_rank_4-5_1.ckpt").write_bytes(damage)
    assert refused(job).startswith(
        "rank 0 cannot be given the newest checkpoint: rank_4/llama2_13b_rank_4-5_1.ckpt "
    )


def test_the_next_replica_is_used_when_one_is_damaged(job: Path) -> None:
    """When there are several replicas, then the first one with a whole newest file is used."""
    write_group_info(job / "group_info.pb", GroupInfo(replicas=(0, 2, 4, 6)))
    (job / "rank_2" / "llama2_13b_rank_2-5_1.ckpt").write_bytes(b"")
    recover(job, job / "group_info.pb", 0, replace=False)
    assert (job / "rank_0" / "llama2_13b_rank_0-5_1.ckpt").read_bytes() == content(4)


def test_a_replica_of_an_earlier_step_is_not_used(job: Path) -> None:
    """When a replica has only an earlier step, then another replica is used."""
    write_group_info(job / "group_info.pb", GroupInfo(replicas=(0, 2, 4)))
    place = job / "rank_2"
    (place / "llama2_13b_rank_2-5_1.ckpt").rename(place / "llama2_13b_rank_2_1-4_1.ckpt")
    write_meta(place, Name(prefix="llama2_13b", rank=2, again=1, epoch=4, step=1))
    recover(job, job / "group_info.pb", 0, replace=False)
    assert (job / "rank_0" / "llama2_13b_rank_0-5_1.ckpt").read_bytes() == content(4)


def test_a_file_of_a_later_run_is_newer_than_one_of_more_epochs(tmp_path: Path) -> None:
    """When MindSpore itself named the files, whose epochs begin anew in each run, then a file of
    the later run is newer than one of more epochs."""
    for rank, name in ((2, "checkpoint-9_5.ckpt"), (4, "checkpoint_1-1_5.ckpt")):
        (tmp_path / f"rank_{rank}").mkdir()
        (tmp_path / f"rank_{rank}" / name).write_bytes(content(rank))
    info = tmp_path / "group_info.pb"
    write_group_info(info, GroupInfo(replicas=(0, 2, 4)))
    recover(tmp_path, info, 0, replace=False)
    assert files(tmp_path / "rank_0") == {"checkpoint_1-1_5.ckpt": content(4)}


def test_recovery_without_any_replica_file_is_refused(job: Path) -> None:
    """When the rank has no replica, or no replica has a file, then the command is refused with that
    reason."""
    (job / "rank_4" / "llama2_13b_rank_4-5_1.ckpt").unlink()
    assert refused(job) == (
        "DIR has no checkpoint of rank 4, which held the same state as rank 0: the state of rank 0 "
        "is lost"
    )
    write_group_info(job / "group_info.pb", GroupInfo(replicas=(0,)))
    assert refused(job) == "group_info.pb says that no other rank held the same state as rank 0"


def test_a_rank_outside_the_group_info_is_refused(job: Path) -> None:
    """When the group_info.pb is of other ranks, then the message names the expected rank."""
    assert refused(job, lost=3) == (
        "group_info.pb names the ranks [0, 4] as holders of the same state, and not rank 3; "
        "expected is the file that was written for rank 3, or for a rank that held the same state"
    )


def test_directories_of_both_layouts_are_refused(job: Path) -> None:
    """When there are directories of both layouts, then the command is refused."""
    (job / "ckpt_dir4").mkdir()
    assert refused(job) == (
        "DIR has two directories each for rank 4, which held the same state as rank 0: as rank_R "
        "and as ckpt_dirR"
    )


def test_a_missing_or_foreign_group_info_is_refused(job: Path) -> None:
    """When the group_info.pb is missing or of another format, then the message says so."""
    assert refused(job, info="none.pb") == "none.pb cannot be read: No such file or directory"
    assert refused(job, info="rank_4/meta.json").startswith(
        "rank_4/meta.json is not a group_info.pb of MindSpore, or damaged"
    )


def test_an_unwritable_directory_is_refused(job: Path) -> None:
    """When the directory of the checkpoint cannot be made, then the message says so."""
    (job / "rank_0").write_bytes(b"a file")
    assert refused(job).startswith("rank_0/llama2_13b_rank_0-5_1.ckpt cannot be written: ")


def test_a_copy_with_another_digest_is_discarded(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the digest of the written copy differs from that of the source, then the rank has no
    file, and the message has both digests."""
    monkeypatch.setattr(shutil, "copyfile", lambda source, draft: draft.write_bytes(content(5)))
    with pytest.raises(
        CheckpointCorrupt, match=r"rank_0-5_1\.ckpt differs from .*rank_4-5_1\.ckpt"
    ):
        recover(job, job / "group_info.pb", 0, replace=False)
    assert os.listdir(job / "rank_0") == []


def tft(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the installed command."""
    return subprocess.run(
        [sys.executable, "-m", "tft", "checkpoint", "recover", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_exits_0_on_recovery_and_2_on_refusal(job: Path) -> None:
    """When the command recovers a checkpoint, then it exits 0 and reports the copy. When it
    refuses, it exits 2 with a message."""
    arguments = ("--group-info", job / "group_info.pb", "--lost", "0", job)
    done = tft(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "copied from rank 4" in done.stdout
    again = tft(*arguments)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith("tft: the checkpoint of rank 0 is not lost: ")
    assert again.stderr.count("\n") == 1
    assert tft(*arguments, "--replace").returncode == 0
