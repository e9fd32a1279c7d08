"""
MindIO's own tests of programs with a loop like MindSpore's, each over a whole job.

Ranks 0 and 2 hold the same state, and so do ranks 1 and 3.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.mindio.jobs import Outcome, job

PROGRAM = Path(__file__).parent / "mindspore_program.py"
MINDSPORE = {"MINDIO_FOR_MINDSPORE": "1"}


def run(directory: Path, *faults: list[Any], **options: Any) -> Outcome:  # Any: JSON
    """
    Run a job with these faults and return its outcome.
    """
    with job(
        directory / "job", program=PROGRAM, environment=MINDSPORE, faults=list(faults), **options
    ) as running:
        return running.end()


def finals(outcome: Outcome) -> list[str]:
    """
    Return the final numbers of each rank.
    """
    return [(outcome.directory / f"final-{rank}.hex").read_text() for rank in range(outcome.world)]


@cache
def undisturbed() -> tuple[list[str], dict[tuple[int, int], set[str]]]:
    """
    Return the final numbers and losses of a job without faults.
    """
    with TemporaryDirectory() as directory:
        outcome = run(Path(directory))
        assert outcome.codes == [0], outcome.output
        found = finals(outcome)
        assert found[0] == found[2] != found[1] == found[3]
        return found, outcome.losses()


def assert_same(outcome: Outcome) -> None:
    """
    Check that the job succeeded with the results of a job without faults.
    """
    assert not any(outcome.codes), outcome.output
    assert (finals(outcome), outcome.losses()) == undisturbed()


def pairs(outcome: Outcome) -> set[tuple[int, int]]:
    """
    Return the sending and the receiving rank of each repair.
    """
    return {(call["src"][0], call["dst"][0]) for _, call in outcome.called("repair")}


@pytest.mark.soak
def test_each_rank_gets_its_state_from_its_replica(tmp_path: Path) -> None:
    """When ranks 1 and 2 lose their memory, then rank 0 sends to 2 and rank 3 to 1, and all ranks
    return to one step, for which the loop asks."""
    outcome = run(tmp_path, [1, 4, "loop", "UCEError"], [2, 4, "loop", "UCEError"])
    assert_same(outcome)
    assert pairs(outcome) == {(0, 2), (3, 1)}
    for what in ("stop", "clean", "rollback"):
        assert outcome.ranks_called(what) == [0, 1, 2, 3]
    assert {call["step"] for _, call in outcome.called("rollback")} == {3}
    assert [call["action"] for _, call in outcome.called("action")] == [0, 0, 0, 0]
    assert outcome.called("exit") == []


@pytest.mark.soak
def test_a_replacement_reports_its_start_and_then_that_it_is_ready(tmp_path: Path) -> None:
    """When a rank is killed, then its new process first runs its own start, then registers its
    functions, and joins the repair when it reports that it is ready."""
    outcome = run(tmp_path, [1, 4, "update", "kill"])
    assert_same(outcome)
    assert [call["action"] for _, call in outcome.called("initialised")] == [0]
    assert [call["ranks"] for _, call in outcome.called("rebuild")] == [[1]] * 4
    for what in ("stop", "clean"):
        assert outcome.ranks_called(what) == [0, 2, 3]
    assert pairs(outcome) == {(3, 1)}
    assert outcome.ranks_called("rollback") == [0, 1, 2, 3]


@pytest.mark.soak
def test_without_a_replacement_one_of_each_group_saves(tmp_path: Path) -> None:
    """When rank 1 is lost and may not be replaced, then ranks 0 and 3 save, one of them names the
    checkpoint, and the three survivors are told to exit."""
    outcome = run(tmp_path, [1, 4, "loop", "kill"], run_options="--enable dump")
    assert outcome.codes == [3], outcome.output
    assert [(rank, call["info"]) for rank, call in outcome.called("save")] == [
        (0, [{"type": 0, "ranks": [0]}]),
        (3, [{"type": 0, "ranks": [3]}]),
    ]
    assert {call["step"] for _, call in outcome.called("save")} == {3}
    assert len(outcome.called("rename")) == 1
    assert outcome.ranks_called("exit") == [0, 2, 3]


@pytest.mark.soak
def test_state_that_all_ranks_have_lost_is_neither_repaired_nor_saved(tmp_path: Path) -> None:
    """When all ranks have lost their memory, then no rank repairs or saves, and all ranks are told
    to exit."""
    everyone = [[rank, 4, "loop", "UCEError"] for rank in range(4)]
    outcome = run(tmp_path, *everyone)
    assert outcome.codes == [4], outcome.output
    for what in ("repair", "rollback", "save", "rename"):
        assert outcome.called(what) == []
    assert outcome.ranks_called("exit") == [0, 1, 2, 3]


@pytest.mark.soak
def test_another_holder_saves_when_a_saver_fails(tmp_path: Path) -> None:
    """When rank 0 cannot save, then rank 2, its replica, saves together with rank 3, and the job
    has its last checkpoint."""
    outcome = run(
        tmp_path, [1, 4, "loop", "kill"], [0, 4, "save", "the disk is full"],
        run_options="--enable dump",
    )  # fmt: skip
    assert outcome.codes == [3], outcome.output
    saved = {rank for rank, _ in outcome.called("save")}
    assert saved == {0, 2, 3}
    assert (outcome.directory / "saved-2.bin").exists()
    assert not (outcome.directory / "saved-0.bin").exists()
    assert len(outcome.called("rename")) == 1
