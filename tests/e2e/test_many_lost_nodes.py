"""
A job that loses a node twenty times, at random moments. `tft lead` leads it, two nodes train, and one
has room. Each lost node is followed by a new one with room.
"""

import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.benchmarks.peers.systems import process
from tests.e2e.jobs import MARK, Job, identical, job, left_behind, run, until
from tests.e2e.test_many_kills import last_step
from tft.bus.ports import free_address

LOSSES = 20
EVERY = 5
"""The steps between the moment at which a node has room, and the next loss."""
STEPS = 250 * LOSSES
"""A new node needs the time of 80 to 150 steps until it has room."""
NPROC = 2
STEP = 0.05
"""A loss comes up to this many seconds after its step has begun."""
LIMIT = 1200.0
NODE = "TFT_TEST_NODE"
"""The environment variable that tells the processes of one node from those of the others."""


@contextmanager
def lead(where: Path, *shared: str) -> Iterator[subprocess.Popen[bytes]]:
    """
    Start `tft lead`, and end it at the end of the block.
    """
    command = [
        sys.executable, "-m", "tft", "lead", "--nproc-per-node", str(NPROC), "--run-dir", str(where),
        "--max-incidents", str(2 * LOSSES), "--max-rank-faults", str(2 * LOSSES), *shared,
    ]  # fmt: skip
    log = where.with_name("lead.out")
    with process(log, *command, environment={MARK: str(where)}) as leading:
        yield leading


class Nodes:
    """
    The nodes of a job. `shared` are the options that they have in common with `tft lead`.
    """

    def __init__(self, opened: ExitStack, where: Path, shared: Sequence[str]) -> None:
        self._opened, self._where, self._shared = opened, where, shared
        self.running: dict[int, Job] = {}

    def start(self, number: int) -> None:
        """
        Start the node with this number. Nodes 0 and 1 have ranks of their own, others only room.
        """
        options = ("--spare", str(NPROC)) if number > 1 else ()
        self.running[number] = self._opened.enter_context(
            job(
                self._where, "--led-elsewhere", "--node-rank", str(number), *self._shared, *options,
                nproc=NPROC, arguments=("--steps", str(STEPS)), environment={NODE: self._mark(number)},
            )
        )  # fmt: skip

    def lose(self, rank: int) -> None:
        """
        Kill all processes of the node on which `rank` trains.
        """
        pid = self._job.pid(f"rank-{rank}")
        (number,) = (each for each in self.running if pid in self._processes(each))
        for pid in self._processes(number):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        del self.running[number]

    @property
    def _job(self) -> Job:
        return next(iter(self.running.values()))

    def _mark(self, number: int) -> str:
        return f"{self._where}-{number}"

    def _processes(self, number: int) -> list[int]:
        needle = os.fsencode(f"{NODE}={self._mark(number)}\0")
        found = []
        for pid in left_behind(self._where):
            with suppress(OSError):
                if needle in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    def await_room(self, number: int) -> None:
        """
        Wait until the node with this number can start processes: its store, which is forked from the
        same process as they are, is open.
        """
        story = self._where / "story.jsonl"
        opened = re.compile(rf'"StoreOpened".*"node": ?{number}\b')
        until(
            lambda: story.exists() and opened.search(story.read_text()) is not None,
            f"node {number}", 60.0,
        )  # fmt: skip


def await_steps(run_dir: Path, steps: int) -> None:
    """
    Wait until rank 0 has begun so many further steps.
    """
    path = run_dir / "steps-rank0.jsonl"
    step = last_step(path) + steps
    until(lambda: last_step(path) >= step, f"step {step}", 60.0)


@pytest.mark.soak
@pytest.mark.timeout(2 * LIMIT)
def test_a_job_survives_twenty_lost_nodes(tmp_path: Path) -> None:
    """When nodes are lost one after the other, at random moments, and a node has room each time, then
    no step is lost, each incident is one `recover` that takes at most a second after the loss is
    known, and losses and digests of all ranks are those of the undisturbed job."""
    draw = random.Random(11)
    calm = run(tmp_path / "calm", arguments=("--steps", str(STEPS)), limit=LIMIT)
    where = tmp_path / "run"
    shared = ("--nnodes", "2", "--job", secrets.token_hex(4), "--broker", free_address("127.0.0.1"))
    with ExitStack() as opened, lead(where, *shared) as leading:
        nodes = Nodes(opened, where, shared)
        for number in (0, 1, 2):
            nodes.start(number)
        for loss in range(LOSSES):
            nodes.await_room(loss + 2)
            await_steps(where, EVERY)
            time.sleep(draw.uniform(0, STEP))
            nodes.lose(draw.randrange(2 * NPROC))
            nodes.start(loss + 3)
        outcomes = [each.end(LIMIT) for each in nodes.running.values()]
        assert leading.wait(LIMIT) == 0, where.with_name("lead.out").read_text()
    assert {each.code for each in outcomes} == {0}, outcomes[0].output
    identical(outcomes[0], calm)
    incidents = outcomes[0].incidents
    found = [
        {name: each[name] for name in ("strategy", "steps_lost", "unprotected", "seconds")}
        for each in incidents
    ]
    (tmp_path / "found.json").write_text(
        json.dumps({"unprotected": outcomes[0].report["unprotected_steps"], "incidents": found})
    )
    assert [each["strategy"] for each in incidents] == ["recover"] * LOSSES
    for each in incidents:
        assert {fault["kind"] for fault in each["faults"]} <= {"node", "process", "network"}, each
        assert each["steps_lost"] == len(each["unprotected"]) == 0, each
        assert each["seconds"]["total"] <= 1.0, each["seconds"]
