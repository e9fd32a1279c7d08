"""
Jobs with warm processes (`--warm-ranks`): the next incarnation of a lost rank has run the script
already, and the job ends as the undisturbed one does.
"""

import re
from pathlib import Path

import pytest

from tests.e2e.conftest import GPT_STEPS
from tests.e2e.jobs import Job, Outcome, identical, job, strike, until
from tests.e2e.test_lost_node import nodes, struck

STEPS = ("--steps", str(GPT_STEPS))


def logged(run_dir: Path, event: str, agent: str = "agent-0") -> list[str]:
    """
    Return the lines of an agent's log with this event.
    """
    log = (run_dir / "logs" / f"{agent}.log").read_text()
    return [line for line in log.splitlines() if f"event={event} " in line]


def waits(run_dir: Path, count: int, agent: str = "agent-0") -> None:
    """
    Wait until `count` warm processes of a node have come to the first use of the session.
    """
    until(
        lambda: len(logged(run_dir, "warm_process_waits", agent)) >= count,
        f"warm process {count} of {agent}", 60.0,
    )  # fmt: skip


def replaced(running: Job, rank: int, number: int) -> None:
    """
    Wait until chaos has stopped the rank and warm process `number` waits, and kill the rank.
    """
    where = running.run_dir
    until(lambda: (where / "chaos" / f"{number - 1}-1.json").exists(), "the strike", 60.0)
    waits(where, number)
    strike(running, f"rank-{rank}")


@pytest.mark.soak
def test_lost_ranks_are_replaced_by_warm_processes(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When two ranks are lost, one after the other, then a warm process takes the place of each. The
    job ends as the undisturbed one does, on every rank."""
    chaos = [
        word
        for stop in ("stop:rank=2,step=12,phase=backward", "stop:rank=1,step=20,phase=update")
        for word in ("--chaos", stop)
    ]
    with job(tmp_path / "run", "--warm-ranks", "1", *chaos, arguments=STEPS) as running:
        replaced(running, 2, 1)
        replaced(running, 1, 2)
        outcome = running.end()
    assert outcome.code == 0, outcome.output
    started = [line for line in logged(outcome.run_dir, "rank_started") if "incarnation=1" in line]
    assert [re.findall(r"rank=(\d+) .* how=(\w+)", line) for line in started] == [
        [("2", "warm")],
        [("1", "warm")],
    ]
    assert [incident["steps_lost"] for incident in outcome.incidents] == [0, 0]
    identical(outcome, gpt_undisturbed)


@pytest.mark.soak
def test_node_with_room_has_warm_processes(tmp_path: Path, gpt_undisturbed: Outcome) -> None:
    """When a node is lost, and another node has room for its ranks and two warm processes, then the
    ranks start there in these processes, and no step is lost."""
    where = tmp_path / "run"
    stop = ("--chaos", "stop:rank=2,step=12,phase=update")
    with nodes(where, "--warm-ranks", "2", *stop) as (first, second, spare):
        until(lambda: struck(where), "the strike", 60.0)
        waits(where, 2, "agent-2")
        strike(second, "agent-1")
        outcome = first.end()
        spare.end()
    assert outcome.code == 0, outcome.output
    assert [line.split("how=")[1] for line in logged(where, "rank_started", "agent-2")] == [
        "warm",
        "warm",
    ]
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)
    identical(outcome, gpt_undisturbed)
