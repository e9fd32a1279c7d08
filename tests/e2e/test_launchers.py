"""
Unchanged scripts that are started by torchrun, in the way of srun, or by hand. They call only
`tft.init`.

`make test` runs one job under torchrun with a rank killed. `make soak` runs the rest of the table.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.conftest import FAKE
from tests.e2e.jobs import (
    MARK,
    ROOT,
    TRAIN,
    Job,
    Outcome,
    identical,
    left_behind,
    reached,
    run,
    strike,
    until,
)
from tft.bus.ports import free_address

LIMIT = 60.0
STEPS = 100
WORLD = 2
FAST = (str(FAKE), str(STEPS))
PYTHON = [sys.executable]


def torchrun(*options: str, world: int = WORLD) -> list[str]:
    """
    Return the beginning of a torchrun command line. torchrun chooses a free port for its store.
    """
    return [*PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", str(world), *options]


def of_srun(rank: int) -> dict[str, str]:
    """
    Return the environment variables that srun gives to the process of `rank` in a job step on one
    machine.
    """
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(WORLD),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "a07",
    }


def by_hand(rank: int) -> dict[str, str]:
    """
    Return the environment variables that a shell script gives to the process of `rank`.
    """
    return {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "localhost"}


@contextmanager
def started(
    run_dir: Path,
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    *options: str,
    cwd: Path = ROOT,
) -> Iterator[list[Job]]:
    """
    Start each command with its environment variables, and yield the jobs.

    At the end, kill all remaining processes by their process ids.
    """
    told = {"TFT_RUN_OPTIONS": shlex.join(["--run-dir", str(run_dir), *options])}
    jobs: list[Job] = []
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    try:
        for command, variables in commands:
            log = run_dir.with_name(f"{run_dir.name}-{len(list(run_dir.parent.glob('*.out')))}.out")
            with log.open("w") as out:
                process = subprocess.Popen(
                    command, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, text=True,
                    start_new_session=True,
                    env={**os.environ, **told, **variables, MARK: str(run_dir)},
                )  # fmt: skip
            jobs.append(Job(process, run_dir, log))
        yield jobs
    finally:
        for pid in left_behind(run_dir):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for job in jobs:
            job.process.kill()
            job.process.wait()


@contextmanager
def under_torchrun(
    run_dir: Path, *script: str, more: Sequence[str] = (), options: Sequence[str] = ()
) -> Iterator[Job]:
    """
    Start a job under torchrun. `script` is a script file, or `-m` and a module, with its arguments.
    """
    with started(run_dir, [(torchrun(*more) + list(script), {})], *options) as [job]:
        yield job


def ended(job: Job) -> Outcome:
    """
    Wait for the end of a job, check that it leaves no process behind, and return its outcome.
    """
    outcome = job.end(LIMIT)
    until(lambda: left_behind(job.run_dir) == [], "an empty node", limit=2.0)
    return outcome


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of the fast job without a fault, started in the way of srun.
    """
    run_dir = tmp_path_factory.mktemp("srun") / "run"
    port = {"MASTER_PORT": free_address("127.0.0.1").rpartition(":")[2]}
    commands = [([*PYTHON, *FAST], of_srun(rank) | port) for rank in range(WORLD)]
    with started(run_dir, commands, "--adaptor", "fake") as jobs:
        outcomes = [ended(job) for job in jobs]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    return outcomes[0]


@pytest.mark.soak
def test_a_job_of_srun_completes(undisturbed: Outcome) -> None:
    """When srun starts a script twice, then the two processes train together, each as the node of
    its rank."""
    assert undisturbed.report["result"] == "completed"
    assert undisturbed.report["steps"] == STEPS
    assert sorted(undisturbed.finals()) == list(range(WORLD))


@pytest.mark.soak
def test_a_rank_that_dies_is_replaced_below_torchrun(tmp_path: Path, undisturbed: Outcome) -> None:
    """When a rank of a job of torchrun is killed with kill -9, then it is replaced below torchrun,
    whose own processes stay. The losses are those of an undisturbed run, and torchrun exits 0."""
    with under_torchrun(tmp_path / "run", *FAST, options=("--adaptor", "fake")) as job:
        until(reached(job, 20), "step 20", LIMIT)
        nodes = [job.pid("run"), job.pid("run-1")]
        assert [parent(pid) for pid in nodes] == [job.process.pid] * WORLD
        strike(job, "rank-1")
        outcome = ended(job)
        assert [job.pid("run"), job.pid("run-1")] == nodes
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)
    assert [fault["rank"] for fault in incident["faults"]] == [1]
    identical(outcome, undisturbed)


def parent(pid: int) -> int:
    """
    Return the process id of the parent of `pid`.
    """
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# ---------------------------------------------------------------- jobs that run only in `make soak`


@pytest.mark.soak
def test_a_job_of_srun_whose_nodes_cannot_be_resolved_is_refused_in_one_line(
    tmp_path: Path,
) -> None:
    """When the node names of srun cannot be resolved, then each process prints one line that says
    what to do, and exits with 2. Nothing is started and no directory is made."""
    nodes = {"SLURM_STEP_NODELIST": "node-[07-08].invalid"}
    commands = [
        ([*PYTHON, *FAST], of_srun(rank) | nodes | {"SLURM_NODEID": str(rank)})
        for rank in range(WORLD)
    ]
    with started(tmp_path / "run", commands, "--adaptor", "fake", "--insecure") as jobs:
        outcomes = [ended(job) for job in jobs]
    for outcome in outcomes:
        assert outcome.code == 2
        [line] = outcome.output.splitlines()
        assert line.startswith("tft: the address of process 0, node-07.invalid, cannot be resolved")
        assert line.endswith("set MASTER_ADDR to an address that all machines can resolve")
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_a_job_started_by_hand_completes(tmp_path: Path, undisturbed: Outcome) -> None:
    """When processes are started with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, then they
    train together like those of srun."""
    port = {"MASTER_PORT": free_address("127.0.0.1").rpartition(":")[2]}
    commands = [([*PYTHON, *FAST], by_hand(rank) | port) for rank in range(WORLD)]
    with started(tmp_path / "run", commands, "--adaptor", "fake") as jobs:
        outcomes = [ended(job) for job in jobs]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    identical(outcomes[0], undisturbed)


@pytest.mark.soak
def test_the_exit_code_of_tft_is_that_of_the_launched_processes(tmp_path: Path) -> None:
    """When a job of srun ends with a last checkpoint after a user's own bug, then each of its
    processes exits with 3, and the checkpoint exists."""
    port = {"MASTER_PORT": free_address("127.0.0.1").rpartition(":")[2]}
    command = [*PYTHON, *FAST, "--bug", "1,20"]
    commands = [(command, of_srun(rank) | port) for rank in range(WORLD)]
    with started(tmp_path / "run", commands, "--adaptor", "fake") as jobs:
        outcomes = [ended(job) for job in jobs]
    assert [outcome.code for outcome in outcomes] == [3, 3], outcomes
    assert "the same start, with --run-dir" in outcomes[0].output
    assert any((tmp_path / "run" / "checkpoints").glob("step-00000019"))


@pytest.mark.soak
def test_two_torchruns_of_one_job_share_a_run_directory(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """When a torchrun on each of two machines starts a process, without a name for the job, then
    the processes find each other through the store of the first torchrun, and share one generated
    run directory."""
    endpoint = free_address("127.0.0.1").rpartition(":")
    runs = [
        torchrun(
            "--nnodes", "2", "--node-rank", str(node),
            "--master-addr", endpoint[0], "--master-port", endpoint[2], world=1,
        )
        for node in range(2)
    ]  # fmt: skip
    nowhere = {"TFT_RUN_OPTIONS": "--adaptor fake"}
    commands = [([*run, *FAST], nowhere) for run in runs]
    with started(tmp_path / "run", commands, cwd=tmp_path) as jobs:
        outcomes = [job.end(LIMIT) for job in jobs]
        until(lambda: left_behind(tmp_path / "run") == [], "an empty node", limit=2.0)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    [run_dir] = (tmp_path / "tft-runs").iterdir()
    identical(Outcome(code=0, output="", run_dir=run_dir), undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_the_example_under_torchrun_survives_a_killed_rank(victim: int, tmp_path: Path) -> None:
    """When a rank of the example is killed under torchrun, then losses and final state are bit for
    bit those of an undisturbed `tft run`."""
    arguments = ("--steps", "30")
    expected = run(tmp_path / "expected", arguments=arguments, nproc=WORLD)
    assert expected.code == 0, expected.output
    with under_torchrun(tmp_path / "run", str(TRAIN), *arguments) as job:
        until(reached(job, 10), "step 10", LIMIT)
        strike(job, f"rank-{victim}")
        outcome = ended(job)
    assert outcome.code == 0, outcome.output
    assert [incident["strategy"] for incident in outcome.incidents] == ["recover"]
    identical(outcome, expected)


@pytest.mark.soak
def test_a_job_resumes_from_the_checkpoint_of_a_torchrun_ended_by_signal(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """When torchrun gets a signal to end, then there is a last checkpoint, and the same start with
    the same run directory resumes from it without a difference."""
    fake = ("--adaptor", "fake")
    with under_torchrun(tmp_path / "run", *FAST, options=fake) as job:
        until(reached(job, 20), "step 20", LIMIT)
        os.kill(job.pid("run"), signal.SIGTERM)
        until(lambda: "SIGTERM: the job is to end" in job.output(), "an answer")
        # torchrun passes the signal on, so that the same process gets it again
        job.process.send_signal(signal.SIGTERM)
        outcome = ended(job)
    assert outcome.code != 0
    assert outcome.report["result"] == "cancelled"
    with under_torchrun(tmp_path / "run", *FAST, options=fake) as job:
        outcome = ended(job)
    assert outcome.code == 0, outcome.output
    assert "it goes on from step-" in outcome.output
    identical(outcome, undisturbed)


@pytest.mark.soak
def test_a_killed_process_of_torchrun_ends_the_job_with_a_last_checkpoint(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """When one of torchrun's own processes, except the first, is killed with kill -9, then torchrun
    ends the others, which save a last checkpoint, and no process is left. That checkpoint lacks the
    rank-local state of the lost rank. If a restart is allowed, the job therefore resumes from the
    newest periodic checkpoint."""
    with under_torchrun(
        tmp_path / "run", *FAST, more=("--max-restarts", "1"),
        options=("--adaptor", "fake", "--checkpoint-every", "7"),
    ) as job:  # fmt: skip
        until(reached(job, 20), "step 20", LIMIT)
        strike(job, "run-1")
        outcome = ended(job)
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("the records of this run") == 2
    assert (
        "of ranks [1], which had left the job or were lost with their node: it can be loaded"
        in outcome.output
    )
    assert "not resumed; it is set aside" in outcome.output
    assert "it goes on from step-" in outcome.output
    assert any((tmp_path / "run" / "checkpoints").glob("step-*.given-up"))
    identical(outcome, undisturbed)


@pytest.mark.soak
def test_without_a_restart_no_process_is_left(tmp_path: Path) -> None:
    """When a process of torchrun is killed and no restart is allowed, then torchrun ends as failed
    and a last checkpoint exists, but no message offers to resume from it."""
    with under_torchrun(tmp_path / "run", *FAST, options=("--adaptor", "fake")) as job:
        until(reached(job, 20), "step 20", LIMIT)
        strike(job, "run-1")
        outcome = ended(job)
    assert outcome.code != 0
    assert any((tmp_path / "run" / "checkpoints").glob("step-????????"))
    assert "it can be loaded by hand, but not resumed" in outcome.output
    assert "continues from it" not in outcome.output


@pytest.mark.soak
def test_a_restart_without_checkpoint_begins_at_the_first_step(tmp_path: Path) -> None:
    """When the first of torchrun's processes is killed, and the controller with it, then a restart
    finds no checkpoint, reports that, and begins at the first step in the same run directory."""
    with under_torchrun(
        tmp_path / "run", *FAST, more=("--max-restarts", "1"), options=("--adaptor", "fake")
    ) as job:
        until(reached(job, 20), "step 20", LIMIT)
        strike(job, "run")
        outcome = ended(job)
    assert outcome.code == 0, outcome.output
    assert "the job begins again" in outcome.output


@pytest.mark.soak
def test_a_script_finds_its_launchers_variables_and_arguments(tmp_path: Path) -> None:
    """When torchrun starts a module, then its ranks find LOCAL_RANK and LOCAL_WORLD_SIZE as
    torchrun set them, the command-line arguments, and the modules beside it."""
    package = tmp_path / "placed"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "neighbour.py").write_text(
        "names = ['LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK']\n"
    )
    (package / "job.py").write_text(
        "import array, json, os, sys, tft\n"
        "from .neighbour import names\n"
        "arguments, sys.argv = sys.argv[1:], ['changed']\n"
        "session = tft.init()\n"
        "found = [[os.environ[name] for name in names], arguments]\n"
        "(session.run_dir / f'found-{session.rank}.json').write_text(json.dumps(found))\n"
        "class Model:\n"
        "    values = array.array('d', [0.0])\n"
        "session.adopt(model=Model())\n"
        "session.run(lambda session: None)\n"
    )
    command = torchrun("-m", "placed.job", "--mine", "a b")
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with started(tmp_path / "run", [(command, path)], "--adaptor", "fake") as [job]:
        outcome = ended(job)
    assert outcome.code == 0, outcome.output
    for rank in range(WORLD):
        found = json.loads((tmp_path / "run" / f"found-{rank}.json").read_text())
        assert found == [[str(rank), str(WORLD), "0"], ["--mine", "a b"]]
