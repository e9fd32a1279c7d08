"""
Requests of users to a running job: pauses, checks, last checkpoints, and a smaller job.

The processes are real, and the adaptor is the fake one.
"""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped] # it has no types
import pytest

from tests.agent.stage import package
from tests.e2e.conftest import FAKE, FAKE_STEPS
from tests.e2e.jobs import Job, Outcome, identical, job, left_behind, reached, run, strike, until
from tft.bus.ports import free_address

CHECKS = """
from tft.spi import CheckResult, hookimpl

@hookimpl
def tft_check(session, name):
    if name != "lamps":
        return None
    (session.run_dir / f"checked-{session.rank}").touch()
    out = session.run_dir / f"out-{session.rank}"
    if not out.exists():
        return CheckResult(verdict="pass")
    return CheckResult(verdict=out.read_text(), finding="a lamp is out")
"""
"""The source of a plugin with a check. The check finds a fault at rank R if the run directory has a
file `out-R`."""


@pytest.fixture
def lamps(tmp_path: Path) -> dict[str, str]:
    """
    Return the environment variables of a job that has a plugin with the check `lamps`.
    """
    (tmp_path / "packages").mkdir()
    package(tmp_path / "packages", "lamps", CHECKS, "tft.plugins")
    return {"PYTHONPATH": str(tmp_path / "packages")}


ARGUMENTS = (str(FAKE_STEPS), "--seconds", "0.04")
"""The steps take longer than in other fast jobs, because a command of `tft` takes a second to start
on a busy machine."""


@contextmanager
def calm(run_dir: Path, *, environment: dict[str, str] | None = None) -> Iterator[Job]:
    """
    Start the fast job with four ranks, and yield it when rank 0 has reached step 20.
    """
    with job(
        run_dir, "--adaptor", "fake", script=FAKE, arguments=ARGUMENTS, environment=environment
    ) as running:
        until(reached(running, 20), "step 20")
        yield running


@contextmanager
def on_two_nodes(
    run_dir: Path, *options: str, environment: dict[str, str] | None = None
) -> Iterator[tuple[Job, Job]]:
    """
    Start the fast job on two nodes of this machine, and yield both when rank 0 has reached step 20.

    The controller runs on the first node.
    """
    shared = ("--job", secrets.token_hex(4), "--broker", free_address("127.0.0.1"), "--nnodes", "2")

    def node(number: int):  # type: ignore[no-untyped-def] # returns the context manager of `job`
        return job(
            run_dir, "--adaptor", "fake", *shared, "--node-rank", str(number), *options,
            script=FAKE, arguments=ARGUMENTS, nproc=2, environment=environment,
        )  # fmt: skip

    with node(0) as first, node(1) as second:
        until(reached(first, 20), "step 20")
        yield first, second


def steps(running: Job) -> set[int]:
    """
    Return how many steps each rank has begun, as a set of the different numbers.
    """
    files = running.run_dir.glob("steps-rank*.jsonl")
    return {path.read_text().count("\n") for path in files}


def resumed(where: Path) -> Outcome:
    """
    Run the fast job again from its last checkpoint, and return its outcome.
    """
    return run(where, "--adaptor", "fake", "--resume", script=FAKE, arguments=(str(FAKE_STEPS),))


# ---------------------------------------------------------------- pauses


def test_a_paused_job_resumes_with_the_losses_of_the_undisturbed_run(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When a job is paused, twice, then all ranks stay at one step until it is resumed. Then they
    train on in the same processes and groups, with the same losses, and there is no incident."""
    with calm(tmp_path / "run") as running:
        before = [running.pid(f"rank-{rank}") for rank in range(4)]
        for _ in range(2):
            assert running.asked("pause")[0] == 0
            [step] = steps(running)
            # this request is refused, because the job is paused already
            assert running.asked("pause")[0] == 2
            assert steps(running) == {step}
            assert running.asked("resume")[0] == 0
            until(reached(running, step + 5), "further steps")
        assert [running.pid(f"rank-{rank}") for rank in range(4)] == before
        outcome = running.end()
    assert outcome.code == 0, outcome.output
    assert outcome.incidents == []
    identical(outcome, fake_undisturbed)
    log = (outcome.run_dir / "logs" / "controller.log").read_text()
    assert log.count("state=repairing") == 1  # the ranks formed groups only at the start


@pytest.mark.soak
def test_a_job_resumes_by_itself_after_a_passed_check(
    tmp_path: Path, lamps: dict[str, str], fake_undisturbed: Outcome
) -> None:
    """When every rank passes the check, then the job resumes by itself. An unknown check is
    reported as not passed, and the job resumes too."""
    with calm(tmp_path / "run", environment=lamps) as running:
        code, said = running.asked("pause", "--check", "lamps")
        assert code == 0, said
        assert len(list(running.run_dir.glob("checked-*"))) == 4
        code, said = running.asked("pause", "--check", "fuses")
        assert code == 4
        assert "no installed plugin has a check named 'fuses' (rank 0, 1, 2, 3)" in said
        outcome = running.end()
    assert outcome.code == 0, outcome.output
    assert outcome.incidents == []
    identical(outcome, fake_undisturbed)


@pytest.mark.soak
def test_a_fault_in_a_pause_is_repaired_and_the_job_stays_paused(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When a rank is killed while the job is paused, then it is replaced, the job stays paused
    until it is resumed, and no step is lost."""
    with calm(tmp_path / "run") as running:
        assert running.asked("pause")[0] == 0
        before = running.pid("rank-2")
        strike(running, "rank-2")
        until(lambda: running.pid("rank-2") != before, "a new process for rank 2")
        log = running.run_dir / "logs" / "controller.log"
        until(lambda: log.read_text().count("state=paused") == 2, "another pause")
        assert len(steps(running)) == 1
        assert running.asked("resume")[0] == 0
        outcome = running.end()
    assert outcome.code == 0, outcome.output
    identical(outcome, fake_undisturbed)
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)


@pytest.mark.soak
def test_a_controller_that_dies_in_a_pause_resumes_the_job_on_request(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When the controller is killed while the job is paused, then its successor knows of the pause,
    and resumes the job on request."""
    with calm(tmp_path / "run") as running:
        assert running.asked("pause")[0] == 0
        before = running.pid("controller")
        strike(running, "controller")
        until(lambda: running.pid("controller") != before, "a new controller")
        code, said = running.asked("resume")
        assert code == 0, said
        outcome = running.end()
    assert outcome.code == 0, outcome.output
    identical(outcome, fake_undisturbed)


# ---------------------------------------------------------------- health checks that report a fault


@pytest.mark.soak
def test_a_node_that_fails_a_check_is_left_out_of_the_last_checkpoint(
    tmp_path: Path, lamps: dict[str, str], fake_undisturbed: Outcome
) -> None:
    """When a check isolates a node and no other node has room for its ranks, then its processes are
    ended, and the others save a last checkpoint that can be resumed without a lost step."""
    where = tmp_path / "run"
    options = ("--enable", "retry,recover,dump")
    with on_two_nodes(where, *options, environment=lamps) as (first, second):
        (where / "out-3").write_text("isolate")
        code, said = first.asked("pause", "--check", "lamps")
        assert code == 4
        assert "a lamp is out (rank 3)" in said
        outcome = first.end()
        second.end()
        until(lambda: left_behind(where) == [], "an empty node", limit=5.0)
    assert outcome.code == 3, outcome.output
    (incident,) = outcome.incidents
    assert {(f["kind"], f["rank"]) for f in incident["faults"]} == {("node", 2), ("node", 3)}
    assert (incident["strategy"], incident["steps_lost"]) == ("dump", 0)
    with on_two_nodes(where, "--resume") as (first, second):
        again = first.end()
        second.end()
    assert again.code == 0, again.output
    identical(again, fake_undisturbed)


@pytest.mark.soak
def test_a_check_can_end_the_job_with_a_last_checkpoint(
    tmp_path: Path, lamps: dict[str, str]
) -> None:
    """When a check says that the job must end, then the job ends with a last checkpoint and the
    check's message."""
    with calm(tmp_path / "run", environment=lamps) as running:
        (running.run_dir / "out-1").write_text("end")
        assert running.asked("pause", "--check", "lamps")[0] == 4
        outcome = running.end()
    assert outcome.code == 3, outcome.output
    assert "a lamp is out (rank 1)" in outcome.report["why"]


# ---------------------------------------------------------------- last checkpoints on request


@pytest.mark.soak
def test_a_requested_dump_can_be_resumed(tmp_path: Path, fake_undisturbed: Outcome) -> None:
    """When a dump is requested, then the job ends with a last checkpoint and exit code 3, and with
    --resume it trains on without a difference. A dump of an ended job is refused."""
    with calm(tmp_path / "run") as running:
        code, said = running.asked("dump", "--why", "the rack is moved")
        assert code == 0, said
        outcome = running.end()
        assert running.asked("dump")[0] == 2
    assert outcome.code == 3, outcome.output
    assert outcome.report["result"] == "dumped"
    assert "the rack is moved" in outcome.report["why"]
    [saved] = (tmp_path / "run" / "checkpoints").iterdir()
    assert json.loads((saved / "manifest.json").read_text())["world"] == 4
    assert str(saved) in said
    again = resumed(tmp_path / "run")
    assert again.code == 0, again.output
    identical(again, fake_undisturbed)


@pytest.mark.soak
def test_a_paused_job_can_be_dumped(tmp_path: Path, fake_undisturbed: Outcome) -> None:
    """When a job is dumped while it is paused, then no completed step is lost."""
    with calm(tmp_path / "run") as running:
        assert running.asked("pause")[0] == 0
        [step] = steps(running)
        assert running.asked("dump")[0] == 0
        outcome = running.end()
    assert outcome.code == 3, outcome.output
    # The ranks had begun step `step` and had completed its all-reduces. The dump may therefore
    # complete this step.
    assert outcome.report["steps"] in (step - 1, step)
    again = resumed(tmp_path / "run")
    assert again.code == 0, again.output
    identical(again, fake_undisturbed)


# ---------------------------------------------------------------- copies, and fewer ranks


def test_a_polluted_update_is_undone_from_the_copies_of_the_step_before(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When a fault may have polluted all ranks in the last update, then all ranks return to the
    copy of the step before, and compute the later steps again with the same losses."""
    outcome = run(
        tmp_path / "run", "--adaptor", "fake", "--backup-every", "1",
        script=FAKE, arguments=(str(FAKE_STEPS), "--spread", "1,30"),
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    identical(outcome, fake_undisturbed)
    (incident,) = outcome.incidents
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [("numeric", 1, 30)]
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("retry", 29, 1)
    assert incident["pids_kept"] is True


@pytest.mark.soak
def test_a_job_that_may_scale_in_completes_without_a_lost_node(tmp_path: Path) -> None:
    """When a node is lost and the adaptor supports fewer ranks, then the other ranks train on
    without it and complete the job."""
    where = tmp_path / "run"
    with on_two_nodes(where) as (first, second):
        strike(second, "agent-1")
        outcome = first.end()
        second.end()
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    assert {f["rank"] for f in incident["faults"]} >= {2, 3}
    assert (incident["strategy"], incident["steps_lost"]) == ("scale_in", 0)
    rows = outcome.rows()
    assert {(rank, FAKE_STEPS) in rows for rank in (0, 1)} == {True}
    assert sorted(outcome.finals()) == [0, 1]


@pytest.mark.soak
def test_a_node_that_stood_still_too_long_joins_again(tmp_path: Path) -> None:
    """When all processes of a node are stopped for so long that the node counts as lost, and then go
    on, then the ranks of this node end, start anew, and train with the others again."""
    where = tmp_path / "run"
    shared = ("--job", secrets.token_hex(4), "--broker", free_address("127.0.0.1"), "--nnodes", "2")
    words = ("--adaptor", "fake", *shared, "--node-rank")
    arguments = ("700", "--seconds", "0.05")
    with (
        job(where, *words, "0", script=FAKE, arguments=arguments, nproc=2) as first,
        job(where, *words, "1", script=FAKE, arguments=arguments, nproc=2) as second,
    ):
        until(reached(first, 20), "step 20")
        launcher = psutil.Process(second.process.pid)
        stopped = [launcher, *launcher.children(recursive=True)]
        for process in stopped:
            process.suspend()
        until(lambda: "incident 1:" in first.output(), "fewer ranks", 40)
        for process in stopped:
            if process.is_running():
                process.resume()
        until(lambda: "incident 2:" in first.output(), "all ranks again", 40)
        outcome = first.end()
        second.end()
    assert outcome.code == 0, outcome.output
    shrinks, *later = (each["strategy"] for each in outcome.incidents)
    assert (shrinks, set(later)) == ("scale_in", {"scale_out"})  # each rank comes as it is ready
    assert sorted(outcome.finals()) == [0, 1, 2, 3]
