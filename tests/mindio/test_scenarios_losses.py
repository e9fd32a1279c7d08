"""
MindIO's own tests of lost processes, and further tests that MindIO's documented facts require.

Each test runs a whole job of four ranks with two copies of two parts.
"""

from pathlib import Path

import pytest

from tests.mindio.expected import assert_expected
from tests.mindio.jobs import Outcome
from tests.mindio.test_jobs import HALVES, assert_same, run


def pairs(outcome: Outcome) -> set[tuple[int, int]]:
    """
    Return the sending and the receiving rank of each repair.
    """
    return {(call["src"][0], call["dst"][0]) for _, call in outcome.called("repair")}


@pytest.mark.soak
def test_a_rank_lost_in_its_update_is_replaced(tmp_path: Path) -> None:
    """When rank 3 is killed with half of its state changed, then the three others stop and clean
    once, all four form their groups without the lost process, rank 1 sends to the replacement, and
    all ranks return to one step."""
    outcome = run(tmp_path, [3, 4, "update", "kill"], groups=HALVES)
    assert_same(outcome)
    assert outcome.strategies == ["recover"]
    for what in ("stop", "clean"):
        assert outcome.ranks_called(what) == [0, 1, 2]
    assert [call["ranks"] for _, call in outcome.called("rebuild")] == [[3]] * 4
    sent = [(rank, call["repair_type"]) for rank, call in outcome.called("repair")]
    assert sent == [(1, 0), (3, 3)]
    assert outcome.ranks_called("rollback") == [0, 1, 2, 3]
    assert {call["type"] for _, call in outcome.called("clean")} == {"recover"}


@pytest.mark.soak
def test_two_lost_ranks_of_different_parts_are_replaced_together(tmp_path: Path) -> None:
    """When ranks 0 and 3 are killed together, then rank 2 sends to 0 and rank 1 to 3."""
    outcome = run(tmp_path, [0, 4, "loop", "kill"], [3, 4, "loop", "kill"], groups=HALVES)
    assert_same(outcome)
    assert pairs(outcome) == {(2, 0), (1, 3)}


@pytest.mark.soak
def test_a_part_without_a_holder_ends_the_job_without_checkpoint(tmp_path: Path) -> None:
    """When ranks 1 and 3 are killed together, then no rank has their part. When the program also
    keeps no checkpoint that it could load, then no rank saves, and the job ends with the message of
    the program's function."""
    outcome = run(tmp_path, [1, 4, "loop", "kill"], [3, 4, "loop", "kill"], groups=HALVES)
    assert outcome.codes == [4], outcome.output
    assert "could not load a checkpoint of its own" in outcome.output
    for what in ("rollback", "save", "rename"):
        assert outcome.called(what) == []


@pytest.mark.soak
def test_a_survivor_of_each_part_saves(tmp_path: Path) -> None:
    """When rank 0 is lost and only a last checkpoint is allowed, then ranks 2 and 1 save it
    together, in the order of the parts, and one of them names it."""
    outcome = run(tmp_path, [0, 4, "loop", "kill"], groups=HALVES, run_options="--enable dump")
    assert outcome.codes == [3], outcome.output
    assert outcome.ranks_called("save") == [1, 2]
    infos = [call["info"] for _, call in outcome.called("save")]
    assert infos == [[{"type": 0, "ranks": [2, 1]}]] * 2
    [(_, named)] = outcome.called("rename")
    assert named["step"] == 3


@pytest.mark.soak
def test_a_hanging_rank_is_found_though_its_process_lives(tmp_path: Path) -> None:
    """When the training thread of rank 2 hangs, after tft has learnt the duration of a step, then
    the rank is found and replaced, and the job trains on."""
    outcome = run(tmp_path, [2, 60, "loop", "hang"], groups=HALVES, steps=70, pace=0.05)
    assert_expected(outcome, 70)
    assert outcome.strategies == ["recover"]
    assert pairs(outcome) == {(0, 2)}


@pytest.mark.soak
def test_a_replacement_that_dies_before_it_is_ready_is_replaced(tmp_path: Path) -> None:
    """When the replacement of rank 3 is killed before it is ready, then another process takes the
    rank."""
    outcome = run(tmp_path, [3, 4, "loop", "kill"], [3, 1, "replaced", "kill"], groups=HALVES)
    assert_same(outcome)
    assert [call["reboot"] for call in outcome.calls(3) if call["what"] == "started"] == [
        False, True, True,
    ]  # fmt: skip
    assert pairs(outcome) == {(1, 3)}


@pytest.mark.soak
@pytest.mark.parametrize(
    "order",
    [
        "regroup",
        *(pytest.param(each, marks=pytest.mark.soak) for each in ("stop", "rebuild", "rollback")),
    ],
)
def test_a_second_lost_rank_joins_the_incident(tmp_path: Path, order: str) -> None:
    """When rank 3 is lost, and rank 0 is killed as it begins to carry out an order of this
    incident, then both are replaced in one incident."""
    outcome = run(
        tmp_path, [3, 4, "loop", "kill"], groups=HALVES,
        run_options=f"--chaos kill:rank=0,phase=repair,order={order},step=2",
    )  # fmt: skip
    assert_same(outcome)
    assert outcome.strategies == ["recover"]
    assert {fault["rank"] for fault in outcome.report["incidents"][0]["faults"]} == {0, 3}
    assert pairs(outcome) >= {(1, 3), (2, 0)}


@pytest.mark.soak
@pytest.mark.parametrize("part", ["controller", pytest.param("broker", marks=pytest.mark.soak)])
def test_a_controller_that_dies_in_the_incident_continues_it(tmp_path: Path, part: str) -> None:
    """When the controller is killed together with a rank, then its successor continues the
    recovery."""
    outcome = run(
        tmp_path, [3, 4, "loop", "kill"], groups=HALVES,
        run_options=f"--chaos kill:{part},step=3",
    )  # fmt: skip
    assert_same(outcome)
    assert outcome.strategies == ["recover"]
    assert pairs(outcome) == {(1, 3)}


@pytest.mark.parametrize(
    "broken",
    [
        "HCCL OP RETRY FAILED",
        pytest.param("FORCE STOP", marks=pytest.mark.soak),
        pytest.param("Connection closed by peer", marks=pytest.mark.soak),
    ],
)
def test_with_last_checkpoints_only_a_lost_rank_is_one_fault(broken: str, tmp_path: Path) -> None:
    """When neither retries nor replacements are enabled and rank 3 is killed, then the broken links
    that the other ranks report do not count as further faults. No process is started, and a last
    checkpoint is written."""
    outcome = run(
        tmp_path, [3, 4, "loop", "kill"], groups=HALVES, uce=False, arf=False, broken=broken
    )
    assert outcome.codes == [3], outcome.output
    [incident] = outcome.report["incidents"]
    assert [(fault["kind"], fault["rank"]) for fault in incident["faults"]] == [("process", 3)]
    assert (incident["strategy"], incident["processes_started"]) == ("dump", 0)
    assert outcome.ranks_called("save") == [0, 1]
    assert len(outcome.called("rename")) == 1


@pytest.mark.soak
def test_with_last_checkpoints_only_a_failed_link_is_the_reported_fault(tmp_path: Path) -> None:
    """When neither retries nor replacements are enabled and a link of rank 1 fails, then the report
    has that fault, and a last checkpoint is written."""
    outcome = run(tmp_path, [1, 4, "loop", "HCCL OP RETRY FAILED"], uce=False, arf=False)
    assert outcome.codes == [3], outcome.output
    [incident] = outcome.report["incidents"]
    assert [(fault["kind"], fault["rank"]) for fault in incident["faults"]] == [("network", 1)]
    assert incident["strategy"] == "dump"
