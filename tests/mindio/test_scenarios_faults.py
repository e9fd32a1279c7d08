"""
MindIO's own tests of memory that is lost and links that fail, each over a whole job: four ranks, two copies of
two parts (ranks 0 and 2 hold the one, 1 and 3 the other), and what was called how often.
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
    Who was called to repair, sorted: as what, whether it is to build anew, from whom, to whom.
    """
    return sorted(
        (rank, call["repair_type"], call["step"], call["need_rebuild"], call["src"], call["dst"])
        for rank, call in outcome.called("repair")
    )


@pytest.mark.soak
def test_links_of_two_ranks_are_retried_and_their_memory_is_repaired(tmp_path: Path) -> None:
    """
    When links of ranks 0 and 3 fail, everyone stops, cleans and goes back to one step, and nothing is sent.
    When both lose their memory later, 2 sends to 0 and 1 to 3; all has been a `retry`.
    """
    outcome = run(
        tmp_path, [0, 3, "loop", LINK], [3, 3, "loop", LINK], [0, 6, "loop", UCE],
        [3, 6, "loop", UCE], groups=HALVES,
    )  # fmt: skip
    assert_same(outcome)
    assert set(outcome.strategies) == {
        "retry"
    }  # of one incident, where the second came soon enough
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


def test_what_was_cleaned_is_whole_but_where_it_was_being_changed(tmp_path: Path) -> None:
    """
    When nothing lay in the memory that ranks 0 and 3 have lost, nothing is sent. When rank 2 says the same
    of memory that it lost in the middle of an update, it gets its state from rank 0 all the same.
    """
    outcome = run(
        tmp_path, [0, 3, "loop", UCE], [3, 3, "loop", UCE], [2, 6, "update", UCE],
        groups=HALVES, clean={"0": 2, "2": 2, "3": 2},
    )  # fmt: skip
    assert_same(outcome)
    assert set(outcome.strategies) == {
        "retry"
    }  # of one incident, where the second came soon enough
    assert outcome.ranks_called("rollback") == sorted(ALL * 2)
    assert {(source, to) for *_, [source], [to] in repairs(outcome)} == {(0, 2)}


@pytest.mark.soak
def test_a_rank_that_cannot_be_cleaned_gets_another_process(tmp_path: Path) -> None:
    """
    When rank 1's clean function says that it could not clean, and goes on to say so, its process is replaced
    and the job goes on.
    """
    outcome = run(tmp_path, [1, 4, "loop", UCE], groups=HALVES, clean={"1": 1})
    assert_same(outcome)
    assert outcome.strategies == ["recover"]
    assert outcome.report["incidents"][0]["tried"][0]["strategy"] == "retry"
    assert (3, 1) in {(source, to) for *_, [source], [to] in repairs(outcome)}


@pytest.mark.soak
def test_a_lost_link_beside_a_lost_process_hides_nothing(tmp_path: Path) -> None:
    """
    When rank 0's link fails as rank 3 is killed, rank 3 is replaced and gets its part from rank 1.
    """
    outcome = run(tmp_path, [0, 4, "loop", LINK], [3, 4, "loop", "kill"], groups=HALVES)
    assert_same(outcome)
    assert {(source, to) for *_, [source], [to] in repairs(outcome)} == {(1, 3)}


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
def test_what_no_copy_can_be_trusted_for_is_neither_gone_on_from_nor_saved(
    tmp_path: Path, faults: list[list[Any]], groups: int
) -> None:
    """
    When no rank has another copy of what was lost, or when what was lost may have come into all copies, and
    the program has no function that could load a checkpoint, a link that has failed beside it does not make
    it a retry without repair: the job ends, nothing is saved, and the reason is in the report.
    """
    halves = [{**HALVES[0], "replica_cnt": groups}]
    outcome = run(tmp_path, *faults, groups=halves, without=["repair"])
    assert outcome.codes == [4], outcome.output
    assert outcome.strategies == ["exit"]
    for what in ("repair", "rollback", "save", "rename", "returned"):
        assert outcome.called(what) == []
    assert all(each["why_not"] for each in outcome.report["incidents"][0]["tried"])


LOAD, REBUILD = 5, 6
"""`RT_LOAD_CKPT`, `RT_LOAD_REBUILD`."""


@pytest.mark.parametrize(
    ("faults", "copies", "rebuilds", "step"),
    [
        pytest.param([[1, 6, "loop", UCE]], 1, [1], 4, id="one copy of everything"),
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
def test_where_no_copy_can_be_trusted_all_load_a_checkpoint_of_the_programs_own(
    tmp_path: Path, faults: list[list[Any]], copies: int, rebuilds: list[int], step: int
) -> None:
    """
    When nobody has a sound copy of something, everyone stops, cleans, and its repair function is called to
    load the newest checkpoint that the program keeps, by those who have lost their memory with all that is in
    it. They say which step that is, everyone goes on from there, and nothing is saved.
    """
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
def test_the_step_that_a_precision_error_names_is_the_last_sound_one(
    named: int, tmp_path: Path
) -> None:
    """
    When a precision error in step 5 names the step that is to be loaded, then a checkpoint of that step is believed, also
    one that was saved after the last update, and no newer one is loaded.
    """
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
def test_a_lost_process_with_what_nobody_else_has_is_replaced_and_all_load(tmp_path: Path) -> None:
    """
    When there is one copy of everything and a process is killed, another one takes its place, learns from the
    others how the program counts, and loads with them.
    """
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
        ({"2": 0}, "nobody knows of which step: tft_report_load_ckpt_step says it"),
    ],
)
def test_a_checkpoint_that_is_not_that_of_all_is_not_gone_on_from(
    tmp_path: Path, finds: dict[str, int], why: str
) -> None:
    """
    When one rank loads another checkpoint than the rest, or does not say which one, nobody trains on, and the
    reason is in the report.
    """
    single = [{**HALVES[0], "replica_cnt": 1}]
    outcome = run(tmp_path, [1, 6, "loop", UCE], groups=single, keep=2, finds=finds)
    assert outcome.codes == [4], outcome.output
    assert any(why in each["why_not"] for each in outcome.report["incidents"][0]["tried"])
    assert [outcome.called(what) for what in ("rollback", "save")] == [[], []]
