"""
A rank goes to another process while the job trains: MindIO's hot switch, and what may come between.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.mindio.expected import assert_expected
from tests.mindio.jobs import LIMIT, Job, Outcome, job
from tests.mindio.test_jobs import HALVES
from tests.mindio.test_orchestrated import heard


def until(what: str, holds: Callable[[], bool]) -> None:
    """
    Waits for a fact.
    """
    limit = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < limit, f"waited in vain until {what}"
        time.sleep(0.02)


def calls(running: Job, rank: int, what: str) -> list[dict[str, Any]]:
    """
    What a rank has noted so far.
    """
    path = running.directory / f"calls-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    noted = [json.loads(line) for line in lines if line.endswith("}")]
    return [each for each in noted if each["what"] == what]


def finish(running: Job) -> tuple[Outcome, int]:
    """
    Have the job come to its end; what came of it, and after how many steps.
    """
    (running.directory / "done").touch()
    outcome = running.end()
    last = running.directory / "last"
    return outcome, int(last.read_text()) if last.exists() else 0


def test_a_rank_is_switched_to_another_node_while_the_job_trains(tmp_path: Path) -> None:
    """
    When rank 0, which speaks for the cluster, asks for rank 3 to be switched, then another process is made
    ready on the node that has room while all train on. All stop at the end of a step; nothing is stopped,
    cleaned or lost; the new process forms groups with the others and gets its part from rank 1.
    """
    with job(
        tmp_path / "job", orchestrated=True, run_options="--orchestrated", groups=HALVES,
        switch=[3], done="done",
    ) as running:  # fmt: skip
        until("the job trains", (running.directory / "losses-3.jsonl").exists)
        running.node(1, "--spare", "1")
        until("it is switched", lambda: bool(calls(running, 0, "report_result")))
        outcome, steps = finish(running)
    assert_expected(outcome, steps)
    assert outcome.strategies == ["migrate"]
    assert heard(outcome) == [
        ("strategies", ["exit", "dump", "migration"]), ("result", (0, "migration")),
    ]  # fmt: skip
    for what in ("stop", "clean"):
        assert outcome.called(what) == []
    for what in ("rebuild", "rollback"):
        assert outcome.ranks_called(what) == [0, 1, 2, 3]
    assert {(c["src"][0], c["dst"][0]) for _, c in outcome.called("repair")} == {(1, 3)}
    began = [(c["reboot"], c["type"]) for rank, c in outcome.called("started") if rank == 3]
    assert began == [(False, "arf"), (True, "hot switch")]
    [incident] = outcome.report["incidents"]
    assert incident["steps_lost"] == 0
