"""
Files that are written as a whole.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tft.files import read_object, write_pid, write_whole


def test_file_is_replaced_and_no_draft_is_left(tmp_path: Path) -> None:
    """When a file exists, then its content is replaced, and nothing else is in its directory."""
    path = tmp_path / "file"
    path.write_text("old")
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_draft_of_a_file_for_which_there_is_no_room_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the disk is full in the middle of a file, then the old content stays and nothing else."""

    def cut_off(path: Path, text: str) -> int:
        path.write_bytes(text[:2].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(Path, "write_text", cut_off)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_target_of_a_link_is_replaced(tmp_path: Path) -> None:
    """When the path is a symbolic link, then it stays one, and its target has the new content."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_pipe_is_written_to(tmp_path: Path) -> None:
    """When the path is a pipe, then its reader gets the text, and the pipe stays one."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(path, "text")
    assert os.read(reader, 100) == b"text"
    assert path.is_fifo()
    os.close(reader)


def test_standard_output_is_written_to(tmp_path: Path) -> None:
    """When the path is /dev/stdout, and the output goes to a file, then the text follows what is
    there already."""
    program = (
        "import pathlib, tft.files\n"
        "print('before', flush=True)\n"
        "tft.files.write_whole(pathlib.Path('/dev/stdout'), 'text')\n"
    )
    with (tmp_path / "output").open("w") as output:
        subprocess.run([sys.executable, "-c", program], stdout=output, check=True)
    assert (tmp_path / "output").read_text() == "before\ntext"
    assert Path("/dev/stdout").is_symlink()


def test_file_in_shared_memory_is_replaced() -> None:
    """When a file is in /dev/shm, then it is replaced as in every other directory."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        path = Path(directory, "job.json")
        write_whole(path, '{"a": 1}')
        write_whole(path, '{"a": 2}')
        assert path.read_text() == '{"a": 2}'


def test_pid_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """When there is no place for a pid file, then a sentence says so, and nothing is raised. Where
    there is one, the file has the pid as a line."""
    why = write_pid(tmp_path, "rank-2", 4711)
    assert why == f"cannot write {tmp_path / 'pids' / 'rank-2.pid'}: No such file or directory"
    (tmp_path / "pids").mkdir()
    assert write_pid(tmp_path, "rank-2", 4711) is None
    assert (tmp_path / "pids" / "rank-2.pid").read_text() == "4711\n"


@pytest.mark.parametrize("content", [None, "", "[1]", '{"result"'])
def test_a_file_without_a_json_object_is_like_none(tmp_path: Path, content: str | None) -> None:
    """When a file is missing, is empty or has no JSON object, then it is read as an empty object: a
    machine may have failed while the file was written."""
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    assert read_object(path) == {}
    path.write_text('{"result": "dumped"}')
    assert read_object(path) == {"result": "dumped"}
