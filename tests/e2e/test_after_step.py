"""
Evaluations after steps: a rank that evaluates is not reported as hanging, and each rank evaluates
once per step.
"""

import json
from pathlib import Path

import pytest

from tests.e2e.jobs import ROOT, Outcome, identical, run

SCRIPT = ROOT / "tests" / "e2e" / "after_job.py"
EVERY, STEPS = 5, 14


def trained(where: Path, *arguments: str) -> Outcome:
    """
    Return the outcome of a job of three ranks that runs `after_job.py`.
    """
    return run(where, script=SCRIPT, arguments=arguments, nproc=3)


def evaluations(outcome: Outcome) -> dict[int, list[tuple[int, float]]]:
    """Return for each rank the steps after which it has evaluated, with the results."""
    found = {}
    for path in sorted(outcome.run_dir.glob("records-rank*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(row["after"] for row in rows)
        found[int(path.stem.removeprefix("records-rank"))] = [(r["step"], r["loss"]) for r in rows]
    return found


def kept(outcome: Outcome) -> set[int]:
    """
    Return the ranks to which the incidents of the job attribute faults.
    """
    return {fault["rank"] for incident in outcome.incidents for fault in incident["faults"]}


@pytest.mark.parametrize(
    ("how", "seconds"),
    [pytest.param("alone", "13", marks=pytest.mark.soak), pytest.param("together", "13", marks=pytest.mark.soak), pytest.param("alone", "20", marks=pytest.mark.soak)],
)  # fmt: skip
def test_ranks_that_evaluate_are_not_replaced_when_another_rank_dies(
    tmp_path: Path, how: str, seconds: str
) -> None:
    """When a rank dies while rank 0 or all ranks evaluate, and the evaluation takes much longer
    than a step and than the limit for leaving the loop, then no other rank is replaced, and all
    results are those of the undisturbed run."""
    calm = trained(tmp_path / "calm", how)
    assert calm.code == 0, calm.output
    dies = "1,6,update" if how == "alone" else "1,5,evaluation"
    outcome = trained(tmp_path / "run", how, "--seconds", seconds, "--die", dies)
    assert outcome.code == 0, outcome.output
    assert [(i["strategy"], i["steps_lost"], i["inexact"]) for i in outcome.incidents] == [
        ("recover", 0, [])
    ]
    assert kept(outcome) == {1}
    identical(outcome, calm)
    assert evaluations(outcome) == evaluations(calm)


@pytest.mark.soak
def test_an_evaluation_in_which_a_rank_dies_is_repeated_by_all_ranks(tmp_path: Path) -> None:
    """When a rank dies in an evaluation by all ranks, then all evaluate again with its replacement,
    and each row is written once. The averaged weights that the evaluation has put into the model of
    the survivors are not trained on."""
    calm = trained(tmp_path / "calm", "together")
    outcome = trained(tmp_path / "run", "together", "--die", "2,10,evaluation")
    assert outcome.code == 0, outcome.output
    assert kept(outcome) == {2}
    identical(outcome, calm)
    assert evaluations(outcome) == evaluations(calm)
    assert {rank: [step for step, _ in rows] for rank, rows in evaluations(outcome).items()} == {
        rank: [5, 10] for rank in range(3)
    }


@pytest.mark.soak
def test_an_evaluation_leaves_training_as_it_is_without_evaluations(tmp_path: Path) -> None:
    """When an evaluation draws random numbers and leaves the model in evaluation mode, then losses
    and final state are those of a job that never evaluates."""
    never = trained(tmp_path / "never", "together", "--every", str(STEPS + 1))
    assert never.code == 0, never.output
    outcome = trained(tmp_path / "run", "together")
    assert outcome.code == 0, outcome.output
    assert evaluations(outcome).keys() == {0, 1, 2}
    assert evaluations(never) == {}
    identical(outcome, never)


@pytest.mark.soak
def test_a_long_evaluation_by_rank_0_is_no_hang(tmp_path: Path) -> None:
    """When rank 0 evaluates for long through `session.evaluate`, and no rank has a fault, then there
    is no incident, and the final state is that of a job with a short evaluation."""
    calm = trained(tmp_path / "calm", "alone", "--every", "12")
    outcome = trained(tmp_path / "run", "alone", "--seconds", "30", "--every", "12")
    assert outcome.code == 0, outcome.output
    assert outcome.incidents == []
    identical(outcome, calm)


@pytest.mark.soak
def test_a_long_evaluation_that_is_not_reported_counts_as_a_hang(tmp_path: Path) -> None:
    """When rank 0 evaluates for long in its loop without `session.evaluate`, then it is replaced,
    and the report names the function to use."""
    outcome = trained(tmp_path, "inline", "--seconds", "30", "--every", "12")
    assert kept(outcome) == {0}
    (fault,) = outcome.incidents[0]["faults"]
    assert fault["kind"] == "hang"
    assert "session.evaluate" in fault["evidence"]
