"""
Tests with MindSpore's real launcher msrun and this repository's package `taskd`.

msrun starts the processes of a job when tft asks for them. Most jobs use the fake adaptor; one
trains with MindSpore. `make test-mindspore` runs the first tests, and with `-m soak` the others.
"""

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import FAKE
from tests.e2e.jobs import (
    ROOT,
    Job,
    Outcome,
    identical,
    left_behind,
    reached,
    run,
    started,
    strike,
    until,
)
from tests.mindspore.conftest import EXAMPLE
from tests.mindspore.conftest import STEPS as EXAMPLE_STEPS
from tft.bus.ports import free_address

pytestmark = pytest.mark.timeout(240)  # msrun imports MindSpore, and some tests start it twice

LIMIT = 100.0
WORLD = 4
STEPS = 150
FAST = (str(FAKE), str(STEPS))
KEYS = {"MS_ENABLE_TFT": "{TTP:1,ARF:1}"}


@contextmanager
def msrun(
    run_dir: Path,
    *script: str,
    keys: Mapping[str, str] = KEYS,
    words: Sequence[str] = (),
    world: int = WORLD,
    local: int | None = None,
    port: int = 0,
    options: Sequence[str] = ("--adaptor", "fake"),
) -> Iterator[Job]:
    """
    Start a job with msrun in its own directory and yield it; kill its remaining processes by pid.

    The job has one node, unless `local` gives the number of ranks on this node.
    """
    where = run_dir.with_name(f"{run_dir.name}-{len(list(run_dir.parent.glob('*-ms')))}-ms")
    where.mkdir(parents=True)
    port = port or int(free_address("127.0.0.1").rpartition(":")[2])
    log = where / "out"
    bin_directory = Path(sys.executable).parent  # msrun starts the first `python` in PATH
    command = [
        str(bin_directory / "msrun"),
        "--worker_num", str(world), "--local_worker_num", str(world if local is None else local),
        "--master_port", str(port), "--log_dir", "logs", *words, *script,
    ]  # fmt: skip
    path = [str(ROOT), str(ROOT / "adaptors" / "mindio_ttp" / "src")]
    if already := os.environ.get("PYTHONPATH"):
        path.append(already)
    told = {
        "TFT_RUN_OPTIONS": shlex.join(["--run-dir", str(run_dir), *options]),
        "PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path),
    }
    with started(command, run_dir, log, where=where, environment={**told, **keys}) as launcher:
        yield launcher


def ended(job: Job) -> Outcome:
    """
    Wait for the end of a job and return the outcome. All its processes must end, also msrun's
    scheduler.
    """
    outcome = job.end(LIMIT)
    empty(job)
    return outcome


def empty(job: Job) -> None:
    """
    Wait until no process of the job exists any more.
    """
    until(lambda: left_behind(job.run_dir) == [], "an empty node", limit=10.0)


def logs(job: Job, tmp_path: Path) -> Path:
    """
    Return the directory of the logs that msrun writes for its processes.
    """
    return tmp_path / f"{job.run_dir.name}-0-ms" / "logs"


def ranks(job: Job) -> list[int]:
    """
    Return the pids of all ranks.
    """
    return [job.pid(f"rank-{rank}") for rank in range(WORLD)]


def parent(pid: int) -> int:
    """
    Return the pid of a process's parent.
    """
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of the same job, started by `tft run`, without a fault.
    """
    where = tmp_path_factory.mktemp("fake") / "undisturbed"
    outcome = run(where, "--adaptor", "fake", script=FAKE, arguments=(str(STEPS),), nproc=WORLD)
    assert outcome.code == 0, outcome.output
    return outcome


def test_msrun_restarts_only_the_rank_that_died(tmp_path: Path, undisturbed: Outcome) -> None:
    """When a rank is killed with kill -9, and later rank 0, then msrun starts each of them again,
    the others keep their processes, msrun ends with 0, and losses are those of the undisturbed run.
    The output of a killed process is kept."""
    with msrun(tmp_path / "run", *FAST, words=["--join", "True"]) as job:
        for step, victim in ((20, 1), (70, 0)):
            until(reached(job, step), f"step {step}", LIMIT)
            before = ranks(job)
            assert [parent(pid) for pid in before] == [job.process.pid] * WORLD
            strike(job, f"rank-{victim}")
            part = f"rank-{victim}"
            until(lambda old=before[victim], name=part: job.pid(name) != old, "a start")  # type: ignore[misc]
            after = ranks(job)
            assert [rank for rank in range(WORLD) if before[rank] != after[rank]] == [victim]
        outcome = ended(job)
        written = sorted(path.name for path in logs(job, tmp_path).iterdir())
    assert outcome.code == 0, outcome.output
    assert [incident["strategy"] for incident in outcome.incidents] == ["recover", "recover"]
    assert [incident["steps_lost"] for incident in outcome.incidents] == [0, 0]
    identical(outcome, undisturbed)
    kept = ["worker_0.0.log", "worker_1.0.log"]
    assert written == sorted(["scheduler.log", *(f"worker_{n}.log" for n in range(WORLD)), *kept])


@pytest.mark.parametrize(
    "victim",
    [pytest.param("msrun", marks=pytest.mark.soak), pytest.param("run", marks=pytest.mark.soak)],
)
def test_no_process_is_left_of_a_job_whose_msrun_is_killed(victim: str, tmp_path: Path) -> None:
    """When msrun, or the `tft run` below it, is killed with kill -9, then all ranks and the
    scheduler end."""
    with msrun(tmp_path / "run", *FAST) as job:
        until(reached(job, 20), "step 20", LIMIT)
        if victim == "msrun":
            job.process.kill()
        else:
            strike(job, victim)
        code = job.process.wait(LIMIT)
        empty(job)
    assert code == (-signal.SIGKILL if victim == "msrun" else 4), job.output()


def test_a_missing_node_number_is_refused_before_the_scheduler_starts(tmp_path: Path) -> None:
    """When a job of several nodes gives no node number, then msrun ends with 2 and a message, and
    no process was started."""
    with msrun(tmp_path / "run", *FAST, local=2) as job:
        outcome = ended(job)
        written = list(logs(job, tmp_path).iterdir())
    assert outcome.code == 2, outcome.output
    assert "--node_rank must be 0 to 1 on the 2 machines of this job, but is -1" in outcome.output
    assert written == []


@pytest.mark.soak
def test_without_features_msrun_starts_its_processes_itself(tmp_path: Path) -> None:
    """When no feature is enabled, then msrun starts its processes itself, and their environment has
    no variable of tft."""
    script = tmp_path / "plain.py"
    script.write_text(
        "import os\n"
        "names = ['TFT_ASIDE', 'TFT_REAPER', 'TFT_PARENT', 'TFT_JOB']\n"
        "print(os.environ['MS_ROLE'], [name for name in names if name in os.environ])\n"
    )
    with msrun(tmp_path / "run", str(script), keys={}, words=["--join", "True"]) as job:
        outcome = ended(job)
        said = [path.read_text() for path in logs(job, tmp_path).iterdir()]
    assert outcome.code == 0, outcome.output
    assert sorted(said) == ["MS_SCHED []\n", *["MS_WORKER []\n"] * WORLD]
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_a_killed_rank_of_the_mindspore_example_is_restarted_by_msrun(
    tmp_path: Path, calm_pair: Outcome
) -> None:
    """When a rank of the MindSpore example is killed under msrun, with only process control
    enabled, then losses and final state are bit for bit those of an undisturbed `tft run`."""
    # one thread is the default of `tft run`, but msrun leaves the number to MindSpore
    keys = {"MS_ENABLE_TFT": "{RSC:1}", "OMP_NUM_THREADS": "1"}
    script = (str(EXAMPLE), "--steps", str(EXAMPLE_STEPS))
    with msrun(tmp_path / "run", *script, keys=keys, world=2, options=()) as job:
        until(reached(job, 10), "step 10", LIMIT)
        strike(job, "rank-1")
        outcome = ended(job)
    assert outcome.code == 0, outcome.output
    assert [incident["strategy"] for incident in outcome.incidents] == ["recover"]
    identical(outcome, calm_pair)


# ---------------------------------------------------------------- jobs that run only in `make soak`


@pytest.mark.soak
def test_a_bug_ends_msrun_with_the_exit_code_of_tft_run(tmp_path: Path) -> None:
    """
    When a rank raises an error of the script's own, then there is a last checkpoint and msrun ends with 3.
    """
    with msrun(tmp_path / "run", *FAST, "--bug", "1,20") as job:
        outcome = ended(job)
    assert outcome.code == 3, outcome.output
    assert any((tmp_path / "run" / "checkpoints").glob("step-00000019"))
    assert "a bug of the user's own" in outcome.output


@pytest.mark.soak
def test_two_msruns_start_a_job_of_two_nodes(tmp_path: Path, undisturbed: Outcome) -> None:
    """When an msrun on each of two nodes starts half of the ranks, then they join at the ports
    after the scheduler's, and a killed rank is started again by its own msrun."""
    port = int(free_address("127.0.0.1").rpartition(":")[2])
    with ExitStack() as opened:
        jobs = [
            opened.enter_context(
                msrun(
                    tmp_path / "run", *FAST, local=2, port=port, words=["--node_rank", str(number)]
                )
            )
            for number in range(2)
        ]
        until(reached(jobs[0], 20), "step 20", LIMIT)
        assert parent(jobs[0].pid("rank-3")) == jobs[1].process.pid
        strike(jobs[0], "rank-3")
        outcomes = [job.end(LIMIT) for job in jobs]
        empty(jobs[0])
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert [incident["strategy"] for incident in outcomes[0].incidents] == ["recover"]
    identical(outcomes[0], undisturbed)


@pytest.mark.soak
def test_the_next_msrun_resumes_from_the_checkpoint_of_a_requested_stop(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """When msrun gets a signal to end, then it exits 143 after a last checkpoint, and the same
    start resumes from it."""
    with msrun(tmp_path / "run", *FAST) as job:
        until(reached(job, 20), "step 20", LIMIT)
        job.process.send_signal(signal.SIGTERM)
        outcome = ended(job)
    assert outcome.code == 143, outcome.output
    with msrun(tmp_path / "run", *FAST) as job:
        outcome = ended(job)
    assert outcome.code == 0, outcome.output
    assert "it goes on from step-" in outcome.output
    identical(outcome, undisturbed)
