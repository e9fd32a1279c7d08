"""
A node that is killed and started again at once, before its loss is noticed; and a node that is
started twice.
"""

import os
import secrets
import signal
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from tests.e2e.jobs import ROOT, Job, job, reached, until
from tft.bus.ports import free_address

STEPS = 100
SCRIPT = ROOT / "tests" / "e2e" / "fake_job.py"


def options() -> list[str]:
    """
    Return the options that the launchers of a job have in common.
    """
    shared = ["--job", secrets.token_hex(4), "--broker", free_address("127.0.0.1")]
    return [*shared, "--adaptor", "fake", "--nnodes", "2"]


def started(run_dir: Path, node: int, shared: list[str]) -> AbstractContextManager[Job]:
    """
    Start the launcher of a node with one rank.
    """
    arguments = [str(STEPS), "--seconds", "0.03"]
    return job(
        run_dir, *shared, "--node-rank", str(node), script=SCRIPT, arguments=arguments, nproc=1
    )


def test_node_that_is_started_again_at_once_is_taken_in(tmp_path: Path) -> None:
    """When a node is killed and started again before the controller has noticed its loss, then the
    new agent is taken in: the rank of the node is lost with the earlier agent and starts again there
    with the rank-local state that the other node has kept. The job trains all steps."""
    shared = options()
    with ExitStack() as opened:

        def start(node: int) -> Job:
            return opened.enter_context(started(tmp_path / "run", node, shared))

        first, second = start(0), start(1)
        until(reached(first, 10), "step 10", 20.0)
        os.kill(second.process.pid, signal.SIGKILL)  # the kernel ends its children with it
        second.process.wait()
        again = start(1)
        outcome = first.end(30.0)
        assert (outcome.code, again.end(10.0).code) == (0, 0), outcome.output
    (incident,) = outcome.incidents
    assert [(fault["kind"], fault["rank"]) for fault in incident["faults"]] == [("node", 1)]
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)
    assert outcome.rows().keys() == {(r, step) for r in (0, 1) for step in range(1, STEPS + 1)}
    assert outcome.finals()[0] == outcome.finals()[1]


@pytest.mark.soak
def test_second_launcher_of_a_living_node_changes_nothing(tmp_path: Path) -> None:
    """When a launcher is started by mistake for a node whose agent is there, then the agent of this
    launcher is not taken in, and the job has no incident."""
    shared = options()
    with ExitStack() as opened:

        def start(node: int, where: str) -> Job:
            return opened.enter_context(started(tmp_path / where, node, shared))

        first, second = start(0, "run"), start(1, "run")
        until(reached(first, 5), "step 5", 20.0)
        other = start(1, "other")
        controller = tmp_path / "run" / "logs" / "controller.log"
        until(lambda: "node_taken" in controller.read_text(), "the warning", 20.0)
        outcome = first.end(30.0)
        assert (outcome.code, second.end(10.0).code) == (0, 0), outcome.output
        other.end(10.0)
    assert outcome.incidents == []
