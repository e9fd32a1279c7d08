"""
`tft checkpoint recover` on what lies on a disk.
"""

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
    What a rank has in its file: that of its replica, R + 4, but for something of its own.
    """
    parameter = bytes([rank % 4, step, *range(100)]) + bytes([rank])
    return b"\x0a" + bytes([len(parameter)]) + parameter


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """
    The last checkpoints of eight ranks, as MindSpore Transformers has them, and the group_info.pb of
    rank 0. Rank 0's is lost.
    """
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
    All that there is.
    """
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def refused(job: Path, lost: int = 0, *, info: str = "group_info.pb") -> str:
    """
    Why it is refused; nothing has changed then.
    """
    before = files(job)
    with pytest.raises((UsageError, CheckpointCorrupt)) as why:
        recover(job, job / info, lost, replace=False)
    assert files(job) == before
    return str(why.value).replace(f"{job}/", "").replace(str(job), "DIR")


def test_a_lost_checkpoint_is_that_of_its_replica(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    When the checkpoint of rank 0 is lost, then it gets that of rank 4, under its own name, and its
    meta.json says so.
    """
    assert recover(job, job / "group_info.pb", 0, replace=False) == 0
    place = job / "rank_0"
    assert sorted(os.listdir(place)) == ["llama2_13b_rank_0-5_1.ckpt", "meta.json"]
    assert (place / "llama2_13b_rank_0-5_1.ckpt").read_bytes() == content(4)
    assert read_meta(place) == Name(prefix="llama2_13b", rank=0, epoch=5, step=1)
    said = capsys.readouterr().out
    assert said.startswith(
        f"{place}/llama2_13b_rank_0-5_1.ckpt: that of rank 4, which held the same as rank 0; "
        f"{len(content(4))} bytes with digest "
    )


def test_a_file_that_names_no_rank_keeps_its_name(tmp_path: Path) -> None:
    """
    When MindSpore itself has named the files, in either layout, then the newest is copied as it is
    called, and there is no meta.json.
    """
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
def test_the_lost_rank_gets_its_group_info(
    of_replica: str, of_lost: str, left: bytes | None, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    When the file of a replica is given, then the lost rank gets its own where it stood, if that is gone or
    damaged: the same ranks hold the same, and of the groups those that it communicates in.
    """
    info, own = job / "infos" / of_replica, job / "infos" / of_lost
    write_group_info(info, GroupInfo(replicas=(0, 4), groups=GROUPS))
    if left is not None:
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_bytes(left)
    assert recover(job, info, 0, replace=False) == 0
    groups = {name: GROUPS[name] for name in ("world", "pair")}
    assert read_group_info(own) == GroupInfo(replicas=(0, 4), groups=groups)
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [f"{own}: that of rank 0, made of {info}"]


def test_a_whole_group_info_is_not_replaced(job: Path) -> None:
    """
    When the lost rank has a whole file, then it keeps that, also where its checkpoint is to be replaced.
    """
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
def test_no_group_info_is_written_where_the_path_names_no_replica(given: str, job: Path) -> None:
    """
    When the path of the file has no rank in it, or that of the lost one, then there is no other to write.
    """
    info = job / "infos" / given
    write_group_info(info, GroupInfo(replicas=(0, 4)))
    recover(job, info, 0, replace=False)
    assert [path for path in job.rglob("*.pb") if path.parent != job] == [info]


def test_a_group_info_that_cannot_be_written_is_told(job: Path) -> None:
    """
    When the place of the file cannot be made, then the checkpoint is there, and it is said what is not.
    """
    info = job / "infos" / "rank_4" / "group_info.pb"
    write_group_info(info, GroupInfo(replicas=(0, 4)))
    (job / "infos" / "rank_0").write_text("a file")
    with pytest.raises(UsageError, match=r"infos/rank_0/group_info\.pb cannot be written: "):
        recover(job, info, 0, replace=False)
    assert (job / "rank_0" / "llama2_13b_rank_0-5_1.ckpt").read_bytes() == content(4)


def test_a_damaged_one_of_its_own_is_replaced(job: Path) -> None:
    """
    When the rank has a file that is cut off, then that counts as lost.
    """
    place = job / "rank_0" / "llama2_13b_rank_0-5_1.ckpt"
    place.parent.mkdir()
    for left in (b"", content(0)[:-1]):
        place.write_bytes(left)
        recover(job, job / "group_info.pb", 0, replace=False)
        assert place.read_bytes() == content(4)


def test_a_rank_that_is_not_lost_is_refused_unless_asked(job: Path) -> None:
    """
    When the rank has a whole file of that step, then it keeps it, unless it is asked otherwise.
    """
    assert refused(job, lost=4) == (
        "DIR has no directory of rank 0, which held the same as rank 4; expected is rank_0 or "
        "ckpt_dir0"
    )
    place = job / "rank_0" / "llama2_13b_rank_0-5_1.ckpt"
    place.parent.mkdir()
    place.write_bytes(content(0))
    assert refused(job) == (
        "rank 0 is not lost: rank_0/llama2_13b_rank_0-5_1.ckpt is whole; --replace takes another's "
        "all the same"
    )
    recover(job, job / "group_info.pb", 0, replace=True)
    assert place.read_bytes() == content(4)


def test_a_newer_one_of_its_own_is_not_gone_behind(job: Path) -> None:
    """
    When the rank has a whole file of a later step than its replica, then it is not lost either; when
    that is damaged, it is.
    """
    newer = job / "rank_0" / "llama2_13b_rank_0-6_1.ckpt"
    newer.parent.mkdir()
    newer.write_bytes(content(0))
    assert refused(job).startswith("rank 0 is not lost: rank_0/llama2_13b_rank_0-6_1.ckpt is whole")
    newer.write_bytes(b"")
    recover(job, job / "group_info.pb", 0, replace=False)
    assert (newer.parent / "llama2_13b_rank_0-5_1.ckpt").read_bytes() == content(4)


def test_an_older_one_of_its_own_is_kept_beside(job: Path) -> None:
    """
    When the rank has a file of an earlier step, then it gets the newest beside it.
    """
    older = job / "rank_0" / "llama2_13b_rank_0-4_1.ckpt"
    older.parent.mkdir()
    older.write_bytes(content(0))
    recover(job, job / "group_info.pb", 0, replace=False)
    assert older.read_bytes() == content(0)
    assert (older.parent / "llama2_13b_rank_0-5_1.ckpt").read_bytes() == content(4)


@pytest.mark.parametrize("damage", [b"", content(4)[:-1], b"PK\x03\x04"])
def test_a_damaged_replica_is_refused(job: Path, damage: bytes) -> None:
    """
    When the only one that held the same has a damaged file, then an older one is not taken for it.
    """
    place = job / "rank_4"
    (place / "llama2_13b_rank_4-4_1.ckpt").write_bytes(content(4))
    (place / "llama2_13b_rank_4-5_1.ckpt").write_bytes(damage)
    assert refused(job).startswith(
        "rank 0 cannot be given the newest: rank_4/llama2_13b_rank_4-5_1.ckpt "
    )


def test_another_replica_is_taken_where_one_is_damaged(job: Path) -> None:
    """
    When several have held the same, then it is the first whose newest is whole.
    """
    write_group_info(job / "group_info.pb", GroupInfo(replicas=(0, 2, 4, 6)))
    (job / "rank_2" / "llama2_13b_rank_2-5_1.ckpt").write_bytes(b"")
    recover(job, job / "group_info.pb", 0, replace=False)
    assert (job / "rank_0" / "llama2_13b_rank_0-5_1.ckpt").read_bytes() == content(4)


def test_one_that_is_behind_is_not_taken(job: Path) -> None:
    """
    When a replica has only an earlier step, then another's is taken.
    """
    write_group_info(job / "group_info.pb", GroupInfo(replicas=(0, 2, 4)))
    place = job / "rank_2"
    (place / "llama2_13b_rank_2-5_1.ckpt").rename(place / "llama2_13b_rank_2_1-4_1.ckpt")
    write_meta(place, Name(prefix="llama2_13b", rank=2, again=1, epoch=4, step=1))
    recover(job, job / "group_info.pb", 0, replace=False)
    assert (job / "rank_0" / "llama2_13b_rank_0-5_1.ckpt").read_bytes() == content(4)


def test_what_a_later_run_has_written_is_newer(tmp_path: Path) -> None:
    """
    When MindSpore itself has named the files, whose epochs begin anew in each run, then a file of the
    later run is newer than one of more epochs.
    """
    for rank, name in ((2, "checkpoint-9_5.ckpt"), (4, "checkpoint_1-1_5.ckpt")):
        (tmp_path / f"rank_{rank}").mkdir()
        (tmp_path / f"rank_{rank}" / name).write_bytes(content(rank))
    info = tmp_path / "group_info.pb"
    write_group_info(info, GroupInfo(replicas=(0, 2, 4)))
    recover(tmp_path, info, 0, replace=False)
    assert files(tmp_path / "rank_0") == {"checkpoint_1-1_5.ckpt": content(4)}


def test_where_nothing_is_left_it_is_refused(job: Path) -> None:
    """
    When nobody else has held the same, or has a file of it, then it is said that nothing is left.
    """
    (job / "rank_4" / "llama2_13b_rank_4-5_1.ckpt").unlink()
    assert refused(job) == (
        "DIR has no checkpoint of rank 4, which held the same as rank 0: nothing is left of it"
    )
    write_group_info(job / "group_info.pb", GroupInfo(replicas=(0,)))
    assert refused(job) == "group_info.pb says that nobody held the same as rank 0"


def test_a_rank_that_the_file_does_not_know_is_refused(job: Path) -> None:
    """
    When the file was written for other ranks, then it is said which one is expected.
    """
    assert refused(job, lost=3) == (
        "group_info.pb speaks of ranks [0, 4], which held the same, and not of rank 3; expected is "
        "the file that was written for rank 3, or for one that held the same"
    )


def test_two_layouts_are_refused(job: Path) -> None:
    """
    When there are directories of both layouts, then it is not guessed which is meant.
    """
    (job / "ckpt_dir4").mkdir()
    assert refused(job) == (
        "DIR has two directories each for rank 4, which held the same as rank 0: as rank_R and as "
        "ckpt_dirR"
    )


def test_a_wrong_file_is_refused(job: Path) -> None:
    """
    When there is no group_info.pb, or it is something else, then that is said.
    """
    assert refused(job, info="none.pb") == "none.pb cannot be read: No such file or directory"
    assert refused(job, info="rank_4/meta.json").startswith(
        "rank_4/meta.json is no group_info.pb of MindSpore, or damaged"
    )


def test_a_directory_that_cannot_be_written_is_refused(job: Path) -> None:
    """
    When the place of the file cannot be made, then that is said.
    """
    (job / "rank_0").write_bytes(b"a file")
    assert refused(job).startswith("rank_0/llama2_13b_rank_0-5_1.ckpt cannot be written: ")


def test_a_copy_that_is_another_is_not_put_in_its_place(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    When what was written is not what was read, then the rank has no file, and is told both digests.
    """
    monkeypatch.setattr(shutil, "copyfile", lambda source, draft: draft.write_bytes(content(5)))
    with pytest.raises(
        CheckpointCorrupt, match=r"rank_0-5_1\.ckpt is not what .*rank_4-5_1\.ckpt was"
    ):
        recover(job, job / "group_info.pb", 0, replace=False)
    assert os.listdir(job / "rank_0") == []


def tft(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """
    The installed command.
    """
    return subprocess.run(
        [sys.executable, "-m", "tft", "checkpoint", "recover", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_recovers_and_refuses(job: Path) -> None:
    """
    When the command is called, then it exits 0 and says what it did, or 2 with a sentence.
    """
    arguments = ("--group-info", job / "group_info.pb", "--lost", "0", job)
    done = tft(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "that of rank 4" in done.stdout
    again = tft(*arguments)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith("tft: rank 0 is not lost: ")
    assert again.stderr.count("\n") == 1
    assert tft(*arguments, "--replace").returncode == 0
