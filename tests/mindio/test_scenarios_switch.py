"""
Tests of MindIO's hot switch, which moves a rank to another process while the job trains.

The tests also cover faults and decisions during the switch.
"""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.mindio.expected import assert_expected
from tests.mindio.jobs import Job, Outcome, calls, finish, job, trains_on, until
from tests.mindio.test_jobs import HALVES
from tests.mindio.test_orchestrated import heard
from tests.mindio.test_scenarios_mindspore import MINDSPORE, PROGRAM, finals


@contextmanager
def switching(
    directory: Path, *ranks: int, spare: int = 1, **options: Any
) -> Iterator[Job]:  # Any: options of the program
    """
    Start a job on one node, add a spare node, and request a hot switch of `ranks` to the spare
    node.

    Rank 0 speaks for the cluster.
    """
    with job(
        directory / "job", orchestrated=True, run_options="--orchestrated", groups=HALVES, done="done",
        **options,
    ) as running:  # fmt: skip
        until("the job trains", (running.directory / "losses-3.jsonl").exists)
        if spare:
            running.node(1, "--spare", str(spare))
        prepare(running, "hot switch", *ranks)
        yield running


def prepare(running: Job, action: str, *ranks: int) -> None:
    """
    Let rank 0 request the preparation of `action` for `ranks`, and wait until it has done so.
    """
    said = len(calls(running, 0, "prepared"))
    part = running.directory / "prepare.part"
    part.write_text(json.dumps([action, ranks]))
    part.rename(running.directory / "prepare.json")
    until(f"it is asked for: {action}", lambda: len(calls(running, 0, "prepared")) > said)


def results(running: Job) -> list[tuple[int, str]]:
    """
    Return the results that the controller has reported to the cluster so far.
    """
    return [(each["code"], each["strategy"]) for each in calls(running, 0, "report_result")]


def processes(outcome: Outcome, rank: int) -> list[tuple[bool, str]]:
    """
    Return, for each process of a rank, whether it is a replacement and of which type.
    """
    return [(c["reboot"], c["type"]) for each, c in outcome.called("started") if each == rank]


def pairs(outcome: Outcome) -> set[tuple[int, int]]:
    """
    Return the sending and the receiving rank of each repair.
    """
    return {(call["src"][0], call["dst"][0]) for _, call in outcome.called("repair")}


OFFER = ("strategies", ["exit", "dump", "migration"])
FIRST, SUCCESSOR = (False, "arf"), (True, "hot switch")


@pytest.mark.soak
def test_a_rank_is_switched_to_another_node_while_the_job_trains(tmp_path: Path) -> None:
    """When rank 0, which speaks for the cluster, asks to switch rank 3, then a successor becomes
    ready on the node with room while all ranks train on. All ranks stop at the end of a step; no
    stop or clean function is called and no step is lost; the successor forms groups with the others
    and gets its part from rank 1."""
    with switching(tmp_path, 3) as running:
        until("it is switched", lambda: bool(results(running)))
        outcome, steps = finish(running)
    assert_expected(outcome, steps)
    assert outcome.strategies == ["migrate"]
    assert heard(outcome) == [OFFER, ("result", (0, "migration"))]
    for what in ("stop", "clean"):
        assert outcome.called(what) == []
    for what in ("rebuild", "rollback"):
        assert outcome.ranks_called(what) == [0, 1, 2, 3]
    assert pairs(outcome) == {(1, 3)}
    assert processes(outcome, 3) == [FIRST, SUCCESSOR]
    [incident] = outcome.report["incidents"]
    assert incident["steps_lost"] == 0


@pytest.mark.soak
def test_a_successor_that_another_launcher_starts_takes_over(
    tmp_path: Path,
) -> None:
    """When the cluster has asked to switch rank 3 and starts another process for it, as it started
    the first ones, then that process is the successor and takes over. The old pod is deleted after
    that, and the job trains on."""
    with switching(tmp_path, 3, spare=0, launched=True) as running:
        trains_on(running)
        running.another(3)
        until("it is switched", lambda: bool(results(running)))
        running.processes[3].terminate()
        trains_on(running)
        outcome, steps = finish(running)
    assert_expected(outcome, steps)
    assert outcome.strategies == ["migrate"]
    assert processes(outcome, 3) == [FIRST, SUCCESSOR]
    assert pairs(outcome) == {(1, 3)}


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_old_pod_that_is_deleted_before_the_choice_is_switched(
    tmp_path: Path, number: signal.Signals
) -> None:
    """When the old pod is ended or killed with all its processes before the choice, and then the
    migration is chosen, then no further fault is reported."""
    deleted = tmp_path / "deleted"
    with switching(
        tmp_path, 3, spare=0, launched=True, choices={"exit,dump,migration": f"after {deleted}"}
    ) as running:
        running.another(3)
        until("it is offered", lambda: bool(calls(running, 0, "report_strategies")))
        [old, _] = calls(running, 3, "started")
        running.processes[3].send_signal(number)
        until("the old process is gone", lambda: not Path(f"/proc/{old['pid']}").exists())
        deleted.touch()
        until("it is switched", lambda: bool(results(running)))
        outcome, steps = finish(running)
    # a launcher that SIGKILL has ended has this signal as its exit code: do not compare that code
    outcome.codes[3] *= number is signal.SIGTERM
    assert_expected(outcome, steps)
    assert heard(outcome) == [OFFER, ("result", (0, "migration"))]
    assert processes(outcome, 3) == [FIRST, SUCCESSOR]


@pytest.mark.soak
def test_ranks_of_one_pod_are_switched_together(tmp_path: Path) -> None:
    """When ranks 2 and 3 are to be switched, then both are switched in one stop, each with its part
    from another rank."""
    with switching(tmp_path, 2, 3, spare=2) as running:
        until("it is switched", lambda: bool(results(running)))
        outcome, steps = finish(running)
    assert_expected(outcome, steps)
    assert outcome.strategies == ["migrate"]
    assert pairs(outcome) == {(0, 2), (1, 3)}


@pytest.mark.soak
def test_a_program_with_its_own_loop_is_switched(tmp_path: Path) -> None:
    """When a program has no decorator, then the program itself reports the end of a step, and
    waits."""
    with switching(tmp_path, 3, loop=True) as running:
        until("it is switched", lambda: bool(results(running)))
        outcome, steps = finish(running)
    assert_expected(outcome, steps)
    assert processes(outcome, 3) == [FIRST, SUCCESSOR]
    assert outcome.called("clean") == []


@pytest.mark.soak
def test_a_switch_cancelled_during_the_start_ends_the_successor(tmp_path: Path) -> None:
    """When the cluster cancels the switch while the successor starts, then the successor ends and
    all other ranks train on."""
    with switching(tmp_path, 3, warms="warm") as running:
        until("the successor is there", lambda: len(calls(running, 3, "started")) == 2)
        prepare(running, "stop switch")
        successor = calls(running, 3, "started")[1]["pid"]
        until("the successor is gone", lambda: not Path(f"/proc/{successor}").exists())
        trains_on(running)
        outcome, steps = finish(running)
    assert_expected(outcome, steps)
    assert outcome.strategies == []
    assert heard(outcome) == []


@pytest.mark.soak
def test_a_switch_cancelled_at_the_offer_keeps_all_processes(
    tmp_path: Path,
) -> None:
    """When the cluster cancels the switch after it was offered the choice, then all ranks train on
    in their processes."""
    with switching(tmp_path, 3, choices={"exit,dump,migration": "stop switch"}) as running:
        until("all go on", lambda: bool(results(running)))
        outcome, steps = finish(running)
    assert_expected(outcome, steps)
    assert outcome.strategies == ["retry"]
    assert heard(outcome) == [OFFER, ("result", (0, ""))]
    assert outcome.called("repair") == []


@pytest.mark.soak
def test_a_successor_that_dies_before_it_is_ready_ends_the_switch(tmp_path: Path) -> None:
    """When the successor dies before it is ready, then the cluster gets the result 406, and the job
    trains on."""
    with switching(tmp_path, 3, faults=[[3, 1, "replaced", "kill"]]) as running:
        until("it is told", lambda: results(running) == [(406, "hot switch")])
        trains_on(running)
        outcome, steps = finish(running)
    assert_expected(outcome, steps)
    assert outcome.strategies == []


@pytest.mark.soak
def test_a_fault_while_the_successor_starts_is_repaired_before_the_switch(
    tmp_path: Path,
) -> None:
    """When rank 3 itself loses its memory while its successor starts, then rank 3 is repaired, and
    the successor takes over when it is ready."""
    with switching(
        tmp_path, 3, warms="warm", faults=[[3, 0, "loop", "UCE ERROR"]],
        choices={"exit,dump,retry,recover": "retry"},
    ) as running:  # fmt: skip
        until("the successor is there", lambda: len(calls(running, 3, "started")) == 2)
        (running.directory / "strike").touch()
        until("it is repaired", lambda: results(running) == [(0, "retry")])
        (running.directory / "warm").touch()
        until("it is switched", lambda: (0, "migration") in results(running))
        outcome, steps = finish(running)
    assert_expected(outcome, steps)
    assert outcome.strategies == ["retry", "migrate"]
    assert processes(outcome, 3) == [FIRST, SUCCESSOR]


@pytest.mark.soak
def test_a_rank_lost_while_its_successor_starts_is_replaced_by_it(tmp_path: Path) -> None:
    """When rank 3 dies while its successor starts, then the successor takes the rank, and no other
    process is started."""
    with switching(tmp_path, 3, warms="warm", faults=[[3, 0, "loop", "kill"]]) as running:
        until("the successor is there", lambda: len(calls(running, 3, "started")) == 2)
        (running.directory / "strike").touch()
        until("it is lost", (running.directory / "struck-0").exists)
        (running.directory / "warm").touch()
        until("it is replaced", lambda: results(running) == [(0, "recover")])
        outcome, steps = finish(running)
    assert_expected(outcome, steps)
    assert processes(outcome, 3) == [FIRST, SUCCESSOR]


@pytest.mark.soak
def test_a_program_like_mindspores_is_switched(tmp_path: Path) -> None:
    """When the program has MindSpore's loop, then the successor reports its start, continues at
    once, and later reports that it is ready. All ranks come to the end of a step and continue at
    the step for which they ask."""
    with job(
        tmp_path / "job", program=PROGRAM, environment=MINDSPORE, orchestrated=True, done="done",
        run_options="--orchestrated",
    ) as running:  # fmt: skip
        until("the job trains", (running.directory / "losses-3.jsonl").exists)
        running.node(1, "--spare", "1")
        prepare(running, "hot switch", 3)
        until("it is switched", lambda: bool(results(running)))
        outcome, steps = finish(running)
    assert not any(outcome.codes), outcome.output
    with job(tmp_path / "calm", program=PROGRAM, environment=MINDSPORE, steps=steps) as undisturbed:
        assert finals(outcome) == finals(undisturbed.end())
    assert outcome.strategies == ["migrate"]
    assert processes(outcome, 3) == [FIRST, SUCCESSOR]
    assert pairs(outcome) == {(1, 3)}
    for what in ("stop", "clean"):
        assert outcome.called(what) == []
