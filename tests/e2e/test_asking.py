"""
What people ask of a job that runs, and what they meet: pauses, checks, dumps, a job that shrinks.
Real processes, a fake framework.
"""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
"""A plugin, as somebody would install it: `out-R` in the run directory is a fault at rank R."""


@pytest.fixture
def lamps(tmp_path: Path) -> dict[str, str]:
    """
    The variables of a job that has the plugin with the check `lamps`.
    """
    (tmp_path / "packages").mkdir()
    package(tmp_path / "packages", "lamps", CHECKS, "tft.plugins")
    return {"PYTHONPATH": str(tmp_path / "packages")}


ARGUMENTS = (str(FAKE_STEPS), "--seconds", "0.04")
"""Not quite so fast: a command of `tft` takes a second to start on a busy machine."""


@contextmanager
def calm(run_dir: Path, *, environment: dict[str, str] | None = None) -> Iterator[Job]:
    """
    The fast job, of four ranks, at its twentieth step.
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
    The same on two nodes, which are both here: the first one leads.
    """
    shared = ("--job", secrets.token_hex(4), "--broker", free_address("127.0.0.1"), "--nnodes", "2")

    def node(number: int):  # type: ignore[no-untyped-def] # a context manager of `job`
        return job(
            run_dir, "--adaptor", "fake", *shared, "--node-rank", str(number), *options,
            script=FAKE, arguments=ARGUMENTS, nproc=2, environment=environment,
        )  # fmt: skip

    with node(0) as first, node(1) as second:
        until(reached(first, 20), "step 20")
        yield first, second


def steps(running: Job) -> set[int]:
    """
    How many steps each rank has begun.
    """
    files = running.run_dir.glob("steps-rank*.jsonl")
    return {path.read_text().count("\n") for path in files}


def resumed(where: Path) -> Outcome:
    """
    The fast job again, from its last checkpoint.
    """
    return run(where, "--adaptor", "fake", "--resume", script=FAKE, arguments=(str(FAKE_STEPS),))


# ---------------------------------------------------------------- pauses


def test_a_paused_job_stands_still_and_goes_on_as_if_it_had_not(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """
    When a job is paused, twice, then all ranks stand at one step for as long as nobody resumes it;
    then they go on in the same processes and groups, with the same losses, and it was no incident.
    """
    with calm(tmp_path / "run") as running:
        before = [running.pid(f"rank-{rank}") for rank in range(4)]
        for _ in range(2):
            assert running.asked("pause")[0] == 0
            [step] = steps(running)
            assert running.asked("pause")[0] == 2  # it is paused already, and time has passed
            assert steps(running) == {step}
            assert running.asked("resume")[0] == 0
            until(reached(running, step + 5), "further steps")
        assert [running.pid(f"rank-{rank}") for rank in range(4)] == before
        outcome = running.end()
    assert outcome.code == 0, outcome.output
    assert outcome.incidents == []
    identical(outcome, fake_undisturbed)
    log = (outcome.run_dir / "logs" / "controller.log").read_text()
    assert log.count("state=repairing") == 1  # groups were formed at the start alone


@pytest.mark.soak
def test_a_check_that_passes_lets_the_job_go_on(
    tmp_path: Path, lamps: dict[str, str], fake_undisturbed: Outcome
) -> None:
    """
    When every rank passes the check, then the job goes on by itself; one that nobody knows is
    said not to have passed, and changes nothing either.
    """
    with calm(tmp_path / "run", environment=lamps) as running:
        code, said = running.asked("pause", "--check", "lamps")
        assert code == 0, said
        assert len(list(running.run_dir.glob("checked-*"))) == 4
        code, said = running.asked("pause", "--check", "fuses")
        assert code == 4
        assert "no plugin knows a check 'fuses' (rank 0, 1, 2, 3)" in said
        outcome = running.end()
    assert outcome.code == 0, outcome.output
    assert outcome.incidents == []
    identical(outcome, fake_undisturbed)


@pytest.mark.soak
def test_a_fault_in_a_paused_job_is_repaired_and_the_pause_goes_on(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """
    When a rank is killed while the job stands still, then it is replaced, the job stands still
    again until it is resumed, and nothing is lost.
    """
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
def test_a_controller_that_dies_in_a_pause_leads_on(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """
    When the controller is killed while the job stands still, then the next one knows that it does,
    and resumes it when it is asked to.
    """
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


# ---------------------------------------------------------------- checks that find something


@pytest.mark.soak
def test_a_node_that_fails_a_check_is_left_out_of_the_last_checkpoint(
    tmp_path: Path, lamps: dict[str, str], fake_undisturbed: Outcome
) -> None:
    """
    When a check isolates a node and no other has room for its ranks, then its processes are ended,
    and the others save a last checkpoint that can be resumed with nothing lost.
    """
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
def test_a_check_may_end_the_job(tmp_path: Path, lamps: dict[str, str]) -> None:
    """
    When a check says that the job must end, then it ends with a last checkpoint and its sentence.
    """
    with calm(tmp_path / "run", environment=lamps) as running:
        (running.run_dir / "out-1").write_text("end")
        assert running.asked("pause", "--check", "lamps")[0] == 4
        outcome = running.end()
    assert outcome.code == 3, outcome.output
    assert "a lamp is out (rank 1)" in outcome.report["why"]


# ---------------------------------------------------------------- dumps


def test_a_dump_that_is_asked_for_can_be_resumed(tmp_path: Path, fake_undisturbed: Outcome) -> None:
    """
    When somebody asks for a dump, then the job ends with a last checkpoint and exit code 3; with
    --resume it goes on as if it had never stopped. Asked when it is over, it is refused.
    """
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
    """
    When a job is dumped while it stands still, then nothing it had done is lost.
    """
    with calm(tmp_path / "run") as running:
        assert running.asked("pause")[0] == 0
        [step] = steps(running)
        assert running.asked("dump")[0] == 0
        outcome = running.end()
    assert outcome.code == 3, outcome.output
    assert outcome.report["steps"] in (
        step - 1,
        step,
    )  # the step that was begun had all its all-reduces
    again = resumed(tmp_path / "run")
    assert again.code == 0, again.output
    identical(again, fake_undisturbed)


# ---------------------------------------------------------------- copies, and fewer ranks


def test_numbers_that_went_bad_everywhere_are_taken_back_from_the_copies(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """
    When a fault may have spread with the last update, then everyone goes back to the copy of the
    step before, and the steps since then are computed again with the same losses.
    """
    outcome = run(
        tmp_path / "run", "--adaptor", "fake",
        script=FAKE, arguments=(str(FAKE_STEPS), "--spread", "1,30"),
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    identical(outcome, fake_undisturbed)
    (incident,) = outcome.incidents
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [("numeric", 1, 30)]
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("retry", 29, 1)
    assert incident["pids_kept"] is True


def test_a_job_that_may_shrink_goes_on_without_a_node(tmp_path: Path) -> None:
    """
    When a node is lost and the adaptor can do with fewer ranks, then the others go on without it
    and complete.
    """
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
