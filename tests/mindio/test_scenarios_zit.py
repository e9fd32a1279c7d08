"""
Tests of MindIO's downgrade and upgrade: a job continues with fewer ranks, and later with all again.
"""

import array
import json
from pathlib import Path
from typing import Any

import pytest

from tests.mindio.jobs import Job, Outcome, calls, finish, job, trains_on, until
from tests.mindio.test_jobs import HALVES
from tests.mindio.test_orchestrated import heard

SCALE_IN, SCALE_OUT = '{"scale-in-strategy":"DP"}', '{"scale-out-strategy":"DP"}'


def whole_again(running: Job) -> None:
    """
    Wait until all ranks train again.
    """
    until("all are back", lambda: len(calls(running, 0, "zit_upgrade_rollback")) == 1)
    trains_on(running)


def left_and_back(directory: Path, groups: list[dict[str, Any]]) -> tuple[Outcome, int]:
    """
    Run a job that loses a process, continues without it, and later has it back.

    `groups` are the replica groups that the program registers, hence `Any`. Returns the outcome and
    the number of the last step.
    """
    with job(
        directory, faults=[[3, 4, "loop", "kill"]], groups=groups, zit=True, arf=False,
        done="done", warms="warm", pace=0.01,
    ) as running:  # fmt: skip
        until("fewer train", lambda: len(calls(running, 0, "zit_downgrade_rebuild")) == 1)
        trains_on(running)
        (running.directory / "warm").touch()
        whole_again(running)
        return finish(running)


def away(outcome: Outcome, steps: int) -> dict[int, list[int]]:
    """
    Return, by rank, the steps that the job trained without this rank.
    """
    losses = outcome.losses()
    missing = {
        rank: [step for step in range(1, steps + 1) if (rank, step) not in losses]
        for rank in range(outcome.world)
    }
    return {rank: without for rank, without in missing.items() if without}


def assert_computed(
    outcome: Outcome, steps: int, broken: frozenset[tuple[int, int]] = frozenset()
) -> None:
    """
    Check that every step has the total of exactly the ranks that trained it.

    `broken` has the ranks and steps whose loss was computed but is in no total.
    """
    assert not any(outcome.codes), outcome.output
    losses = outcome.losses()
    numbers = [0.0] * 100
    for step in range(1, steps + 1):
        told = []
        for rank in range(outcome.world):
            if (rank, step) in losses:
                drawn = (rank + 1) * 0.37 + step * 0.11
                assert losses[rank, step] == {(drawn + numbers[0]).hex()}, (rank, step)
                if (rank, step) not in broken:
                    told.append(drawn + numbers[0])
        total = json.loads(json.dumps(sum(told)))
        numbers = [total / (index + 1) for index in range(len(numbers))]
    assert outcome.finals() == {array.array("d", numbers).tobytes().hex()}


def assert_flow(outcome: Outcome, lost: int, steps: int) -> None:
    """
    Check that rank `lost` was away for one stretch of steps, and that MindIO's call order was kept.
    """
    stay = [rank for rank in range(4) if rank != lost]
    assert_computed(outcome, steps)
    assert outcome.strategies == ["scale_in", "scale_out"]
    [(who, steps_away)] = away(outcome, steps).items()
    assert (who, steps_away) == (lost, list(range(steps_away[0], steps_away[-1] + 1)))
    assert outcome.ranks_called("stop") == outcome.ranks_called("clean") == sorted(stay * 2)
    down = outcome.called("zit_downgrade_rebuild")
    assert [rank for rank, _ in down] == stay
    for _, call in down:
        assert (call["group"], call["members"], call["params"]) == (stay, stay, SCALE_IN)
    up = outcome.called("zit_upgrade_rebuild")
    assert [(rank, call["ranks"], call["params"]) for rank, call in up] == [
        (rank, [lost], SCALE_OUT) for rank in range(4)
    ]
    assert outcome.ranks_called("zit_upgrade_rollback") == [0, 1, 2, 3]
    assert outcome.called("rollback") == outcome.called("rebuild") == []
    received = [call for rank, call in outcome.called("repair") if rank == lost]
    assert [(call["repair_type"], call["dst"]) for call in received] == [(3, [lost])]
    assert len(outcome.called("zit_upgrade_repair")) == len(outcome.called("repair")) == 2
    reboots = [call["reboot"] for rank, call in outcome.called("started") if rank == lost]
    assert reboots == [False, True]


@pytest.mark.soak
def test_a_job_trains_with_fewer_ranks_until_the_lost_rank_is_back(tmp_path: Path) -> None:
    """When a process is killed and may not be replaced, then the other three form groups and train
    on. When another process is ready for the rank, then all form groups again and it receives its
    part. No step is counted twice or skipped."""
    outcome, steps = left_and_back(tmp_path / "job", HALVES)
    assert_flow(outcome, 3, steps)


@pytest.mark.soak
def test_a_whole_model_replica_leaves_and_returns_with_its_lost_rank(tmp_path: Path) -> None:
    """When every model replica is spread over two ranks and one of them is lost, then both leave.
    The living one waits in its process, and both receive their parts when both can return."""
    pairs = [
        {"rank_list": ranks, "replica_cnt": 2, "replica_shift": 0} for ranks in ([0, 2], [1, 3])
    ]
    outcome, steps = left_and_back(tmp_path / "job", pairs)
    assert_computed(outcome, steps, frozenset({(2, 4)}))
    assert outcome.strategies == ["scale_in", "scale_out"]
    down = [(r, c["group"], c["members"]) for r, c in outcome.called("zit_downgrade_rebuild")]
    assert down == [(0, [0], [0, 1]), (1, [1], [0, 1])]
    assert [c["ranks"] for _, c in outcome.called("zit_upgrade_rebuild")] == [[2, 3]] * 4
    received = {(c["src"][0], c["dst"][0]) for _, c in outcome.called("repair")}
    assert received == {(0, 2), (1, 3)}
    assert [rank for rank, _ in outcome.called("started")] == [0, 1, 2, 3, 3]


@pytest.mark.soak
def test_a_job_trains_without_two_lost_ranks_until_both_are_back(tmp_path: Path) -> None:
    """When another process is killed while the job trains without one, then the job trains on
    without both, and both return."""
    with job(
        tmp_path / "job", faults=[[3, 4, "loop", "kill"], [1, 0, "loop", "kill"]], zit=True,
        arf=False, done="done", warms="warm", pace=0.01,
    ) as running:  # fmt: skip
        until("three train", lambda: len(calls(running, 0, "zit_downgrade_rebuild")) == 1)
        trains_on(running)
        (running.directory / "strike").touch()
        until("two train", lambda: len(calls(running, 0, "zit_downgrade_rebuild")) == 2)
        trains_on(running)
        (running.directory / "warm").touch()
        until("all are back", lambda: calls(running, 0, "zit_upgrade_rollback") != [])
        trains_on(running)
        outcome, steps = finish(running)
    assert_computed(outcome, steps)
    assert outcome.strategies[:2] == ["scale_in", "scale_in"]
    assert set(outcome.strategies[2:]) == {"scale_out"}
    assert sorted(away(outcome, steps)) == [1, 3]
    members = [
        call["members"] for rank, call in outcome.called("zit_downgrade_rebuild") if not rank
    ]
    assert members[:2] == [[0, 1, 2], [0, 2]]


@pytest.mark.soak
def test_no_rank_leaves_when_a_needed_function_is_not_registered(tmp_path: Path) -> None:
    """When a program may lose ranks and has not registered all functions that are needed for that,
    then a message says so at the start, and a lost rank leads to a last checkpoint."""
    with job(
        tmp_path / "job", faults=[[3, 4, "loop", "kill"]], zit=True, arf=False,
        without=["zit_upgrade_rollback"],
    ) as running:  # fmt: skip
        outcome = running.end()
    assert "ranks_cannot_leave" in outcome.output
    assert "zit_upgrade_rollback" in outcome.output
    assert outcome.strategies == ["dump"]
    assert outcome.called("zit_downgrade_rebuild") == []


REPORTS = ["exit", "dump", "recover", "downgrade"]


@pytest.mark.soak
@pytest.mark.parametrize("rank", [1, 3])
def test_a_cluster_can_choose_the_downgrade_and_the_upgrade(tmp_path: Path, rank: int) -> None:
    """When the cluster chooses the downgrade although a replacement is offered, then it is told
    which ranks have left (201) and that the others train. It orders `upgrade` when it has brought
    the rank back, and is told that all ranks train."""
    with job(
        tmp_path / "job", faults=[[rank, 4, "loop", "kill"]], groups=HALVES, zit=True, done="done",
        warms="warm", pace=0.01, orchestrated=True, run_options="--orchestrated",
    ) as running:  # fmt: skip
        until("three train", lambda: len(calls(running, 0, "report_result")) == 2)
        trains_on(running)
        say(running, "upgrade")
        (running.directory / "warm").touch()
        whole_again(running)
        outcome, steps = finish(running)
    assert_flow(outcome, rank, steps)
    assert heard(outcome) == [
        ("fault_ranks", [(rank, 1)]), ("stop_complete", 0), ("strategies", REPORTS),
        ("result", (201, "downgrade")), ("result", (0, "downgrade")), ("result", (0, "upgrade")),
    ]  # fmt: skip
    assert next(iter(calls(running, 0, "report_result")))["ranks"] == [rank]


def say(running: Job, choice: str) -> None:
    """
    Let rank 0 send this choice for the cluster, and wait until it has done so.
    """
    part = running.directory / "choose.part"
    part.write_text(choice)
    part.rename(running.directory / "choose")
    until(f"{choice} is said", lambda: calls(running, 0, "chosen") != [])
