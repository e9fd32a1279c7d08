"""
MindIO's own tests of lost memory and failed links, each over a whole job.

Four ranks hold two copies of two parts: ranks 0 and 2 one part, ranks 1 and 3 the other. The tests
also check how often each function was called.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.mindio.jobs import Outcome
from tests.mindio.test_jobs import HALVES, assert_same, run

ALL = [0, 1, 2, 3]
UCE, LINK = "UCE ERROR in a test", "HCCL OP RETRY FAILED in a test"
CORRUPTED = "HBM MULTI BIT ECC, nobody knows when"
PRECISION = "PRECISION ERROR in a test"


def repairs(outcome: Outcome) -> list[tuple[int, int, int, bool, list[int], list[int]]]:
    """
    Return each repair call, sorted: rank, type, step, whether groups are rebuilt, sources,
    destinations.
    """
    return sorted(
        (rank, call["repair_type"], call["step"], call["need_rebuild"], call["src"], call["dst"])
        for rank, call in outcome.called("repair")
    )


@pytest.mark.soak
def test_links_of_two_ranks_are_retried_and_their_memory_is_repaired(tmp_path: Path) -> None:
    """When links of ranks 0 and 3 fail, then all ranks stop, clean and return to one step, and no
    state is sent. When both lose their memory later, rank 2 sends to 0 and rank 1 to 3. Both
    incidents use `retry`."""
    outcome = run(
        tmp_path, [0, 3, "loop", LINK], [3, 3, "loop", LINK], [0, 6, "loop", UCE],
        [3, 6, "loop", UCE], groups=HALVES,
    )  # fmt: skip
    assert_same(outcome)
    assert set(outcome.strategies) == {"retry"}  # the faults may be in one incident or in two
    for what in ("stop", "clean", "rollback"):
        assert outcome.ranks_called(what) == sorted(ALL * 2)
    assert repairs(outcome) == [
        (0, 1, 5, True, [2], [0]),
        (1, 0, 5, False, [1], [3]),
        (2, 0, 5, False, [2], [0]),
        (3, 1, 5, True, [1], [3]),
    ]
    assert {call["type"] for _, call in outcome.called("clean")} == {"retry"}
    assert outcome.called("save") == []


@pytest.mark.soak
def test_state_lost_in_an_update_is_sent_though_clean_reports_none_lost(tmp_path: Path) -> None:
    """When the memory that ranks 0 and 3 have lost held no state, then no state is sent. When rank
    2 loses memory in the middle of an update and also reports that it held no state, then rank 2
    still gets its state from rank 0."""
    outcome = run(
        tmp_path, [0, 3, "loop", UCE], [3, 3, "loop", UCE], [2, 6, "update", UCE],
        groups=HALVES, clean={"0": 2, "2": 2, "3": 2},
    )  # fmt: skip
    assert_same(outcome)
    assert set(outcome.strategies) == {"retry"}  # the faults may be in one incident or in two
    assert outcome.ranks_called("rollback") == sorted(ALL * 2)
    assert {(source, to) for *_, [source], [to] in repairs(outcome)} == {(0, 2)}


@pytest.mark.soak
def test_a_rank_that_cannot_be_cleaned_gets_another_process(tmp_path: Path) -> None:
    """When rank 1's clean function fails again and again, then its process is replaced and the job
    trains on."""
    outcome = run(tmp_path, [1, 4, "loop", UCE], groups=HALVES, clean={"1": 1})
    assert_same(outcome)
    assert outcome.strategies == ["recover"]
    assert outcome.report["incidents"][0]["tried"][0]["strategy"] == "retry"
    assert (3, 1) in {(source, to) for *_, [source], [to] in repairs(outcome)}


@pytest.mark.soak
def test_a_lost_process_is_replaced_although_a_link_fails_too(tmp_path: Path) -> None:
    """When rank 0's link fails as rank 3 is killed, then rank 3 is replaced and gets its part from
    rank 1."""
    outcome = run(tmp_path, [0, 4, "loop", LINK], [3, 4, "loop", "kill"], groups=HALVES)
    assert_same(outcome)
    assert {(source, to) for *_, [source], [to] in repairs(outcome)} == {(1, 3)}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("faults", "groups"),
    [
        pytest.param([[1, 4, "loop", UCE]], 1, id="one copy of everything"),
        pytest.param(
            [[0, 4, "loop", CORRUPTED], [3, 4, "loop", LINK]],
            2,
            id="in doubt",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_state_without_a_sound_copy_ends_the_job_without_checkpoint(
    tmp_path: Path, faults: list[list[Any]], groups: int
) -> None:
    """When no other rank has a copy of the lost state, or the loss may have polluted all copies,
    and the program has no function to load a checkpoint, then a failed link in the same incident
    does not lead to a retry without repair: the job ends, no rank saves, and the reason is in the
    report."""
    halves = [{**HALVES[0], "replica_cnt": groups}]
    outcome = run(tmp_path, *faults, groups=halves, without=["repair"])
    assert outcome.codes == [4], outcome.output
    assert outcome.strategies == ["exit"]
    for what in ("repair", "rollback", "save", "rename", "returned"):
        assert outcome.called(what) == []
    assert all(each["why_not"] for each in outcome.report["incidents"][0]["tried"])


LOAD, REBUILD = 5, 6
"""`RT_LOAD_CKPT`, `RT_LOAD_REBUILD`."""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("faults", "copies", "rebuilds", "step"),
    [
        pytest.param(
            [[1, 6, "loop", UCE]], 1, [1], 4, id="one copy of everything", marks=pytest.mark.soak
        ),
        pytest.param(
            [[0, 6, "loop", CORRUPTED], [3, 6, "loop", CORRUPTED]], 2, [0, 3], 4, id="in doubt",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            [[rank, 6, "loop", PRECISION] for rank in ALL], 2, [], 4, id="wrong numbers", marks=pytest.mark.soak),
        pytest.param(
            [[0, 7, "loop", CORRUPTED]], 2, [0], 4, id="the newest in doubt, too",
            marks=pytest.mark.soak,
        ),
    ],
)  # fmt: skip
def test_all_ranks_load_the_programs_own_checkpoint_without_a_sound_copy(
    tmp_path: Path, faults: list[list[Any]], copies: int, rebuilds: list[int], step: int
) -> None:
    """When no rank has a sound copy of some state, then all ranks stop and clean, and their repair
    functions load the newest checkpoint that the program keeps. This holds also for ranks that have
    lost their memory. The functions report its step, all ranks train on from there, and no rank
    saves."""
    outcome = run(
        tmp_path, *faults, groups=[{**HALVES[0], "replica_cnt": copies}], keep=2,
        pattern=[PRECISION, "RS_RETRY", PRECISION],
    )  # fmt: skip
    assert_same(outcome)
    (incident,) = outcome.report["incidents"]
    completed = faults[0][1] - 1
    assert (incident["strategy"], incident["step"]) == ("retry", step + 1)
    assert incident["steps_lost"] == completed - step
    for what in ("stop", "clean", "rollback"):
        assert outcome.ranks_called(what) == ALL
    last = completed if copies == 1 else completed - 1
    assert repairs(outcome) == [
        (rank, REBUILD if rank in rebuilds else LOAD, last, rank in rebuilds, [rank], [rank])
        for rank in ALL
    ]
    assert {tuple(call["rank_list"]) for _, call in outcome.called("repair")} == {tuple(ALL)}
    assert {call["step"] for _, call in outcome.called("rollback")} == {step}
    assert outcome.called("save") == []


@pytest.mark.parametrize("named", [4, pytest.param(2, marks=pytest.mark.soak)])
def test_the_step_named_by_a_precision_error_is_the_last_sound_one(
    named: int, tmp_path: Path
) -> None:
    """When a precision error in step 5 names the step to load, then the ranks load the checkpoint
    of that step, even if it was saved after the last update before the error. They do not load a
    newer checkpoint."""
    text = f"{PRECISION} load ckpt step={named}"
    outcome = run(
        tmp_path, *[[rank, 5, "loop", text] for rank in ALL], groups=HALVES, keep=2,
        pattern=[PRECISION, "RS_RETRY", PRECISION],
    )  # fmt: skip
    assert_same(outcome)
    (incident,) = outcome.report["incidents"]
    assert (incident["strategy"], incident["step"]) == ("retry", named + 1)
    assert {kind for _, kind, *_ in repairs(outcome)} == {LOAD}


@pytest.mark.soak
def test_all_ranks_load_when_the_only_holder_of_state_is_replaced(tmp_path: Path) -> None:
    """When every part has one holder and a process is killed, then its replacement learns the
    program's step count from the other ranks, and loads the checkpoint with them."""
    single = [{**HALVES[0], "replica_cnt": 1}]
    outcome = run(tmp_path, [2, 6, "loop", "kill"], groups=single, keep=2)
    assert_same(outcome)
    assert outcome.strategies == ["recover"]
    assert [(rank, kind) for rank, kind, *_ in repairs(outcome)] == [(rank, LOAD) for rank in ALL]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("finds", "why"),
    [
        ({"2": 2}, "rank 2 has found a checkpoint of step 2, rank 0 one of step 4"),
        ({"2": 0}, "did not say of which step: call tft_report_load_ckpt_step"),
    ],
)
def test_ranks_that_load_different_checkpoints_do_not_train_on(
    tmp_path: Path, finds: dict[str, int], why: str
) -> None:
    """When one rank loads another checkpoint than the other ranks, or does not report its step,
    then no rank trains on, and the reason is in the report."""
    single = [{**HALVES[0], "replica_cnt": 1}]
    outcome = run(tmp_path, [1, 6, "loop", UCE], groups=single, keep=2, finds=finds)
    assert outcome.codes == [4], outcome.output
    assert any(why in each["why_not"] for each in outcome.report["incidents"][0]["tried"])
    assert [outcome.called(what) for what in ("rollback", "save")] == [[], []]
