"""Read and write MindSpore's `group_info.pb`."""

import sys
from pathlib import Path

import pytest
from tft_mindspore import group_info
from tft_mindspore.group_info import GroupInfo, read_group_info, write_group_info

from tft.errors import UsageError

WRITTEN = (
    b"\n\x1d\n\x152-5004544844489628105\x12\x04\x08\x00\x08\x04"
    b"\n\x10\n\x04tp-0\x12\x08\x08\x00\x08\x01\x08\x02\x08\x03\x12\x04\x08\x00\x08\x04"
)
"""What MindSpore 2.10 writes for the groups below."""
INFO = GroupInfo(replicas=(0, 4), groups={"2-5004544844489628105": (0, 4), "tp-0": (0, 1, 2, 3)})


def test_a_file_of_mindspore_is_read(tmp_path: Path) -> None:
    """When MindSpore has written a file, then tft reads its groups and the ranks that hold the same
    state."""
    file = tmp_path / "group_info.pb"
    file.write_bytes(WRITTEN)
    assert read_group_info(file) == INFO


def test_a_written_file_has_the_same_bytes_as_mindspores(tmp_path: Path) -> None:
    """When tft writes a file, then it has the same bytes as MindSpore's file."""
    file = tmp_path / "rank_0" / "group_info.pb"
    write_group_info(file, INFO)
    assert file.read_bytes() == WRITTEN
    alone = GroupInfo(replicas=(2**32 - 1,), groups={"of none": ()})
    write_group_info(file, alone)
    assert read_group_info(file) == alone


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (WRITTEN[:-1], "is not a group_info.pb of MindSpore, or damaged"),
        (WRITTEN[:49], "is not a group_info.pb of MindSpore, or damaged"),
        (b"rank_list: [0, 4]", "is not a group_info.pb of MindSpore, or damaged"),
        (b"\x12\x00", "lists [] as the ranks that hold the same"),
        (b"\x12\x04\x08\x04\x08\x04", "lists [4, 4] as the ranks that hold the same"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    """When a file is damaged or of another format, then the error says so."""
    file = tmp_path / "group_info.pb"
    file.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_group_info(file)
    assert str(refused.value).startswith(f"{file} {why}")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """When the file does not exist, then the error says so."""
    with pytest.raises(UsageError, match=r"group_info\.pb cannot be read: No such file"):
        read_group_info(tmp_path / "group_info.pb")


def test_missing_protobuf_is_reported_with_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When protobuf cannot be imported, then the error names the package to install."""
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    group_info._messages.cache_clear()
    with pytest.raises(UsageError, match=r"pip install 'tft-bus\[protobuf\]'"):
        read_group_info(tmp_path / "group_info.pb")
