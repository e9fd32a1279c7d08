"""
Checkpoints with user settings: the directory, the name, the number of kept checkpoints, and the
functions that write them.
"""

from pathlib import Path

import pytest

from tests.e2e.conftest import FAKE, FAKE_STEPS
from tests.e2e.jobs import Outcome, run
from tft import checkpoint
from tft.checkpoint import CheckpointStore
from tft.cli.checkpoints import verify

SOME = 60
NAME = "fake-{step}"
OWN = ("--own",)


def train(run_dir: Path, steps: int, *options: str, more: tuple[str, ...] = ()) -> Outcome:
    """
    Run the fast job with a checkpoint every 20 steps, and return its outcome.

    The job keeps two checkpoints, in a directory beside its run directory.
    """
    kept = ("--checkpoint-dir", str(run_dir.parent / "kept"), "--checkpoint-name", NAME)
    every = ("--checkpoint-every", "20", "--keep-checkpoints", "2")
    return run(
        run_dir, "--adaptor", "fake", *every, *kept, *options,
        script=FAKE, arguments=(str(steps), *more),
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("more", [(), OWN], ids=["by the adaptor", "by the script"])
def test_a_run_resumes_from_a_configured_checkpoint_directory(
    more: tuple[str, ...], tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When the user configures directory and name, and two checkpoints are kept, then there are
    two, other files there stay, and another run resumes from the newest with the same end."""
    kept = tmp_path / "kept"
    (kept / "fake-20").mkdir(parents=True)
    (kept / "fake-20" / "notes").touch()
    first = train(tmp_path / "first", SOME, more=more)
    assert first.code == 0, first.output
    assert {each.name for each in kept.iterdir()} == {"fake-20", "fake-40", "fake-60"}
    assert [each.name for each in (kept / "fake-20").iterdir()] == ["notes"]
    assert checkpoint.verify(kept / "fake-60").own == bool(more)
    assert verify(tmp_path / "first") == 0

    refused = train(tmp_path / "second", FAKE_STEPS, more=more)
    assert refused.code == 2
    assert "fake-60 is a checkpoint of an earlier run: add --resume" in refused.output
    second = train(tmp_path / "second", FAKE_STEPS, "--resume", more=more)
    assert second.code == 0, second.output
    rows = {
        (rank, step): row for (rank, step), row in fake_undisturbed.rows().items() if step > SOME
    }
    assert second.rows() == rows
    assert second.finals() == fake_undisturbed.finals()


@pytest.mark.soak
def test_resume_if_any_sets_a_damaged_checkpoint_aside(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When the newest checkpoint is damaged, then --resume is refused. --resume-if-any reports the
    damage, sets the checkpoint aside and resumes from the one before, with the same end."""
    assert train(tmp_path / "run", SOME).code == 0
    (tmp_path / "kept" / "fake-60" / "dense.bin").write_bytes(b"")
    refused = train(tmp_path / "again", FAKE_STEPS, "--resume")
    assert refused.code == 2
    assert "dense.bin differs from what was written" in refused.output
    outcome = train(tmp_path / "again", FAKE_STEPS, "--resume-if-any")
    assert outcome.code == 0, outcome.output
    assert "dense.bin differs from what was written" in outcome.output
    assert min(step for _, step in outcome.rows()) == 41
    assert outcome.finals() == fake_undisturbed.finals()


@pytest.mark.soak
@pytest.mark.parametrize("last", [False, True], ids=["periodic", "last"])
def test_a_run_resumes_from_the_second_copy_of_a_damaged_shard(
    tmp_path: Path, fake_undisturbed: Outcome, *, last: bool
) -> None:
    """When every copy is saved and the first is damaged, then a run resumes from another copy, with
    the same end."""
    more = ("--bug", "1,59") if last else ()
    first = train(tmp_path / "run", SOME, "--save-copies", "all", more=more)
    assert first.code == (3 if last else 0)
    place = tmp_path / "kept" / ("fake-58" if last else "fake-60")
    assert len(checkpoint.verify(place).copies) == 3
    (place / "dense.bin").write_bytes(b"")
    second = train(tmp_path / "again", FAKE_STEPS, "--resume")
    assert second.code == 0, second.output
    assert "another_copy_read" in second.output
    assert second.finals() == fake_undisturbed.finals()


@pytest.mark.soak
def test_a_failed_periodic_checkpoint_is_reported_and_training_continues(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When a function raises for a periodic checkpoint, then training continues to the same end,
    and the error is in the report and at the end of the run's output."""
    outcome = train(tmp_path / "run", FAKE_STEPS, more=(*OWN, "--full", "40"))
    assert outcome.code == 0, outcome.output
    assert outcome.finals() == fake_undisturbed.finals()
    why = "OSError: no space left on device"
    assert outcome.report["missed"] == [{"rank": 0, "why": why, "step": 40, "times": 1}]
    assert f"tft: no checkpoint of step 40: rank 0: {why}" in outcome.output
    assert outcome.output.count("checkpoint_failed") == 1


@pytest.mark.soak
def test_a_last_checkpoint_of_the_scripts_functions_needs_these_functions(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When a job has ended with a last checkpoint that the script's functions wrote, then a run
    without these functions refuses to resume from it and gives the reason, and a run with them
    resumes."""
    first = train(tmp_path / "run", FAKE_STEPS, more=(*OWN, "--bug", "1,33"))
    assert first.code == 3, first.output
    place = CheckpointStore(directory=tmp_path / "kept", name=NAME).place(32)
    assert checkpoint.verify(place).own

    without = train(tmp_path / "without", FAKE_STEPS, "--resume")
    assert without.code == 4
    assert "was written by a save function of the script" in without.output
    second = train(tmp_path / "run", FAKE_STEPS, "--resume", more=OWN)
    assert second.code == 0, second.output
    assert second.finals() == fake_undisturbed.finals()


@pytest.mark.soak
def test_a_last_checkpoint_that_all_ranks_fail_to_write_is_reported_missing(tmp_path: Path) -> None:
    """When the script's function raises on every rank, then there is no last checkpoint, and the
    error is the reported reason."""
    outcome = train(tmp_path / "run", FAKE_STEPS, more=(*OWN, "--bug", "1,16", "--full", "15"))
    assert outcome.code == 4, outcome.output
    assert "rank 0 could not write: OSError: no space left on device" in outcome.output
