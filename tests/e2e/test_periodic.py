"""
Jobs with periodic checkpoints that lose the last copy of a shard.

They return to the newest checkpoint, report the number of lost steps, and end with the same bits as
an undisturbed job.
"""

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.conftest import FAKE, GPT_STEPS
from tests.e2e.jobs import ROOT, TRAIN, Outcome, identical, job, run
from tft import checkpoint
from tft.checkpoint import CheckpointStore

GPT = ROOT / "examples" / "gpt"
STEPS = ("--steps", str(GPT_STEPS))
EVERY = ("--checkpoint-every", "5")
JOBS = {
    "ddp": (TRAIN, STEPS),
    "shares": (GPT / "replicas.py", STEPS),
    "fsdp": (GPT / "sharded.py", STEPS),
    "no replica": (GPT / "sharded.py", (*STEPS, "--cut", "4")),
}
"""The script and the arguments of each job."""


def train(run_dir: Path, what: str, *specs: str, more: tuple[str, ...] = EVERY) -> Outcome:
    """
    Run the job `what` with these chaos faults and return its outcome.
    """
    script, arguments = JOBS[what]
    options = [word for spec in specs for word in ("--chaos", spec)]
    return run(run_dir, *options, *more, script=script, arguments=arguments)


@pytest.fixture(scope="module")
def calm(
    tmp_path_factory: pytest.TempPathFactory, gpt_undisturbed: Outcome
) -> Callable[[str], Outcome]:
    """
    Return a function that gives the outcome of a job without faults and without checkpoints. Each
    job runs once.
    """

    @cache
    def of(what: str) -> Outcome:
        if what == "ddp":
            return gpt_undisturbed
        outcome = train(tmp_path_factory.mktemp("periodic") / "undisturbed", what, more=())
        assert outcome.code == 0, outcome.output
        return outcome

    return of


def whole(run_dir: Path) -> list[int]:
    """
    Check all checkpoints in the run directory, and return the steps of those that count. An
    incomplete checkpoint fails the test. A checkpoint that became complete while the job went back
    to an earlier step is verified too. It has been given up, and its step was written again.
    """
    there = {
        place.name: checkpoint.verify(place).step for place in (run_dir / "checkpoints").iterdir()
    }
    return sorted(step for name, step in there.items() if not name.endswith(".given-up"))


@pytest.mark.parametrize(
    "what",
    [pytest.param(each, marks=() if each == "ddp" else pytest.mark.soak) for each in JOBS],
)
def test_a_job_that_lost_all_holders_returns_to_its_newest_checkpoint(
    what: str, tmp_path: Path, calm: Callable[[str], Outcome]
) -> None:
    """When all holders of a shard are killed in one step, then all ranks return to the newest
    checkpoint, the report has the number of lost steps, and the end is that of the undisturbed run
    without any checkpoint."""
    killed = {"ddp": range(4), "no replica": (2,)}.get(what, (1, 3))
    specs = [f"kill:rank={rank},step=13" for rank in killed]
    outcome = train(tmp_path / "run", what, *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, calm(what))
    assert {incident["strategy"] for incident in outcome.incidents} == {"recover"}
    lost = sum(incident["steps_lost"] for incident in outcome.incidents)
    # The newest checkpoint is that of step 10, or of step 5 if step 10 was not yet written to disk.
    # If several ranks are killed, one may be replaced before the last one dies. Then no step is
    # lost.
    assert lost in ((2, 7) if what == "no replica" else (0, 2, 7))
    assert f"{lost or 'no'} step{'s' if lost else ''} and" in outcome.output
    found = whole(tmp_path / "run")
    if (
        not lost
    ):  # the kills may have interrupted the writing of step 10, which is not trained again
        found = sorted({*found, 10})
    assert found == list(range(5, GPT_STEPS + 1, 5))


@pytest.mark.soak
def test_an_interrupted_checkpoint_is_ignored(
    tmp_path: Path, calm: Callable[[str], Outcome]
) -> None:
    """When ranks are killed again and again as they write their parts, then each checkpoint is
    either whole or absent, and the job ends as the undisturbed one."""
    specs = [
        f"kill:rank={rank},step={step},phase={phase}"
        for step, rank, phase in ((10, 1, "between"), (15, 0, "between"), (21, 2, "forward"))
    ]
    outcome = train(tmp_path / "run", "fsdp", *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, calm("fsdp"))
    steps = whole(tmp_path / "run")
    assert set(steps) <= set(range(5, GPT_STEPS + 1, 5))
    assert {5, 25} <= set(steps)


@pytest.mark.soak
def test_a_wholly_killed_job_is_resumed_from_its_newest_checkpoint(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When the launcher is killed, and all processes with it, then --resume continues from the
    newest checkpoint, bit for bit, and the unfinished checkpoint is removed."""
    run_dir = tmp_path / "run"
    with job(run_dir, *EVERY, arguments=STEPS) as first:
        while len(list((run_dir / "checkpoints").glob("step-*/manifest.json"))) < 2:
            assert first.process.poll() is None, first.output()
        first.process.send_signal(signal.SIGKILL)
        first.end()
    half = checkpoint.open_round(CheckpointStore(directory=run_dir / "checkpoints").place(35), 0, 0)
    (half / "part-rank0.json").write_text("[]")
    resumed = run(run_dir, *EVERY, "--resume", arguments=STEPS)
    assert resumed.code == 0, resumed.output
    identical(resumed, gpt_undisturbed)
    assert whole(run_dir)[-1] == GPT_STEPS


@pytest.mark.soak
def test_a_job_returns_to_a_checkpoint_that_only_its_script_knows(tmp_path: Path) -> None:
    """When the only holder of some state loses its device, and tft has made no checkpoint, then all
    ranks load the newest checkpoint of the script, the report has the number of lost steps, and the
    end is that of the undisturbed run."""
    words: tuple[str, ...] = ("30", "--keep", "5")
    undisturbed = run(tmp_path / "undisturbed", "--adaptor", "fake", script=FAKE, arguments=words)
    words += ("--device", "2,13")
    outcome = run(tmp_path / "run", "--adaptor", "fake", script=FAKE, arguments=words)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed)
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("recover", 11, 2)
    assert "2 steps computed again" in outcome.output


@pytest.mark.parametrize(
    ("options", "left"),
    [
        pytest.param(("--backup-every", "4", "--enable", "dump"), [5, 8], id="last checkpoint"),
        pytest.param(("--max-incidents", "0"), [5], id="none", marks=pytest.mark.soak),
    ],
)
def test_no_job_resumes_from_wrong_numbers(
    tmp_path: Path, options: tuple[str, ...], left: list[int]
) -> None:
    """When the numbers are wrong since step 10 and the job ends in this incident, then the
    checkpoint of step 10 is set aside, though the ranks do not go back to an earlier step."""
    script = ROOT / "tests" / "e2e" / "spoiled_job.py"
    outcome = run(
        tmp_path / "run", *EVERY, *options, script=script, arguments=("10", "14"), nproc=2
    )
    assert outcome.code in (3, 4), outcome.output
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {*(f"step-{step:08}" for step in left), "step-00000010.given-up"}
