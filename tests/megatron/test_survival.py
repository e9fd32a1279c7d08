"""
Real megatron-core under `tft run --adaptor megatron`, with ranks killed and broken: each run is compared bit
for bit with the undisturbed one of the same shape.
"""

from pathlib import Path

import pytest

from tests.e2e.jobs import identical
from tests.megatron.jobs import Undisturbed, train


@pytest.mark.parametrize("shape", ["TP1DP4"])
def test_a_killed_rank_changes_nothing(
    shape: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """
    When a rank is killed in its forward pass, then its share comes from the other instance of the optimizer,
    no step is lost, and losses and final state are those of the undisturbed run.
    """
    outcome = train(tmp_path / "run", shape, "kill:rank=3,step=4,phase=forward")
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed(shape))
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)
