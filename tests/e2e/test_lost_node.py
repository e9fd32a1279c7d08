"""
The loss of a node. Another node keeps the rank-local state of its ranks, so a node with room takes
the ranks at the step that all have completed. Without room, a last checkpoint has it.
"""

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import GPT_STEPS
from tests.e2e.jobs import Job, Outcome, identical, job, strike, until
from tft import checkpoint
from tft.bus.ports import free_address
from tft.checkpoint import CheckpointStore

EVERY = 5
STEPS = ("--steps", str(GPT_STEPS))


def newest(run_dir: Path) -> int:
    """
    Return the step of the newest valid checkpoint, or 0 if there is none.
    """
    found = checkpoint.newest(CheckpointStore(directory=run_dir / "checkpoints"))
    return 0 if found is None else checkpoint.verify(found).step


@contextmanager
def nodes(where: Path, *options: str, spares: int = 1, resume: bool = False) -> Iterator[list[Job]]:
    """
    Start two nodes with two ranks each, and `spares` nodes with room for two ranks.
    """
    shared = ["--job", secrets.token_hex(4), "--broker", free_address("127.0.0.1"), "--nnodes", "2"]
    shared += ["--resume"] if resume else []
    with ExitStack() as opened:
        yield [
            opened.enter_context(
                job(
                    where, *shared, "--node-rank", str(number), *options,
                    *(("--spare", "2") if number > 1 else ()), arguments=STEPS, nproc=2,
                )
            )
            for number in range(2 + spares)
        ]  # fmt: skip


def struck(where: Path) -> bool:
    """
    Return whether chaos has struck its victim.
    """
    return (where / "chaos" / "0-1.json").exists()


def survivors_stand(where: Path, phase: str) -> bool:
    """
    Return whether chaos has struck rank 2 in `phase` of step 12, and ranks 0 and 1 have gone as far
    as they can without it: after the all-reduces of a step they complete it.
    """
    if not struck(where):
        return False
    step = 13 if phase in ("update", "between") else 12
    rows = [where / f"steps-rank{rank}.jsonl" for rank in (0, 1)]
    return all(f'"step": {step},' in path.read_text() for path in rows)


PHASES = ["update", "forward", "backward", "collective", "between"]


@pytest.mark.parametrize(
    "phase", [PHASES[0], *(pytest.param(phase, marks=pytest.mark.soak) for phase in PHASES[1:])]
)
def test_lost_node_costs_no_step_and_no_checkpoint(
    tmp_path: Path, gpt_undisturbed: Outcome, phase: str
) -> None:
    """When all processes of the second of two nodes are killed while one of its ranks stands in the
    named phase of a step, and a spare node has room, then its ranks start there with the rank-local
    state that another node has kept. No step is lost, and the job ends as the undisturbed one on
    one node does."""
    where = tmp_path / "run"
    with nodes(where, "--chaos", f"stop:rank=2,step=12,phase={phase}") as (first, second, spare):
        until(lambda: survivors_stand(where, phase), "the strike", 60.0)
        strike(second, "agent-1")
        outcome = first.end()
        assert [each.end().code == outcome.code for each in (second, spare)] == [False, True]
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    assert {(fault["kind"], fault["rank"]) for fault in incident["faults"]} >= {
        ("node", 2),
        ("node", 3),
    }
    assert (incident["strategy"], incident["processes_started"]) == ("recover", 2)
    assert (incident["steps_lost"], incident["inexact"], incident["unprotected"]) == (0, [], [])
    assert incident["step"] == (12 if phase in ("forward", "backward", "collective") else 13)
    assert not (where / "checkpoints").exists()
    identical(outcome, gpt_undisturbed)


@pytest.mark.soak
def test_node_whose_launcher_is_killed_too_is_lost_at_once(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When the launcher of a node is killed with all other processes of the node, then nobody is left
    there to report it. The node counts as lost because its connections have ended, long before its
    heartbeats are missed, and its ranks do not count as hanging."""
    where = tmp_path / "run"
    with nodes(where, "--chaos", "stop:rank=2,step=12,phase=forward") as (first, second, spare):
        until(lambda: struck(where), "the strike", 60.0)
        os.kill(second.process.pid, signal.SIGKILL)  # the kernel ends its children with it
        outcome = first.end()
        assert spare.end().code == outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    assert {(fault["kind"], fault["rank"]) for fault in incident["faults"]} == {
        ("node", 2),
        ("node", 3),
    }
    assert incident["faults"][0]["evidence"] == "all connections of node 1 to the bus have ended"
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)
    identical(outcome, gpt_undisturbed)


@pytest.mark.soak
def test_last_checkpoint_has_the_state_of_a_lost_node(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When a node is lost and no node has room for its ranks, then the job ends with exit code 3.
    Its last checkpoint has the rank-local state of the lost ranks: the resumed job ends as the
    undisturbed one does."""
    where = tmp_path / "run"
    with nodes(where, "--chaos", "stop:rank=2,step=12,phase=update", spares=0) as (first, second):
        until(lambda: survivors_stand(where, "update"), "the strike", 60.0)
        strike(second, "agent-1")
        outcome = first.end()
        second.end()
    assert outcome.code == 3, outcome.output
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["steps_lost"]) == ("dump", 0)
    assert newest(where) == 12
    with nodes(where, "--chaos", "stop:rank=2,step=12,phase=update", spares=0, resume=True) as both:
        resumed = [each.end() for each in both]
    assert [each.code for each in resumed] == [0, 0], resumed[0].output
    identical(resumed[0], gpt_undisturbed)


@pytest.mark.soak
def test_node_that_is_lost_with_its_keeper_is_a_last_checkpoint(tmp_path: Path) -> None:
    """When a node is lost together with the node that keeps its rank-local state, then that state is
    lost, although a third node has room. The survivors write a last checkpoint, and the report says
    why nothing else was possible."""
    where = tmp_path / "run"
    chaos = "stop:rank=2,step=12,phase=update"
    with nodes(where, "--chaos", chaos, spares=2) as (first, second, keeper, _):
        until(lambda: struck(where), "the strike", 60.0)
        strike(keeper, "agent-2")
        strike(second, "agent-1")
        outcome = first.end()
    assert outcome.code == 3, outcome.output
    (incident,) = outcome.incidents
    assert incident["strategy"] == "dump"
    told = {each["strategy"]: each["why_not"] for each in incident["tried"]}
    assert "were lost with its node" in told["recover"]


@pytest.mark.soak
def test_lost_node_returns_to_a_checkpoint_without_kept_state(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When a node is lost together with the node that keeps its rank-local state, and there is a
    periodic checkpoint, then all ranks return to it, and the job ends as the undisturbed one."""
    where = tmp_path / "run"
    with nodes(where, "--checkpoint-every", str(EVERY), spares=2) as (first, second, keeper, third):
        until(lambda: newest(where) >= EVERY, "a checkpoint", 60.0)
        strike(keeper, "agent-2")
        strike(second, "agent-1")
        outcome = first.end()
        third.end()
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    assert incident["strategy"] == "recover"
    assert 0 <= incident["steps_lost"] <= EVERY + 1
    assert (incident["step"] - 1) % EVERY == 0
    identical(outcome, gpt_undisturbed)
