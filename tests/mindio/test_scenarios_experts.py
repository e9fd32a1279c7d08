"""
Tests of a model with two kinds of replica groups, with the group facts that MindIO computes.

Eight ranks hold two copies of the dense part, and each expert is on two ranks.
"""

from pathlib import Path

import pytest
from mindio_ttp.constants import RepairType

from tests.mindio.expected import assert_expected
from tests.mindio.test_jobs import run

WORLD, STEPS = 8, 5
DENSE = {"rank_list": list(range(WORLD)), "replica_cnt": 2, "replica_shift": 0}
EXPERTS = [
    {"rank_list": [rank, rank + 4], "replica_cnt": 2, "replica_shift": 0} for rank in range(4)
]


@pytest.mark.soak
def test_all_kinds_are_repaired_in_one_call_on_each_rank(tmp_path: Path) -> None:
    """When rank 5 is killed in its update, then rank 1 sends the dense part and the expert in one
    call on each of the two ranks, and the eight ranks train on bit for bit. Source: processor.cpp,
    lines 836 to 850 of mind-cluster 22bb3d98."""
    outcome = run(
        tmp_path, [5, 3, "update", "kill"], world=WORLD, steps=STEPS, groups=[DENSE, *EXPERTS]
    )
    assert_expected(outcome, STEPS)
    told = {"type": [0, 1], "src": [1, 1], "dst": [5, 5], "rank_list": [1, 5]}
    assert [
        (rank, call["repair_type"], call["error_ranks"], {name: call[name] for name in told})
        for rank, call in outcome.called("repair")
    ] == [
        (1, RepairType.RT_SEND.value, [5, 5], told),
        (5, RepairType.RT_RECV_REPAIR.value, [5, 5], told),
    ]


@pytest.mark.soak
def test_every_rank_of_a_repair_gets_the_list_of_all_of_them(tmp_path: Path) -> None:
    """When ranks 3 and 5 are killed at once, then each of the four ranks that send or receive gets
    one call, with its own transfers and the list of all four: MindSpeed-LLM forms a group of these
    ranks first. Source: controller.cpp, lines 2049 to 2087."""
    outcome = run(
        tmp_path, [3, 3, "loop", "kill"], [5, 3, "loop", "kill"], world=WORLD, steps=STEPS,
        groups=[DENSE, *EXPERTS],
    )  # fmt: skip
    assert_expected(outcome, STEPS)
    assert outcome.strategies == ["recover"]
    called = outcome.called("repair")
    assert [(rank, call["src"], call["dst"]) for rank, call in called] == [
        (1, [1, 1], [5, 5]), (3, [7, 7], [3, 3]), (5, [1, 1], [5, 5]), (7, [7, 7], [3, 3]),
    ]  # fmt: skip
    assert {tuple(call["rank_list"]) for _, call in called} == {(1, 3, 5, 7)}


@pytest.mark.soak
def test_survivors_save_each_kind_of_state(tmp_path: Path) -> None:
    """When rank 5 is lost and only a last checkpoint is allowed, then ranks 0 to 3 save the dense
    part together and each saves its expert alone."""
    outcome = run(
        tmp_path, [5, 3, "loop", "kill"], world=WORLD, steps=STEPS, groups=[DENSE, *EXPERTS],
        run_options="--enable dump",
    )  # fmt: skip
    assert outcome.codes == [3], outcome.output
    dense = {"type": 0, "ranks": [0, 1, 2, 3]}
    assert [(rank, call["info"]) for rank, call in outcome.called("save")] == [
        (rank, [dense, {"type": 1, "ranks": [rank]}]) for rank in range(4)
    ]
