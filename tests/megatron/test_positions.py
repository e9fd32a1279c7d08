"""The data position of a real Megatron job, and rollbacks to earlier steps."""

from pathlib import Path

import pytest

from tests.e2e.jobs import identical
from tests.megatron.jobs import Undisturbed, train


@pytest.mark.soak
def test_a_growing_batch_has_the_same_micro_batches_after_faults(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When the global batch doubles with step 5, one rank is killed in the update of step 4 and
    another in the forward pass of step 6, then every step has the micro-batches of the undisturbed
    run."""
    specs = ("kill:rank=2,step=4,phase=update", "kill:rank=1,step=6,phase=forward")
    outcome = train(tmp_path / "run", "TP1DP4", *specs, more=("--rampup",))
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed("TP1DP4", "--rampup"))
    assert outcome.rows() != undisturbed("TP1DP4").rows()
    assert {incident["strategy"] for incident in outcome.incidents} == {"recover"}


@pytest.mark.parametrize(
    ("words", "step", "more"),
    [
        pytest.param("PRECISION ERROR: load ckpt step=3", 2, (), marks=pytest.mark.soak),
        pytest.param("PRECISION ERROR", 4, (), marks=pytest.mark.soak),
        pytest.param("PRECISION ERROR: load ckpt step=4", 4, (), marks=pytest.mark.soak),
        pytest.param(
            "PRECISION ERROR: load ckpt step=3",
            2,
            ("--fp16",),
            id="before any update",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_wrong_numbers_lead_back_to_a_checkpoint_from_before_them(
    words: str, step: int, more: tuple[str, ...], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When a rank reports wrong numbers in step 7, with or without the number of the last right
    step, then all ranks keep their processes, return to the newest checkpoint that is early enough,
    and end as the undisturbed run. This also holds if all steps before the checkpoint were skipped
    because of infinite gradients."""
    outcome = train(
        tmp_path / "run",
        "TP1DP4",
        more=(*more, "--wrong", words),
        options=("--checkpoint-every", "2"),
    )
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed("TP1DP4", *more))
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["steps_lost"]) == ("retry", 6 - step)
    assert [(fault["kind"], fault["rank"]) for fault in incident["faults"]] == [("numeric", 1)]


@pytest.mark.soak
def test_batches_of_wrong_numbers_are_left_out(tmp_path: Path) -> None:
    """When a rank reports wrong numbers in step 7, and batches may be left out, then all ranks leave
    theirs out, and train all steps."""
    outcome = train(
        tmp_path / "run",
        "TP1DP2",
        more=("--wrong", "PRECISION ERROR"),
        options=("--checkpoint-every", "2", "--skip-batch"),
    )
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    assert incident["strategy"] == "retry"
