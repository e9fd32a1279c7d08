"""
A job that falls apart: nodes that hear no controller any more, and a controller that hears no node any
more. The limits of the process that must notice it are shortened.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.conftest import FAKE
from tests.e2e.jobs import Job, job, left_behind, reached, started, until
from tft.bus.ports import free_address
from tft.bus.zeromq import open_bus

LAUNCHER = "import tft.launcher.run as limits; limits._UNHEARD, limits._LONELY = 2.0, 6.0"
REMINDED = f"{LAUNCHER}; limits._REMINDED = 3.0"
CONTROLLER = "import tft.controller.service as limits; limits.DESERTED, limits.ALL_LOST = 2.0, 4.0"
ENDLESS = (str(FAKE), "3000", "--seconds", "0.05")
LIMIT = 20.0


@contextmanager
def command(name: str, run_dir: Path, *words: str, limits: str = "pass") -> Iterator[Job]:
    """
    Run a `tft` command of a job, with the limits that the statements `limits` set in it.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.with_name(f"{name}.out")
    start = f"{limits}\nfrom tft.cli.main import main\nmain()"
    with started([sys.executable, "-c", start, *words], run_dir, log, alone=True) as running:
        yield running


def shared(*more: str) -> list[str]:
    """
    Return the options that all parts of a job of two nodes share.
    """
    options = ["--adaptor", "fake", "--nnodes", "2", "--job", secrets.token_hex(4)]
    return [*options, "--broker", free_address("127.0.0.1"), *more]


def test_node_ends_when_node_0_is_lost(tmp_path: Path) -> None:
    """When the launcher of node 0 is killed, and its controller with it, then node 1 says that it
    hears no controller, ends with exit code 4, and names the newest checkpoint. It does not end when
    only the controller is killed."""
    run_dir, options = tmp_path / "run", shared("--checkpoint-every", "10")
    with (
        job(run_dir, *options, script=FAKE, arguments=ENDLESS[1:], nproc=1) as first,
        command(
            "node-1", run_dir, "run", *options, "--node-rank", "1", "--run-dir", str(run_dir),
            *ENDLESS, limits=LAUNCHER,
        ) as second,
    ):  # fmt: skip
        until(reached(first, 20), "step 20")
        before = first.pid("controller")
        os.kill(before, 9)
        until(lambda: first.pid("controller") != before, "a new controller")
        until(reached(first, 40), "step 40")
        assert second.process.poll() is None
        first.process.kill()
        outcome = second.end(LIMIT)
        until(lambda: left_behind(run_dir) == [], "the end of all processes")

    assert outcome.code == 4, outcome.output
    assert "s, still waiting: without one, this node ends 4 s from now" in outcome.output
    assert "for 6 s: this node ends, without a last checkpoint" in outcome.output
    assert "is the newest checkpoint: the same command, with" in outcome.output


def test_node_that_is_led_elsewhere_waits_for_the_controller(tmp_path: Path) -> None:
    """When `tft lead` is killed, then a node says again and again that it hears no controller, and
    trains on. When the same `tft lead` is started again, the node says that it hears a controller."""
    run_dir, options = tmp_path / "run", shared("--nnodes", "1", "--run-dir", str(tmp_path / "run"))
    with command(
        "node-0", run_dir, "run", *options, "--led-elsewhere", *ENDLESS, limits=REMINDED
    ) as node:
        with command("lead-0", run_dir, "lead", *options):
            until(reached(node, 5), "step 5")
        until(lambda: "for 2 s, still waiting: if `tft lead` does" in node.output(), "a word")
        until(lambda: "for 6 s, and this node trains on" in node.output(), "a reminder")
        assert node.process.poll() is None
        with command("lead-1", run_dir, "lead", *options):
            until(lambda: "a controller is heard again" in node.output(), "a controller")
            asked = [sys.executable, "-m", "tft", "dump", "--run-dir", str(run_dir)]
            subprocess.run(asked, check=True, timeout=LIMIT)
            assert node.end(LIMIT).code == 3


async def test_job_fails_when_all_nodes_are_lost(tmp_path: Path) -> None:
    """When all nodes are killed at once, then the controller says that no node is connected, and then
    takes all of them as lost: the job fails with a report."""
    run_dir, options = tmp_path / "run", shared("--run-dir", str(tmp_path / "run"))
    broker, name = options[options.index("--broker") + 1], options[options.index("--job") + 1]
    nodes = ("run", *options, "--led-elsewhere", "--node-rank")
    port = broker.rpartition(":")[2]
    async with open_bus(broker, job=name, sender="run.-1/0", topics=[]):
        with (
            command("broker", run_dir, "broker", "--port", port),
            command("controller", run_dir, "controller", *options, limits=CONTROLLER) as leading,
        ):
            # a controller is refused in a directory in which a launcher is at work already
            until((run_dir / "job.json").exists, "the controller")
            with (
                command("node-0", run_dir, *nodes, "0", *ENDLESS) as first,
                command("node-1", run_dir, *nodes, "1", *ENDLESS) as second,
            ):
                until(reached(first, 20), "step 20")
                first.process.kill()
                second.process.kill()
                outcome = leading.end(LIMIT)

    assert (outcome.code, outcome.report["result"]) == (4, "failed"), outcome.output
    (incident,) = outcome.incidents
    evidence = "no node has been connected to the bus for 4 s"
    assert {fault["evidence"] for fault in incident["faults"]} == {evidence}
    assert [remark["event"] for remark in outcome.report["remarks"]] == ["no_node_heard"]
