"""
`tft checkpoint verify` on checkpoints on a disk.
"""

from pathlib import Path

import pytest

from tft import checkpoint
from tft.cli.checkpoints import verify
from tft.errors import CheckpointCorrupt, UsageError


def saved(run_dir: Path, step: int, content: bytes = b"weights") -> Path:
    """
    Write a checkpoint of two ranks into a run directory.
    """
    final = run_dir / "checkpoints" / f"step-{step:08}"
    partial = checkpoint.partial(final)
    (partial / "dense").mkdir(parents=True)
    (partial / "dense" / "data").write_bytes(content)
    files = [checkpoint.write_local_state(partial, rank, b"rng") for rank in range(2)]
    files.append(checkpoint.digest_file(partial, "dense/data"))
    manifest = checkpoint.manifest(step=step, world=2, adaptor="pytorch", files=files)
    checkpoint.commit(partial, final, manifest)
    return final


def test_verify_reports_a_whole_checkpoint_with_its_contents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When every file of a checkpoint is as it was written, then verify reports the checkpoint as
    whole, with its step, ranks, files, bytes and adaptor."""
    place = saved(tmp_path, 42)
    assert verify(place) == 0
    assert capsys.readouterr().out == (
        f"{place}: whole; the end of step 42 of 2 ranks, 3 files with 75 bytes, written with the "
        "adaptor pytorch\n"
    )


def test_verify_reads_the_newest_checkpoint_of_a_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When verify is given a run directory, then the newest checkpoint in the run directory is
    read."""
    saved(tmp_path, 7)
    saved(tmp_path, 12)
    assert verify(tmp_path) == 0
    assert "the end of step 12" in capsys.readouterr().out


def test_verify_reads_the_newest_checkpoint_that_matches_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When verify is given a directory of checkpoints and a name pattern, then the newest
    checkpoint with a matching name is read."""
    saved(tmp_path, 7)
    saved(tmp_path, 12)
    for name in ("step-{step:08d}", "{step}"):
        kept = tmp_path / "checkpoints"
        if name == "{step}":
            (kept / "step-00000012").rename(kept / "12")
        assert verify(kept, name) == 0
        assert "the end of step 12" in capsys.readouterr().out


@pytest.mark.parametrize("damage", [b"weighty", b"weight", b""])
def test_verify_names_a_damaged_file(tmp_path: Path, damage: bytes) -> None:
    """When a file of a checkpoint has other bytes or fewer bytes than were written, then verify
    refuses the checkpoint and names the file."""
    place = saved(tmp_path, 42)
    (place / "dense" / "data").write_bytes(damage)
    with pytest.raises(CheckpointCorrupt, match="dense/data differs from what was written"):
        verify(place)


def test_verify_refuses_a_path_without_a_finished_checkpoint(tmp_path: Path) -> None:
    """When a path has no finished checkpoint, then verify refuses the path and says that a finished
    checkpoint has a `manifest.json`."""
    partial = checkpoint.partial(tmp_path / "checkpoints" / "step-00000042")
    partial.mkdir(parents=True)
    (partial / "data").write_bytes(b"half")
    for path in (tmp_path, partial, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match=r"a complete checkpoint has a file manifest\.json"):
            verify(path)
