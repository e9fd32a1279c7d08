"""
Two kinds of groups, as MindIO's facts work them out: eight ranks hold two copies of what is dense, and each
expert lives on two ranks.
"""

from pathlib import Path

import pytest

from tests.mindio.expected import assert_expected
from tests.mindio.test_jobs import run

WORLD, STEPS = 8, 5
DENSE = {"rank_list": list(range(WORLD)), "replica_cnt": 2, "replica_shift": 0}
EXPERTS = [
    {"rank_list": [rank, rank + 4], "replica_cnt": 2, "replica_shift": 0} for rank in range(4)
]


def test_each_kind_is_repaired_by_who_holds_it(tmp_path: Path) -> None:
    """
    When rank 5 is killed in its update, rank 1 sends it the dense part and the expert, and the eight go on bit
    for bit.
    """
    outcome = run(
        tmp_path, [5, 3, "update", "kill"], world=WORLD, steps=STEPS, groups=[DENSE, *EXPERTS]
    )
    assert_expected(outcome, STEPS)
    sent = sorted((rank, call["type"], call["dst"]) for rank, call in outcome.called("repair"))
    assert sent == [(1, [0], [5]), (1, [1], [5]), (5, [0], [5]), (5, [1], [5])]


@pytest.mark.soak
def test_each_kind_is_saved_by_who_is_left_of_it(tmp_path: Path) -> None:
    """
    When rank 5 is lost and only a last checkpoint is to be made, ranks 0 to 3 save what is dense together and
    each its expert alone.
    """
    outcome = run(
        tmp_path, [5, 3, "loop", "kill"], world=WORLD, steps=STEPS, groups=[DENSE, *EXPERTS],
        run_options="--enable dump",
    )  # fmt: skip
    assert outcome.codes == [3], outcome.output
    dense = {"type": 0, "ranks": [0, 1, 2, 3]}
    assert [(rank, call["info"]) for rank, call in outcome.called("save")] == [
        (rank, [dense, {"type": 1, "ranks": [rank]}]) for rank in range(4)
    ]
