"""
The example with its optimizer state cut into shards, each held by two ranks, on real torch.

Ranks are killed and broken. Each run is compared bit for bit with the undisturbed one.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import GPT_STEPS
from tests.e2e.jobs import ROOT, Outcome, identical, run

SCRIPT = ROOT / "examples" / "gpt" / "replicas.py"
STEPS = ("--steps", str(GPT_STEPS))
PHASES = ("forward", "backward", "collective", "update", "between")


def train(run_dir: Path, *specs: str, more: tuple[str, ...] = (), **how: Any) -> Outcome:
    """Return the outcome of the job with these chaos faults."""
    options = [word for spec in specs for word in ("--chaos", spec)]
    return run(run_dir, *options, *more, script=SCRIPT, **{"arguments": STEPS, **how})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return the outcome without a fault."""
    outcome = train(tmp_path_factory.mktemp("replicas") / "undisturbed")
    assert outcome.code == 0, outcome.output
    return outcome


@pytest.mark.soak
def test_losses_are_the_same_with_a_sharded_optimizer(
    undisturbed: Outcome, gpt_undisturbed: Outcome
) -> None:
    """When the optimizer's state is cut into shards, then every loss is that of the ordinary
    example."""
    assert undisturbed.rows() == gpt_undisturbed.rows()


@pytest.mark.soak
def test_each_rank_prints_the_holders_of_its_shard(undisturbed: Outcome) -> None:
    """When a rank prints its topology, then it names the two holders of its shard, in MindIO's
    format."""
    for rank in range(4):
        assert f"rank:{rank}, report group list: {[rank % 2, rank % 2 + 2]}" in undisturbed.output


@pytest.mark.soak
def test_a_rank_killed_in_any_phase_leaves_the_losses_unchanged(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """When a rank is killed in each phase of a step in turn, then each time there is one incident,
    one process is started, and losses and final state are those of the undisturbed run."""
    specs = [
        f"kill:rank={rank},step={4 * turn},phase={phase}"
        for turn, (phase, rank) in enumerate(zip(PHASES, (0, 1, 2, 3, 0), strict=True), start=1)
    ]
    outcome = train(tmp_path / "run", *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed)
    assert [i["strategy"] for i in outcome.incidents] == ["recover"] * len(PHASES)
    assert [i["steps_lost"] for i in outcome.incidents] == [0] * len(PHASES)
    assert [i["processes_started"] for i in outcome.incidents] == [1] * len(PHASES)


@pytest.mark.soak
def test_two_lost_ranks_of_different_shards_leave_the_losses_unchanged(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """When two ranks are killed at once, or one reports a memory fault in its update as the other
    is repaired, and each shard has a holder left, then losses and final state are those of the
    undisturbed run."""
    specs = (
        "kill:ranks=0+1,step=10,phase=forward",
        "kill:rank=2,step=20,phase=update", "kill:rank=1,step=20,phase=repair",
        "raise:rank=3,step=24,phase=update,kind=memory",
    )  # fmt: skip
    outcome = train(tmp_path / "run", *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed)
    assert [i["strategy"] for i in outcome.incidents] == ["recover", "recover", "retry"]
    assert [i["steps_lost"] for i in outcome.incidents] == [0, 0, 0]


@pytest.mark.soak
def test_master_parameters_survive_with_their_shard(tmp_path: Path) -> None:
    """When parameters have 16 bits and ranks are lost, then losses and final state are those of the
    undisturbed run."""
    arguments = (*STEPS, "--dtype", "bfloat16")
    whole = train(tmp_path / "whole", arguments=arguments)
    assert whole.code == 0, whole.output
    specs = ("kill:rank=1,step=11,phase=update", "kill:rank=2,step=22,phase=backward")
    outcome = train(tmp_path / "run", *specs, arguments=arguments)
    assert outcome.code == 0, outcome.output
    identical(outcome, whole)
    assert len(outcome.incidents) == len(specs)


@pytest.mark.soak
def test_a_job_with_shards_is_dumped_and_resumed_bit_for_bit(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """When a rank is lost and only a last checkpoint is allowed, then the survivors write one copy
    of each shard, and --resume trains on bit for bit."""
    more = ("--enable", "dump")
    outcome = train(tmp_path / "run", "kill:rank=1,step=20,phase=forward", more=more)
    assert outcome.code == 3, outcome.output
    [checkpoint] = (tmp_path / "run" / "checkpoints").glob("step-*")
    written = sorted(path.name for path in checkpoint.iterdir() if path.is_dir())
    assert {"dense", "optimizer.0", "optimizer.1"} <= set(written)
    resumed = train(tmp_path / "run", more=(*more, "--resume"))
    assert resumed.code == 0, resumed.output
    identical(resumed, undisturbed)


@pytest.mark.soak
def test_the_job_ends_without_checkpoint_when_a_shard_has_no_holder(tmp_path: Path) -> None:
    """When both holders of a shard are lost at once and there is no checkpoint, then the job ends,
    names the lost shard, and leaves no checkpoint that lacks it."""
    outcome = train(tmp_path / "run", "kill:ranks=0+2,step=20")
    assert outcome.code == 4, outcome.output
    assert "'optimizer.0'" in outcome.report["why"]
    places = tmp_path / "run" / "checkpoints"
    assert not places.exists() or list(places.iterdir()) == []


# ---------------------------------------------------------------- jobs that run only in `make soak`


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory, undisturbed: Outcome) -> dict[str, Outcome]:
    """
    Return the undisturbed outcomes, by the data type of the parameters.
    """
    where = tmp_path_factory.mktemp("replicas") / "bfloat16"
    low = train(where, arguments=(*STEPS, "--dtype", "bfloat16"))
    assert low.code == 0, low.output
    return {"float32": undisturbed, "bfloat16": low}


@pytest.mark.soak
def test_16_bit_parameters_with_32_bit_gradients_survive_faults(tmp_path: Path) -> None:
    """When parameters of 16 bits have gradients of 32 bits, which the script reduces itself, and
    ranks are killed and broken, then losses and final state are those of the undisturbed run."""
    arguments = (*STEPS, "--dtype", "bfloat16", "--whole-gradients")
    whole = train(tmp_path / "whole", arguments=arguments)
    assert whole.code == 0, whole.output
    specs = (
        "kill:rank=1,step=10,phase=backward", "kill:rank=2,step=20,phase=update",
        "raise:rank=0,step=24,phase=update,kind=memory",
    )  # fmt: skip
    outcome = train(tmp_path / "run", *specs, arguments=arguments)
    assert outcome.code == 0, outcome.output
    identical(outcome, whole)
    assert [i["strategy"] for i in outcome.incidents] == ["recover", "recover", "retry"]
    assert [i["steps_lost"] for i in outcome.incidents] == [0, 0, 0]


@pytest.mark.soak
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_in_every_phase(
    dtype: str, phase: str, rank: int, tmp_path: Path, wholes: dict[str, Outcome]
) -> None:
    """When any rank is killed in any phase, and another reports a memory fault in the same phase
    later, then losses and final state are those of the undisturbed run."""
    arguments = (*STEPS, "--dtype", dtype)
    spec = f"kill:rank={rank},step=20,phase={phase}"
    memory = f"raise:rank={(rank + 1) % 4},step=24,phase={phase},kind=memory"
    specs = (spec, memory) if phase != "collective" else (spec,)
    outcome = train(tmp_path / "run", *specs, arguments=arguments)
    assert outcome.code == 0, outcome.output
    identical(outcome, wholes[dtype])
    assert [i["steps_lost"] for i in outcome.incidents] == [0] * len(specs)
