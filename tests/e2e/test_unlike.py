"""
Parameters that `wrap` changes, and ranks that begin with different parameters, which DDP does not
make equal.
"""

from pathlib import Path

import pytest

from tests.e2e.jobs import ROOT, Outcome, run

GPT = ROOT / "examples" / "gpt"


def train(tmp_path: Path, wrapper: str, *options: str, seed: str = "session.rank") -> Outcome:
    """
    Run the example with a seed of its own on each rank, and with this wrapper.
    """
    source = (GPT / "train.py").read_text()
    source = source.replace("torch.manual_seed(args.seed)", f"torch.manual_seed({seed})")
    assert "lambda: DDP(model)" in source
    script = tmp_path / "train.py"
    script.write_text(source.replace("DDP(model)", wrapper))
    return run(
        tmp_path / "run", *options, script=script, nproc=2, arguments=("--steps", "10"),
        environment={"PYTHONPATH": str(GPT)},
    )  # fmt: skip


@pytest.mark.soak
def test_ranks_that_train_different_models_are_named(tmp_path: Path) -> None:
    """When ranks begin with different parameters, and the wrapper does not send those of rank 0 to
    all ranks, then `tft run` says at its end that the ranks have trained different models."""
    outcome = train(tmp_path, "DDP(model, init_sync=False)")

    assert outcome.code == 0
    assert "ranks [0, 1] hold different copies of model of shard 'dense'" in outcome.output
    assert "the ranks train different models" in outcome.output
    assert len(outcome.report["begins_unlike"]) == 1


@pytest.mark.soak
def test_parameters_that_ddp_has_made_equal_are_not_named(tmp_path: Path) -> None:
    """When ranks begin with different parameters, and DDP sends those of rank 0 to all ranks, then
    nothing is said."""
    outcome = train(tmp_path, "DDP(model)")

    assert outcome.code == 0
    assert "different" not in outcome.output
    assert outcome.report["begins_unlike"] == []


@pytest.mark.soak
def test_wrapper_that_changes_parameters_does_not_train_on(tmp_path: Path) -> None:
    """When the function `wrap` initializes the parameters each time, then the job does not go on
    with them after an incident, and the console names the function."""
    wrapper = "DDP(model.apply(lambda module: getattr(module, 'reset_parameters', int)()))"
    outcome = train(tmp_path, wrapper, "--chaos", "kill:rank=1,step=5,phase=backward", seed="0")

    assert outcome.code == 4
    assert "(wrap or make of session.adopt) must not change them" in outcome.output
