"""
The loss of a node. Another node with room takes its ranks, and all ranks roll back to the newest
checkpoint.
"""

import secrets
from pathlib import Path

from tests.e2e.conftest import GPT_STEPS
from tests.e2e.jobs import Job, Outcome, identical, job, strike, until
from tft import checkpoint
from tft.bus.ports import free_address
from tft.checkpoint import CheckpointStore

EVERY = 10


def newest(run_dir: Path) -> int:
    """
    Return the step of the newest valid checkpoint, or 0 if there is none.
    """
    found = checkpoint.newest(CheckpointStore(directory=run_dir / "checkpoints"))
    return 0 if found is None else checkpoint.verify(found).step


def test_a_spare_node_takes_the_ranks_of_a_lost_node(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When the agent of the second of two nodes is killed, and a spare node has room for its ranks,
    then they start there, all ranks return to the newest checkpoint, and the job ends as the
    undisturbed one on one node does."""
    where = tmp_path / "run"
    shared = ("--job", secrets.token_hex(4), "--broker", free_address("127.0.0.1"), "--nnodes", "2")
    steps = ("--steps", str(GPT_STEPS))

    def node(number: int, *more: str):  # type: ignore[no-untyped-def] # returns the context manager of `job`
        return job(
            where, *shared, "--node-rank", str(number), "--checkpoint-every", str(EVERY), *more,
            arguments=steps, nproc=2,
        )  # fmt: skip

    with node(0) as first, node(1) as second, node(2, "--spare", "2") as spare:
        until(lambda: newest(where) >= EVERY, "a checkpoint", 60.0)
        strike(second, "agent-1")
        outcome = first.end()
        ends: list[Job] = [second, spare]
        assert [each.end().code == outcome.code for each in ends] == [False, True]
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    assert {(fault["kind"], fault["rank"]) for fault in incident["faults"]} >= {
        ("node", 2),
        ("node", 3),
    }
    assert incident["strategy"] == "recover"
    assert incident["processes_started"] == 2
    assert 0 <= incident["steps_lost"] <= EVERY + 1
    assert (incident["step"] - 1) % EVERY == 0
    identical(outcome, gpt_undisturbed)
