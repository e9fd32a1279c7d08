"""
Tests of a second round of one incident: the repairs and the losses of the first round still count.
"""

from pathlib import Path

import pytest

from tests.mindio.test_jobs import HALVES, assert_same, run

UCE = "UCE ERROR"


@pytest.mark.soak
def test_a_repaired_rank_does_not_count_as_lost_in_the_next_round(tmp_path: Path) -> None:
    """When two ranks have lost their memory, and one has received its state but the repair function
    of the other one raises, then the first rank needs no repair in the next round. Its program
    keeps the received state, and all ranks train on bit for bit."""
    outcome = run(
        tmp_path, [0, 4, "summed", UCE], [1, 4, "summed", UCE], groups=HALVES, discards=True,
        raises_once={"repair": 1}, raises_after="repaired-0",
    )  # fmt: skip
    assert_same(outcome)
    assert outcome.strategies == ["retry"]
    cleaned = [(rank, call["uce"]) for rank, call in outcome.called("clean") if rank < 2]
    assert cleaned.count((1, True)) == 2
    assert cleaned.count((0, True)) == 1


def test_memory_reported_as_lost_stays_lost_in_the_next_round(tmp_path: Path) -> None:
    """When a rank's clean function has reported its memory as lost, and reports no loss in the next
    round, then it still receives its state."""
    outcome = run(
        tmp_path, [0, 4, "loop", UCE], groups=HALVES, discards=True, clean={"0": [0, 2]},
        raises_once={"clean": 3},
    )  # fmt: skip
    assert_same(outcome)
    assert outcome.strategies == ["retry"]
    assert 0 in outcome.ranks_called("repair")
