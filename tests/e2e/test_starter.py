"""
Ranks that another program starts through `tft.spi.launcher`: real processes with a launcher outside
of tft.

`make test` runs the first tests, `make soak` the rest.
"""

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import FAKE, FAKE_STEPS
from tests.e2e.jobs import (
    ROOT,
    Job,
    Outcome,
    identical,
    left_behind,
    reached,
    started,
    strike,
    until,
)
from tft.bus.ports import free_address

LIMIT = 60.0
WORLD = 4
LAUNCHER = ROOT / "tests" / "e2e" / "own_launcher.py"
FAST = (str(FAKE), str(FAKE_STEPS))


@contextmanager
def launched(
    run_dir: Path,
    *script: str,
    options: Sequence[str] = (),
    nnodes: int = 1,
    node: int = 0,
    port: int = 1,
) -> Iterator[Job]:
    """
    Start the launcher of one node in its own directory.

    At the end, kill all remaining processes of the job by their process ids.
    """
    where = run_dir.with_name(f"{run_dir.name}-of-{node}")
    where.mkdir(parents=True, exist_ok=True)
    told = {"TFT_RUN_OPTIONS": shlex.join(["--run-dir", str(run_dir), *options])}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [str(word) for word in (nnodes, node, WORLD // nnodes, port)]
    log = where / "out"
    with started(
        [sys.executable, str(LAUNCHER), *command, *script], run_dir, log, where=where,
        environment={**told, "PYTHONPATH": path},
    ) as launcher:  # fmt: skip
        yield launcher


def ended(job: Job) -> Outcome:
    """
    Wait for the end of a job, check that it leaves no process behind, and return its outcome.
    """
    outcome = job.end(LIMIT)
    empty(job)
    return outcome


def empty(job: Job) -> None:
    """Wait until no process of the job is left."""
    until(lambda: left_behind(job.run_dir) == [], "an empty node", limit=5.0)


def parent(pid: int) -> int:
    """
    Return the process id of the parent of a process.
    """
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ranks(job: Job) -> list[int]:
    """
    Return the process ids of all ranks.
    """
    return [job.pid(f"rank-{rank}") for rank in range(WORLD)]


@pytest.mark.soak
def test_only_the_killed_ranks_of_another_launcher_are_restarted(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When two ranks of a job are killed one after the other, rank 0 among them, then their
    launcher is asked to start only these again. The others keep their processes, all are children
    of the launcher, and losses are those of the undisturbed run. The process without a rank ends
    with the job."""
    with launched(tmp_path / "run", *FAST) as job:
        for step, victim in ((20, 2), (60, 0)):
            until(reached(job, step), f"step {step}", LIMIT)
            before = ranks(job)
            assert [parent(pid) for pid in before] == [job.process.pid] * WORLD
            strike(job, f"rank-{victim}")
            until(lambda old=before[victim], name=f"rank-{victim}": job.pid(name) != old, "a start")  # type: ignore[misc]
            after = ranks(job)
            assert [rank for rank in range(WORLD) if before[rank] != after[rank]] == [victim]
        outcome = ended(job)
    assert outcome.code == 0, outcome.output
    assert f"the scheduler ended with {-signal.SIGKILL}" in outcome.output
    assert [incident["strategy"] for incident in outcome.incidents] == ["recover", "recover"]
    assert [incident["steps_lost"] for incident in outcome.incidents] == [0, 0]
    identical(outcome, fake_undisturbed)


@pytest.mark.parametrize(
    "victim",
    [
        "launcher",
        pytest.param("run", marks=pytest.mark.soak),
        pytest.param("agent-0", marks=pytest.mark.soak),
    ],
)
def test_no_process_is_left_when_launcher_tft_run_or_agent_is_killed(
    victim: str, tmp_path: Path
) -> None:
    """When the launcher, its `tft run` or the agent is killed with kill -9, then all other
    processes end, also the one without a rank, and the job has failed."""
    with launched(tmp_path / "run", *FAST) as job:
        until(reached(job, 10), "step 10", LIMIT)
        if victim == "launcher":
            job.process.kill()
        else:
            strike(job, victim)
        code = job.process.wait(LIMIT)
        empty(job)
    assert code == (-signal.SIGKILL if victim == "launcher" else 4)


@pytest.mark.soak
def test_no_process_is_left_of_a_job_that_has_not_joined(tmp_path: Path) -> None:
    """When the launcher is killed before its ranks have called `tft.init`, then the ranks end
    too."""
    script = tmp_path / "waits.py"
    script.write_text("import signal; signal.pause()")
    with launched(tmp_path / "run", str(script)) as job:
        last = job.run_dir / "pids" / f"rank-{WORLD - 1}.pid"
        until(last.exists, "a process of each rank", LIMIT)
        job.process.kill()
        empty(job)


@pytest.mark.soak
def test_two_launchers_start_a_job_of_two_nodes(tmp_path: Path, fake_undisturbed: Outcome) -> None:
    """When each of two launchers starts half of the ranks, then they join at the address given to
    both, and a rank of the second node is replaced there."""
    port = int(free_address("127.0.0.1").rpartition(":")[2])
    with ExitStack() as opened:
        jobs = [
            opened.enter_context(launched(tmp_path / "run", *FAST, nnodes=2, node=node, port=port))
            for node in range(2)
        ]
        until(reached(jobs[0], 20), "step 20", LIMIT)
        assert parent(jobs[0].pid("rank-3")) == jobs[1].process.pid
        strike(jobs[0], "rank-3")
        outcomes = [job.end(LIMIT) for job in jobs]
        empty(jobs[0])
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert [incident["strategy"] for incident in outcomes[0].incidents] == ["recover"]
    identical(outcomes[0], fake_undisturbed)


def test_invalid_options_are_refused_before_any_process_starts(tmp_path: Path) -> None:
    """When a job of several nodes names no run directory, or sets an option that its launcher
    decides, then it is refused with a message."""
    with launched(tmp_path / "run", *FAST, options=["--nnodes", "3"]) as job:
        outcome = ended(job)
    assert outcome.code == 1
    assert "TFT_RUN_OPTIONS contains --nnodes, which the launcher of the job sets" in outcome.output
    assert not (tmp_path / "run-of-0" / "scheduler-0").exists()


# ---------------------------------------------------------------- jobs that run only in `make soak`


@pytest.mark.soak
def test_a_hanging_rank_is_replaced_and_its_stack_is_kept(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When a rank is stopped, then it is found, its stack is kept as evidence, and its launcher
    kills it and starts it again."""
    with launched(tmp_path / "run", *FAST) as job:
        until(reached(job, 20), "step 20", LIMIT)
        os.kill(job.pid("rank-1"), signal.SIGSTOP)
        outcome = ended(job)
    assert outcome.code == 0, outcome.output
    [incident] = outcome.incidents
    assert incident["strategy"] == "recover"
    assert "fake_job.py" in json_text(outcome.run_dir)
    identical(outcome, fake_undisturbed)


def json_text(run_dir: Path) -> str:
    """
    Return the text of the story file in the run directory.
    """
    return (run_dir / "story.jsonl").read_text()


@pytest.mark.soak
def test_a_job_resumes_from_the_checkpoint_of_a_signalled_launcher(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When the launcher gets a signal to end, then there is a last checkpoint, and the same start
    with the same run directory resumes from it."""
    with launched(tmp_path / "run", *FAST) as job:
        until(reached(job, 20), "step 20", LIMIT)
        job.process.send_signal(signal.SIGTERM)
        outcome = ended(job)
    assert outcome.code == 143, outcome.output
    with launched(tmp_path / "run", *FAST) as job:
        outcome = ended(job)
    assert outcome.code == 0, outcome.output
    assert "it goes on from step-" in outcome.output
    identical(outcome, fake_undisturbed)


@pytest.mark.soak
def test_a_bug_ends_the_job_with_a_last_checkpoint(tmp_path: Path) -> None:
    """When a rank raises an error of the script's own, then the launcher exits 3 after a last
    checkpoint."""
    with launched(tmp_path / "run", *FAST, "--bug", "1,20") as job:
        outcome = ended(job)
    assert outcome.code == 3, outcome.output
    assert any((tmp_path / "run" / "checkpoints").glob("step-00000019"))


@pytest.mark.soak
def test_a_script_that_cannot_be_started_fails_the_job(tmp_path: Path) -> None:
    """When the processes of the ranks end before they join, then the job fails, and no process is
    left."""
    with launched(tmp_path / "run", str(tmp_path / "nowhere.py")) as job:
        outcome = ended(job)
    assert outcome.code == 4, outcome.output


@pytest.mark.soak
def test_a_shell_that_starts_the_script_counts_as_its_rank(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When the launcher starts a shell that starts the script, then the end of either process is
    that of the rank, and no process is left when the launcher is killed."""
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import subprocess, sys; sys.exit(subprocess.run([sys.executable, "
        "*sys.argv[1:]]).returncode)"
    )
    with launched(tmp_path / "run", str(wrapper), *FAST) as job:
        until(reached(job, 20), "step 20", LIMIT)
        strike(job, "rank-1")
        outcome = ended(job)
    assert outcome.code == 0, outcome.output
    identical(outcome, fake_undisturbed)
    with launched(tmp_path / "killed", str(wrapper), *FAST) as job:
        until(reached(job, 20), "step 20", LIMIT)
        job.process.kill()
        empty(job)
