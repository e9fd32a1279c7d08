"""
Jobs on megatron-core whose copies are compared while they train: flipped bits are found, the right
rank is named, and the job ends as if nothing had happened.
"""

from pathlib import Path

import pytest

from tests.e2e.jobs import identical
from tests.megatron.jobs import STEPS, Undisturbed, train

EVERY = 2
OPTIONS = ("--integrity", str(EVERY), "--backup-every", str(EVERY))
FLIPPED = 4


@pytest.mark.soak
@pytest.mark.parametrize("target", ["master", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("shape", ["TP1DP2", "TP2DP2", "TP1DP4", "TP2DP2-plain", "PP2DP2"])
def test_flip_is_undone(shape: str, target: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """When bits of a master or a moment flip on one of the ranks that hold it, then the rank is named
    within the steps of a cycle. All ranks return to a copy from before, and losses and final state
    are those of the undisturbed run."""
    spec = f"bitflip:rank=1,step={FLIPPED},target={target},bits=2"
    outcome = train(tmp_path / "run", shape, spec, options=OPTIONS)
    assert outcome.code == 0, outcome.output
    assert len(outcome.chaos()) == 1
    (incident,) = outcome.incidents
    assert {(fault["kind"], fault["rank"]) for fault in incident["faults"]} == {("corruption", 1)}
    assert FLIPPED < incident["faults"][0]["step"] <= FLIPPED + EVERY + 1
    assert incident["inexact"] == []
    assert incident["step"] - 1 <= FLIPPED
    identical(outcome, undisturbed(shape))


@pytest.mark.soak
def test_flip_in_the_last_step_is_undone(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """When bits flip after the last step, then the comparison at the end of the job finds them, and
    the job ends as if nothing had happened."""
    spec = f"bitflip:rank=1,step={STEPS},target=master,bits=2"
    outcome = train(tmp_path / "run", "TP1DP4", spec, options=OPTIONS)
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    assert {fault["kind"] for fault in incident["faults"]} == {"corruption"}
    assert incident["inexact"] == []
    identical(outcome, undisturbed("TP1DP4"))
