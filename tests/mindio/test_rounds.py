"""
A second round of one incident: what the first one has brought is kept, and what it has cost is not forgotten.
"""

from pathlib import Path

from tests.mindio.test_jobs import HALVES, assert_same, run

UCE = "UCE ERROR"


def test_a_rank_that_is_repaired_is_not_told_again_that_its_memory_is_lost(tmp_path: Path) -> None:
    """
    When two ranks have lost their memory, one has received its state and the function of the other one raises, then in
    the next round the first one's memory is no longer lost: its program keeps what it has received, and all go on bit for
    bit.
    """
    outcome = run(
        tmp_path, [0, 4, "summed", UCE], [1, 4, "summed", UCE], groups=HALVES, discards=True,
        raises_once={"repair": 1}, raises_after="repaired-0",
    )  # fmt: skip
    assert_same(outcome)
    assert outcome.strategies == ["retry"]
    cleaned = [(rank, call["uce"]) for rank, call in outcome.called("clean") if rank < 2]
    assert cleaned.count((1, True)) == 2
    assert cleaned.count((0, True)) == 1


def test_memory_that_was_given_up_is_not_had_back_by_a_later_answer(tmp_path: Path) -> None:
    """
    When a rank's clean function has given up its memory, and says in the next round that nothing was lost, then it
    receives its state all the same.
    """
    outcome = run(
        tmp_path, [0, 4, "loop", UCE], groups=HALVES, discards=True, clean={"0": [0, 2]},
        raises_once={"clean": 3},
    )  # fmt: skip
    assert_same(outcome)
    assert outcome.strategies == ["retry"]
    assert 0 in outcome.ranks_called("repair")
