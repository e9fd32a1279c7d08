"""
Copies that are compared while a MindSpore job trains.
"""

from pathlib import Path

import pytest

from tests.e2e.jobs import Outcome, identical
from tests.mindspore.conftest import train


@pytest.mark.soak
def test_flipped_bit_is_found_and_undone(tmp_path: Path, calm: Outcome) -> None:
    """When a bit flips in a parameter of one rank of four, then the rank is named, all ranks go back
    to a checkpoint from before the flip, and the job ends as the undisturbed one."""
    outcome = train(
        tmp_path / "run",
        "--integrity", "8", "--checkpoint-every", "5",
        "--chaos", "bitflip:rank=1,step=18,target=param",
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    assert [(fault["kind"], fault["rank"]) for fault in incident["faults"]] == [("corruption", 1)]
    assert incident["step"] <= 18 <= incident["faults"][0]["step"] <= 18 + 8
    assert incident["inexact"] == []
    identical(outcome, calm)
