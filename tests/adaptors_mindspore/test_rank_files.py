"""The checkpoint files of each rank: their names, the check that a file is whole, and the atomic
write."""

import json
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tft_mindspore import rank_files
from tft_mindspore.rank_files import (
    Name,
    damage,
    names,
    newest,
    put,
    read_meta,
    read_name,
    write_meta,
)


def ckpt(*sizes: int, checksum: bool = False) -> bytes:
    """Return a .ckpt with parameters of these sizes, each in its frame."""
    content = b""
    for size in sizes:
        length, left = b"", size
        while left >= 0x80:
            length += bytes([left & 0x7F | 0x80])
            left >>= 7
        content += b"\x0a" + length + bytes([left]) + bytes(range(256)) * (size // 256)
        content += b"\xff" * (size % 256)
    return content + (b"crc_num" + zlib.crc32(content).to_bytes(10) if checksum else b"")


def safetensors(size: int) -> bytes:
    """Return a .safetensors with one tensor."""
    header = json.dumps(
        {
            "__metadata__": {"format": "ms"},
            "w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        }
    ).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


# ---------------------------------------------------------------- names of checkpoint files


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "llama2_13b_rank_2-5_1.ckpt",
            Name(prefix="llama2_13b", rank=2, epoch=5, step=1),
        ),
        (
            "llama2_13b_rank_2_1-7_1.safetensors",
            Name(prefix="llama2_13b", rank=2, again=1, epoch=7, step=1, kind="safetensors"),
        ),
        ("checkpoint-2_1875.ckpt", Name(prefix="checkpoint", epoch=2, step=1875)),
        ("a_rank_3_rank_5-0_0.ckpt", Name(prefix="a_rank_3", rank=5, epoch=0, step=0)),
    ],
)
def test_documented_file_names_are_parsed(text: str, name: Name) -> None:
    """When a file has a documented name, then its parts are parsed."""
    assert read_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    ["meta.json", "checkpoint-graph.meta", "a-1_2.ckpt.tmp", "a-01_2.ckpt", "x.ckpt", "-1_2.ckpt"],
)
def test_other_file_names_are_not_parsed(text: str) -> None:
    """When a file name does not have a documented form, then the parser returns no name."""
    assert read_name(text) is None


@given(
    prefix=st.text("ab_", min_size=1, max_size=8) | st.just("x_rank_1"),
    rank=st.none() | st.integers(0, 99),
    again=st.integers(0, 12),
    epoch=st.integers(0, 999),
    step=st.integers(0, 999),
)
def test_a_file_name_is_unchanged_by_parsing_and_formatting(
    prefix: str, rank: int | None, again: int, epoch: int, step: int
) -> None:
    """When a name is formatted and parsed, then its text is the same. A name that is changed to
    another rank and back is also the same."""
    name = Name(prefix=prefix, rank=rank, again=again, epoch=epoch, step=step)
    read = read_name(str(name))
    assert read is not None
    assert str(read) == str(name)
    if rank is not None:
        assert read == name
        assert name.of(rank + 1).rank == rank + 1
        assert name.of(rank + 1).of(rank) == name


def test_the_newest_file_is_from_meta_json_or_else_of_the_latest_run(tmp_path: Path) -> None:
    """When `meta.json` names an existing file, then that file is the newest; otherwise the latest
    file of the latest run is. Files with another rank's name are ignored."""
    for text in (
        "a_rank_2-9_1.ckpt",
        "a_rank_2_1-5_1.ckpt",
        "a_rank_2_1-6_1.ckpt",
        "a_rank_3_4-9_9.ckpt",
        ".a_rank_2-10_1.ckpt.partial",
    ):
        (tmp_path / text).write_bytes(b"x")
    (tmp_path / "b-1_1.ckpt").mkdir()
    assert len(list(names(tmp_path, 2))) == 3
    assert str(newest(tmp_path, 2)) == "a_rank_2_1-6_1.ckpt"
    noted = Name(prefix="a", rank=2, again=1, epoch=5, step=1)
    write_meta(tmp_path, noted)
    assert json.loads((tmp_path / "meta.json").read_text()) == {
        "last_epoch": 5,
        "last_step": 1,
        "last_ckpt_file": "a_rank_2_1-5_1.ckpt",
    }
    assert newest(tmp_path, 2) == noted
    (tmp_path / str(noted)).unlink()
    assert str(newest(tmp_path, 2)) == "a_rank_2_1-6_1.ckpt"
    assert newest(tmp_path / "none", 2) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"last_epoch": 5, "last_step": 1}',
        '{"last_epoch": 5, "last_step": 1, "last_ckpt_file": 7}',
        '{"last_epoch": 5, "last_step": 1, "last_ckpt_file": "x"}',
        '{"last_epoch": 5, "last_step": 2, "last_ckpt_file": "a_rank_2-5_1.ckpt"}',
        '{"last_epoch": 5, "last_step": 1, "last_ckpt_file": "../a_rank_2-5_1.ckpt/x"}',
    ],
)
def test_an_invalid_meta_json_is_ignored(tmp_path: Path, content: str) -> None:
    """When `meta.json` is truncated or has another content, then it is ignored."""
    (tmp_path / "meta.json").write_text(content)
    assert read_meta(tmp_path) is None


# ---------------------------------------------------------------- writing checkpoint files


def test_a_file_is_written_atomically(tmp_path: Path) -> None:
    """When a file is written, then it is written under its own name in a temporary directory and
    moved to its place. Leftovers of an earlier attempt are removed, and no temporary directory
    remains."""
    place = tmp_path / "rank_0" / "a_rank_0-1_1.ckpt"
    left = place.parent / f".{place.name}.partial"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")

    def write(draft: Path) -> None:
        assert draft.name == place.name
        assert not place.exists()
        draft.write_bytes(b"all of it")
        draft.chmod(0o400)  # MindSpore leaves its files read-only

    put(place, write)
    assert place.read_bytes() == b"all of it"
    put(place, lambda draft: draft.write_bytes(b"again"))
    assert place.read_bytes() == b"again"
    assert os.listdir(place.parent) == [place.name]


def test_a_file_is_synced_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a file is written, then the file is synced before the rename, and its directory after
    the rename. The parent of a new directory is also synced."""
    place = tmp_path / "rank_0" / "a-1_1.ckpt"
    synced: list[tuple[str, bool]] = []

    def sync(path: Path) -> None:
        synced.append((path.name, place.exists()))

    monkeypatch.setattr(rank_files, "sync", sync)
    put(place, lambda draft: draft.write_bytes(b"x"))
    assert synced == [(place.name, False), ("rank_0", True), (tmp_path.name, True)]
    put(place, lambda draft: draft.write_bytes(b"y"))
    assert [name for name, _ in synced[3:]] == [place.name, "rank_0"]


def test_a_failed_write_keeps_the_earlier_file(tmp_path: Path) -> None:
    """When writing fails, or creates no file, then the earlier file is unchanged and no temporary
    file remains."""
    place = tmp_path / "a-1_1.ckpt"
    place.write_bytes(b"before")

    def fail(draft: Path) -> None:
        draft.write_bytes(b"half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        put(place, fail)
    with pytest.raises(FileNotFoundError):
        put(place, lambda draft: None)
    assert place.read_bytes() == b"before"
    assert os.listdir(tmp_path) == [place.name]


# ---------------------------------------------------------------- checks that a file is whole


@pytest.mark.parametrize(
    "content",
    [ckpt(3), ckpt(200, 0, 40000), ckpt(5, 300, checksum=True)],
    ids=["one", "several", "with a checksum"],
)
def test_a_ckpt_truncated_within_a_parameter_is_detected(tmp_path: Path, content: bytes) -> None:
    """When a .ckpt ends anywhere but between two parameters, then it is not whole."""
    path = tmp_path / "a-1_1.ckpt"
    path.write_bytes(content)
    assert damage(path, thoroughly=True) == ""
    between = set()
    at = 0
    while at < len(content) and content[at] == 0x0A:
        width = next(n for n in range(1, 11) if content[at + n] < 0x80)
        size = sum((content[at + n] & 0x7F) << 7 * (n - 1) for n in range(1, width + 1))
        at += 1 + width + size
        between.add(at)
    for end in [*range(min(len(content), 700)), len(content) - 1]:
        path.write_bytes(content[:end])
        assert (damage(path, thoroughly=True) == "") == (end in between)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"\x0a", "is not a checkpoint of MindSpore, or damaged, or encrypted: see byte 0"),
        (ckpt(4) + b"PK", "is not a checkpoint of MindSpore, or damaged, or encrypted: see byte 6"),
        (ckpt(4)[:-1], "ends in the middle of a parameter, 1 bytes before its end"),
        (b"\x0a" + b"\xff" * 20, "is not a checkpoint of MindSpore, or damaged, or encrypted"),
        (b"crc_num" + bytes(10), "has no parameter"),
    ],
)
def test_the_defect_of_a_ckpt_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    """When MindSpore has not written the file to its end, then the message names the defect."""
    path = tmp_path / "a-1_1.ckpt"
    path.write_bytes(content)
    assert damage(path).startswith(f"{path} {why}")


def test_a_changed_byte_is_detected_by_the_checksum_in_a_full_read(tmp_path: Path) -> None:
    """When a byte of a file with a checksum has changed, then a full read detects it."""
    path = tmp_path / "a-1_1.ckpt"
    content = bytearray(ckpt(300, checksum=True))
    content[100] ^= 1
    path.write_bytes(content)
    assert damage(path) == ""
    assert damage(path, thoroughly=True) == (
        f"{path} differs from what was written: its checksum is another"
    )


def test_a_truncated_safetensors_is_detected(tmp_path: Path) -> None:
    """When a .safetensors does not end at the end of its last tensor, then it is not whole."""
    path = tmp_path / "a-1_1.safetensors"
    content = safetensors(50)
    path.write_bytes(content)
    assert damage(path, thoroughly=True) == ""
    for end in range(len(content)):
        path.write_bytes(content[:end])
        assert damage(path)
    path.write_bytes(content + b"x")
    assert "where its header says" in damage(path)
    path.write_bytes((2).to_bytes(8, "little") + b"[]")
    assert "has a header that cannot be read" in damage(path)


def test_an_unreadable_file_is_not_whole(tmp_path: Path) -> None:
    """When a file cannot be read, then the message names that defect."""
    path = tmp_path / "a-1_1.ckpt"
    assert damage(path) == f"{path} cannot be read: No such file or directory"
