"""
Tests of whole jobs of a program written for MindIO.

The jobs survive with bit-identical results, and tft calls the program's functions as MindIO does.
"""

import signal
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.mindio.jobs import Job, Outcome, job

HALVES = [{"rank_list": [0, 1, 2, 3], "replica_cnt": 2, "replica_shift": 0}]
"""Two copies of two parts of the state. Ranks 0 and 2 hold one part, ranks 1 and 3 the other."""


@cache
def undisturbed() -> tuple[set[str], dict[tuple[int, int], set[str]]]:
    """
    Return the final states and losses of a job without faults.
    """
    with TemporaryDirectory() as directory, job(Path(directory) / "job") as running:
        outcome = running.end()
        assert outcome.codes == [0], outcome.output
        return outcome.finals(), outcome.losses()


def assert_same(outcome: Outcome) -> None:
    """
    Check that the job succeeded with the results of a job without faults.
    """
    assert not any(outcome.codes), outcome.output
    finals, losses = undisturbed()
    assert len(finals) == 1
    assert outcome.finals() == finals
    assert outcome.losses() == losses


def run(directory: Path, *faults: list[Any], **options: Any) -> Outcome:  # Any: JSON
    """
    Run a job with these faults and return its outcome.
    """
    with job(directory / "job", faults=list(faults), **options) as running:
        return running.end()


@pytest.mark.parametrize("where", [pytest.param("loop", marks=pytest.mark.soak), "update"])
def test_lost_memory_is_repaired_from_a_copy(tmp_path: Path, where: str) -> None:
    """When a rank's memory is lost, in its loop or with half of its state changed, then it receives
    the state of another rank and all ranks train on."""
    outcome = run(tmp_path, [1, 4, where, "UCE ERROR in a test"])
    assert_same(outcome)
    assert outcome.strategies == ["retry"]
    for what in ("stop", "clean", "rollback"):
        assert outcome.ranks_called(what) == [0, 1, 2, 3]
    by_type = sorted(outcome.called("repair"), key=lambda call: int(call[1]["repair_type"]))
    [(giver, sent), (receiver, received)] = by_type
    assert (sent["repair_type"], sent["need_rebuild"]) == (0, False)
    assert (receiver, received["repair_type"], received["need_rebuild"]) == (1, 1, True)
    assert sent["rank_list"] == received["rank_list"] == sorted([giver, 1])
    assert outcome.called("rebuild") == []
    assert {call["type"] for _, call in outcome.called("clean")} == {"retry"}
    assert [call["uce"] for _, call in outcome.called("clean")] == [False, True, False, False]


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.soak)])
def test_a_lost_process_is_replaced(tmp_path: Path, rank: int) -> None:
    """When a process is killed, also that of rank 0, then a new process takes its rank, knows that
    it is a replacement, and receives the state."""
    outcome = run(tmp_path, [rank, 4, "loop", "kill"])
    assert_same(outcome)
    assert outcome.strategies == ["recover"]
    started = [call["reboot"] for call in outcome.calls(rank) if call["what"] == "started"]
    assert started == [False, True]
    assert [call["ranks"] for _, call in outcome.called("rebuild")] == [[rank]] * 4
    received = [call for who, call in outcome.called("repair") if who == rank]
    assert [(call["repair_type"], call["need_rebuild"]) for call in received] == [(3, False)]
    survivors = [each for each in range(4) if each != rank]
    assert outcome.ranks_called("stop") == survivors
    assert outcome.ranks_called("clean") == survivors


@pytest.mark.soak
@pytest.mark.parametrize("where", [pytest.param("summed", marks=pytest.mark.soak), "update"])
def test_a_process_that_dies_after_the_all_reduce_is_replaced_for_the_next_step(
    tmp_path: Path, where: str
) -> None:
    """When a process is killed after the others have its contribution to the all-reduce, then the
    others complete the step, and the replacement of the process continues with the next step."""
    outcome = run(tmp_path, [2, 1, where, "kill"], [1, 5, where, "kill"])
    assert_same(outcome)
    assert set(outcome.strategies) == {"recover"}  # the faults may be in one incident or in two


@pytest.mark.soak
def test_a_rank_receives_its_part_from_the_other_holder(tmp_path: Path) -> None:
    """When each part has two holders, then a rank receives its part from the other holder."""
    outcome = run(tmp_path, [0, 4, "loop", "UCE ERROR"], [3, 4, "loop", "UCE ERROR"], groups=HALVES)
    assert_same(outcome)
    pairs = {(call["src"][0], call["dst"][0]) for _, call in outcome.called("repair")}
    assert pairs == {(2, 0), (1, 3)}


@pytest.mark.soak
def test_no_state_is_sent_after_a_lost_link(tmp_path: Path) -> None:
    """When a link has failed, then all ranks train on with their own state."""
    outcome = run(tmp_path, [2, 5, "loop", "HCCL OP RETRY FAILED"])
    assert_same(outcome)
    assert outcome.strategies == ["retry"]
    assert outcome.called("repair") == []


@pytest.mark.soak
def test_no_state_is_sent_when_the_clean_function_reports_none_lost(tmp_path: Path) -> None:
    """When a rank has lost memory without state in it, then it keeps its own state."""
    outcome = run(tmp_path, [2, 5, "loop", "UCE ERROR"], clean={"2": 2})
    assert_same(outcome)
    assert outcome.called("repair") == []


@pytest.mark.soak
def test_ranks_that_all_leave_their_loops_without_a_fault_train_on(tmp_path: Path) -> None:
    """When a broken connection stops all ranks with FORCE STOP, so that none reports a fault, then all
    train on after a while."""
    faults = [[rank, 4, "loop", "FORCE STOP after a lost connection"] for rank in range(4)]
    outcome = run(tmp_path, *faults)
    assert_same(outcome)
    assert outcome.strategies == ["retry"]
    (fault,) = outcome.report["incidents"][0]["faults"]
    assert fault["evidence"].startswith("all ranks have left their training loops")


@pytest.mark.soak
def test_processes_of_another_launcher_survive(tmp_path: Path) -> None:
    """When another launcher has started the processes, then each of these processes becomes the
    launcher of its rank. A replacement of the rank is a child of this process. Every rank, also a
    replacement, has the launcher's variables."""
    launcher = {"MASTER_PORT": "29555", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    outcome = run(tmp_path, [0, 4, "loop", "kill"], launched=True, environment=launcher)
    assert_same(outcome)
    assert outcome.codes == [0, 0, 0, 0]
    assert outcome.strategies == ["recover"]
    assert [call["master"] for _, call in outcome.called("started")] == ["29555"] * 5


def end_when_trained(running: Job) -> None:
    """
    Ask the job to end after some steps, because there is nothing to save before the first step.
    """
    losses = running.directory / "losses-3.jsonl"
    while not losses.exists() or losses.read_text().count("\n") < 3:
        assert all(process.poll() is None for process in running.processes)
    running.processes[0].send_signal(signal.SIGTERM)


def test_a_requested_end_leaves_a_last_checkpoint(tmp_path: Path) -> None:
    """When the job is asked to end, then the holders of one copy save it together, and one of them
    names it."""
    with job(tmp_path / "job", steps=100_000, groups=HALVES) as running:
        end_when_trained(running)
        outcome = running.end()
    assert outcome.codes == [128 + signal.SIGTERM], outcome.output
    saved = outcome.called("save")
    assert [rank for rank, _ in saved] == [0, 1]
    assert all(call["info"] == [{"type": 0, "ranks": [0, 1]}] for _, call in saved)
    [(_, named)] = outcome.called("rename")
    assert {call["step"] for _, call in saved} == {named["step"]}


@pytest.mark.soak
def test_a_resumed_program_counts_its_own_steps(tmp_path: Path) -> None:
    """When a job resumes from its last checkpoint and the program begins at another step, then that
    is reported, and the next checkpoint is named by the program's step."""
    directory = tmp_path / "job"
    steps = []
    for options in ("", "--resume"):
        with job(directory, steps=100_000, run_options=options) as running:
            end_when_trained(running)
            outcome = running.end()
        [(_, saved)] = outcome.called("save")
        steps.append((saved["step"], len(outcome.losses())))
        assert ("program_began_elsewhere" in outcome.output) == bool(options)
        for path in (*directory.glob("losses-*.jsonl"), *directory.glob("calls-*.jsonl")):
            path.unlink()
    assert all(4 * (step - 1) <= computed <= 4 * (step + 1) for step, computed in steps)
