"""
A training loop that tft does not call (`tft_pytorch.OwnLoop`), as frameworks have it: it survives
incidents in the middle of its steps.
"""

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import GPT_STEPS
from tests.e2e.jobs import ROOT, Outcome, identical, run

SCRIPT = ROOT / "tests" / "e2e" / "own_loop_job.py"
PHASES = ("forward", "backward", "collective", "update", "between", "tail", "evaluation")
STEPS = ("--steps", str(GPT_STEPS))


def evaluations(outcome: Outcome) -> list[list[tuple[int, float]]]:
    """
    Return the rows that each rank has recorded in its evaluations.
    """
    return [
        [(row["step"], row["mean"]) for row in map(json.loads, path.read_text().splitlines())]
        for path in sorted(outcome.run_dir.glob("records-rank*.jsonl"))
    ]


def test_own_loop_survives_kills_in_all_phases(tmp_path: Path, gpt_undisturbed: Outcome) -> None:
    """When ranks are killed in each phase of a step, in the tail and in an evaluation, then the
    survivors stay in their loops, and losses and final state are those of the undisturbed
    example, which tft calls. Each evaluation is recorded once."""
    specs = [
        f"kill:rank={turn % 4},step={5 * (turn + 1)},phase={phase}"
        for turn, phase in enumerate(PHASES)
    ]
    evaluating = (*STEPS, "--evaluates")
    calm = run(tmp_path / "calm", script=SCRIPT, arguments=evaluating)
    outcome = run(
        tmp_path / "run",
        *(word for spec in specs for word in ("--chaos", spec)),
        script=SCRIPT,
        arguments=evaluating,
    )
    assert outcome.code == 0, outcome.output
    assert [each["phase"] for each in outcome.chaos()] == list(PHASES)
    assert [(i["strategy"], i["steps_lost"], i["inexact"]) for i in outcome.incidents] == [
        ("recover", 0, [])
    ] * len(PHASES)
    identical(outcome, gpt_undisturbed)
    identical(calm, gpt_undisturbed)
    assert evaluations(outcome) == evaluations(calm)
    assert [[step for step, _ in each] for each in evaluations(calm)] == [
        list(range(5, GPT_STEPS + 1, 5))
    ] * 4


@pytest.mark.parametrize(
    "kind", ["memory", *(pytest.param(k, marks=pytest.mark.soak) for k in ("network", "numeric"))]
)
def test_own_loop_repeats_a_step_that_raised(
    tmp_path: Path, gpt_undisturbed: Outcome, kind: str
) -> None:
    """When the step of a rank raises an error that can be repaired, then that step is computed
    again in the same loop and process."""
    outcome = run(
        tmp_path / "run",
        "--chaos", f"raise:rank=1,step=7,phase=backward,kind={kind}",
        script=SCRIPT, arguments=STEPS,
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["processes_started"]) == ("retry", 0)
    identical(outcome, gpt_undisturbed)
