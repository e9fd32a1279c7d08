"""
`tft checkpoint verify` on what lies on a disk.
"""

from pathlib import Path

import pytest

from tft import checkpoint
from tft.cli.checkpoints import verify
from tft.errors import CheckpointCorrupt, UsageError


def saved(run_dir: Path, step: int, content: bytes = b"weights") -> Path:
    """
    A checkpoint of two ranks in a run directory.
    """
    final = run_dir / "checkpoints" / f"step-{step:08}"
    partial = checkpoint.partial(final)
    (partial / "dense").mkdir(parents=True)
    (partial / "dense" / "data").write_bytes(content)
    files = [checkpoint.write_private(partial, rank, b"rng") for rank in range(2)]
    files.append(checkpoint.digest_file(partial, "dense/data"))
    manifest = checkpoint.manifest(step=step, world=2, adaptor="pytorch", files=files)
    checkpoint.commit(partial, final, manifest)
    return final


def test_a_whole_checkpoint_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    When every file is as it was written, then that is said, with what it holds.
    """
    place = saved(tmp_path, 42)
    assert verify(place) == 0
    assert capsys.readouterr().out == (
        f"{place}: whole; the end of step 42 of 2 ranks, 3 files with 69 bytes, written with the "
        "adaptor pytorch\n"
    )


def test_of_a_run_directory_the_newest_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    When a run directory is named, then its newest checkpoint is read.
    """
    saved(tmp_path, 7)
    saved(tmp_path, 12)
    assert verify(tmp_path) == 0
    assert "the end of step 12" in capsys.readouterr().out


def test_of_a_directory_of_checkpoints_the_newest_of_that_name_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    When a directory for checkpoints is named, and what they are called, then the newest is read.
    """
    saved(tmp_path, 7)
    saved(tmp_path, 12)
    for name in ("step-{step:08d}", "{step}"):
        kept = tmp_path / "checkpoints"
        if name == "{step}":
            (kept / "step-00000012").rename(kept / "12")
        assert verify(kept, name) == 0
        assert "the end of step 12" in capsys.readouterr().out


@pytest.mark.parametrize("damage", [b"weighty", b"weight", b""])
def test_what_is_not_as_it_was_written_is_named(tmp_path: Path, damage: bytes) -> None:
    """
    When a file has other bytes, or fewer, then it is refused, and the file is named.
    """
    place = saved(tmp_path, 42)
    (place / "dense" / "data").write_bytes(damage)
    with pytest.raises(CheckpointCorrupt, match="dense/data differs from what was written"):
        verify(place)


def test_a_half_written_one_is_none(tmp_path: Path) -> None:
    """
    When a checkpoint was never finished, then there is none, and it is said how one is known.
    """
    partial = checkpoint.partial(tmp_path / "checkpoints" / "step-00000042")
    partial.mkdir(parents=True)
    (partial / "data").write_bytes(b"half")
    for path in (tmp_path, partial, tmp_path / "nowhere"):
        with pytest.raises(
            UsageError, match=r"a checkpoint that was finished has a manifest\.json"
        ):
            verify(path)
