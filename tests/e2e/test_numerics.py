"""
Jobs in which a rank computes wrong numbers: no rank applies them, and training goes on as if the
batch had never been there, or as if nothing had happened.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import ROOT, Outcome, identical, run

FAKE = ROOT / "tests" / "e2e" / "fake_job.py"
SCRIPT = ROOT / "tests" / "e2e" / "numerics_job.py"
OPTIONS = ("--numerics", "refuse", "--skip-batch", "--audit", "off")
WHATS = ("loss", "infinite", "gradient", "spike", "norm")
BAD = 60
"""The number of a bad batch. Spikes are judged after 50 steps."""


def trained(
    where: Path,
    *arguments: str,
    wrong: Sequence[str] = (),
    without: Iterable[int] = (),
    nproc: int = 3,
    options: Sequence[str] = OPTIONS,
) -> Outcome:
    """
    Run a job of 70 steps in which numbers are wrong, or which never draws some batches.
    """
    words = ["--steps", "70", *arguments]
    for each in wrong:
        words += ["--wrong", each]
    for batch in without:
        words += ["--without", str(batch)]
    return run(where, *options, script=SCRIPT, arguments=words, nproc=nproc)


def refused(outcome: Outcome) -> list[dict[str, Any]]:  # Any: JSON
    """
    Return the refused steps of all incidents of a job that has completed.
    """
    assert outcome.code == 0, outcome.output
    assert {incident["strategy"] for incident in outcome.incidents} <= {"retry"}
    assert {incident["steps_lost"] for incident in outcome.incidents} <= {0}
    assert all(incident["pids_kept"] for incident in outcome.incidents)
    return [each for incident in outcome.incidents for each in incident["refused"]]


def causes(outcome: Outcome) -> list[tuple[int, int, str, int]]:
    """
    Return of each refused step its number, how often it was refused, the cause, and how many batches
    were left out.
    """
    return [(r["step"], r["times"], r["cause"], r["skipped"]) for r in refused(outcome)]


def test_bad_batches_are_applied_by_no_rank(tmp_path: Path) -> None:
    """When the loss of one rank, a gradient of another and the loss of a third are always wrong at
    some batch, then every rank ends with the losses and the state of a job without these batches. A
    wrong number that comes only once changes nothing, nor does one in the tail of a step. The report
    names the steps, the batches that were left out, and the rank whose device has erred."""
    wrong = ("loss,0,52,0", "gradient,1,56,0", "spike,2,60,0", "loss,1,64,1")
    outcome = trained(tmp_path / "wrong", "--tail", wrong=wrong)
    assert causes(outcome) == [
        (52, 2, "data or model", 1), (55, 2, "data or model", 1),
        (58, 2, "data or model", 1), (61, 1, "device", 0),
    ]  # fmt: skip
    (last,) = outcome.incidents[-1]["faults"]
    assert (last["kind"], last["rank"], last["step"]) == ("numeric", 1, 61)
    assert [len(incident["inexact"]) for incident in outcome.incidents] == [1, 1, 1, 0]
    identical(outcome, trained(tmp_path / "without", without=(52, 56, 60), options=()))


def test_wrong_gradient_of_a_second_model_is_applied_by_no_rank(tmp_path: Path) -> None:
    """When a gradient of a model among `others` is NaN on one rank, once, then no rank applies it, and
    the job ends like an undisturbed one."""
    outcome = trained(tmp_path / "wrong", "--critic", wrong=("critic,1,20,1",), nproc=2)
    assert causes(outcome) == [(20, 1, "device", 0)]
    identical(outcome, trained(tmp_path / "calm", "--critic", nproc=2, options=()))


@pytest.mark.soak
def test_job_with_sharded_optimizer_refuses_through_the_barrier(tmp_path: Path) -> None:
    """When ranks hold different shards of the optimizer, and one of them computes wrong numbers
    once, then no rank applies them, and the job ends like an undisturbed one."""
    wrong = ("loss,3,3,1", "norm,2,60,1")
    outcome = trained(tmp_path / "wrong", "--replicas", wrong=wrong, nproc=4)
    assert [(r["step"], r["times"], r["skipped"]) for r in refused(outcome)] == [
        (3, 1, 0), (60, 1, 0),
    ]  # fmt: skip
    identical(outcome, trained(tmp_path / "calm", "--replicas", nproc=4, options=()))


@pytest.mark.soak
def test_adaptor_that_knows_no_numbers_is_refused(tmp_path: Path) -> None:
    """When numbers are to be judged and the adaptor does not know them, then no step is trained, and
    the message names the option."""
    outcome = run(
        tmp_path / "run", "--adaptor", "fake", "--numerics", "refuse", script=FAKE,
        arguments=("5",), nproc=2,
    )  # fmt: skip
    assert outcome.code not in (0, 3), outcome.output
    assert "does not know them: run without --numerics" in outcome.output
    assert outcome.rows() == {}


@pytest.mark.soak
def test_job_that_may_skip_nothing_saves_the_state_before_the_bad_batch(tmp_path: Path) -> None:
    """When a batch is always bad and `--skip-batch` is not given, then the job ends with a last
    checkpoint of the step before, and says which option is missing."""
    where = tmp_path / "run"
    options = ("--numerics", "refuse", "--audit", "off")
    outcome = trained(where, wrong=("loss,1,20,0",), options=options)
    assert outcome.code == 3, outcome.output
    assert outcome.report["steps"] == 19
    assert "--skip-batch" in outcome.output
    assert list((where / "checkpoints").glob("step-00000019/manifest.json"))


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("what", WHATS)
def test_every_wrong_number_of_every_rank_is_refused(tmp_path: Path, what: str, rank: int) -> None:
    """When any rank computes any wrong number, always or once, then no rank applies it."""
    wrong = (f"{what},{rank},{BAD},0", f"{what},{rank},66,1")
    outcome = trained(tmp_path / "wrong", wrong=wrong)
    assert [(r["step"], r["times"], r["skipped"]) for r in refused(outcome)] == [
        (60, 2, 1), (65, 1, 0),
    ]  # fmt: skip
    identical(outcome, trained(tmp_path / "without", without=(BAD,), options=()))


@pytest.mark.soak
@pytest.mark.parametrize("habit", ["--no-clip", "--scaler=1024", "--replicas"])
@pytest.mark.parametrize("what", ["loss", "spike"])
def test_refusal_of_a_loss_fits_every_habit(tmp_path: Path, habit: str, what: str) -> None:
    """When the script does not clip, scales its losses, or shards its optimizer, then a bad batch is
    left out all the same, and the GradScaler has the scale of a job without this batch."""
    world = 4 if habit == "--replicas" else 3
    outcome = trained(tmp_path / "wrong", habit, wrong=(f"{what},1,{BAD},0",), nproc=world)
    assert causes(outcome) == [(60, 2, "data or model", 1)]
    calm = trained(tmp_path / "without", habit, without=(BAD,), nproc=world, options=())
    identical(outcome, calm)


@pytest.mark.soak
def test_all_micro_batches_of_a_refused_step_are_left_out(tmp_path: Path) -> None:
    """When one of two micro-batches is bad on one rank, before the gradients are reduced, then all
    ranks leave out both."""
    habit = "--accumulate=2"
    outcome = trained(tmp_path / "wrong", habit, wrong=("loss,2,119,0",))
    assert causes(outcome) == [(60, 2, "data or model", 2)]
    identical(outcome, trained(tmp_path / "without", habit, without=(119, 120), options=()))


@pytest.mark.soak
def test_overflow_of_a_grad_scaler_is_no_fault(tmp_path: Path) -> None:
    """When the scale of a GradScaler is too large, then its own handling goes on as without the
    plugin, and there is no incident."""
    habit = "--scaler=1e38"
    outcome = trained(tmp_path / "refuse", habit)
    assert outcome.incidents == []
    identical(outcome, trained(tmp_path / "off", habit, options=()))


@pytest.mark.soak
def test_rank_that_dies_while_a_batch_is_left_out_leaves_it_out_too(tmp_path: Path) -> None:
    """When a rank is killed in the step that is computed with the next batch, then its replacement
    leaves the bad batch out as well."""
    options = (*OPTIONS, "--chaos", f"kill:rank=2,step={BAD},phase=update")
    outcome = trained(tmp_path / "wrong", wrong=(f"loss,0,{BAD},0",), options=options)
    assert outcome.code == 0, outcome.output
    identical(outcome, trained(tmp_path / "without", without=(BAD,), options=()))


@pytest.mark.soak
def test_ordinary_training_raises_no_alarm(tmp_path: Path) -> None:
    """When the example trains for 500 steps without a fault, then nothing is refused."""
    outcome = run(
        tmp_path / "run", "--numerics", "refuse", arguments=("--steps", "500"), nproc=2, limit=110
    )
    assert outcome.code == 0, outcome.output
    assert outcome.incidents == []
