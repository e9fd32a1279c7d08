"""
The example with its model sharded by FSDP2, by tensor parallelism and into pipeline stages, on real
torch.

Ranks are killed and broken. Each run is compared bit for bit with the undisturbed one.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gpt import GPT, SIZES

from tests.e2e.conftest import GPT_STEPS
from tests.e2e.jobs import ROOT, Outcome, identical, run

EXAMPLES = ROOT / "examples" / "gpt"
APART = ROOT / "tests" / "e2e" / "apart_job.py"
SHARDED = EXAMPLES / "sharded.py"
LAYOUTS = {
    "fsdp": (SHARDED, "--layout", "fsdp"),
    "tensor": (SHARDED, "--layout", "tensor"),
    "pipeline": (EXAMPLES / "pipeline.py",),
}
"""In each layout, ranks 0 and 2 have the same part of the model, and ranks 1 and 3 have the other
part."""
SHARES = (SHARDED, "--layout", "tensor", "--copies", "2")
"""On eight ranks, ranks 0, 2, 4 and 6 have the same part of the model. Ranks 0 and 4 have the same
share of the optimizer."""
EIGHT: dict[str, Any] = {"nproc": 8, "steps": 12}  # Any: keywords of `train`
PHASES = ("forward", "backward", "update", "between")


def train(
    run_dir: Path, layout: str, *specs: str, more: tuple[str, ...] = (), **how: Any
) -> Outcome:
    """Return the outcome of the job with these chaos faults."""
    options = [word for spec in specs for word in ("--chaos", spec)]
    script, *arguments = SHARES if layout == "shares" else LAYOUTS[layout]
    steps = ("--steps", str(how.pop("steps", GPT_STEPS)))
    return run(run_dir, *options, *more, script=script, arguments=(*steps, *arguments), **how)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """
    Return the outcomes without a fault, by layout. Each job runs when a test first needs its
    outcome.
    """
    where = tmp_path_factory.mktemp("sharded")

    @cache
    def trained(layout: str) -> Outcome:
        outcome = train(where / layout, layout)
        assert outcome.code == 0, outcome.output
        return outcome

    return trained


def test_a_sharded_model_survives_a_killed_and_a_broken_rank(
    tmp_path: Path, undisturbed: Callable[[str], Outcome]
) -> None:
    """When the model is sharded by FSDP2, one rank is killed in its update, and another one reports
    a memory fault, then each time the shard comes from the other holder, and losses and final state
    are those of the undisturbed run."""
    specs = ("kill:rank=2,step=10,phase=update", "raise:rank=1,step=20,phase=update,kind=memory")
    outcome = train(tmp_path / "run", "fsdp", *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed("fsdp"))
    assert [i["strategy"] for i in outcome.incidents] == ["recover", "retry"]
    assert [i["steps_lost"] for i in outcome.incidents] == [0, 0]


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["fsdp", "tensor", "pipeline"])
def test_ranks_killed_and_broken_in_any_phase_leave_the_losses_unchanged(
    layout: str, tmp_path: Path, undisturbed: Callable[[str], Outcome]
) -> None:
    """When a rank is killed in each phase of a step in turn, and one reports a memory fault, then
    each time its shard comes from the other holder, and losses and final state are those of the
    undisturbed run."""
    specs = [
        f"kill:rank={rank},step={5 * (rank + 1)},phase={phase}" for rank, phase in enumerate(PHASES)
    ]
    outcome = train(
        tmp_path / "run", layout, *specs, "raise:rank=1,step=24,phase=update,kind=memory"
    )
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed(layout))
    assert [i["strategy"] for i in outcome.incidents] == ["recover"] * len(PHASES) + ["retry"]
    assert [i["steps_lost"] for i in outcome.incidents] == [0] * (len(PHASES) + 1)


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["fsdp", "pipeline"])
def test_two_lost_ranks_of_different_shards_leave_the_losses_unchanged(
    layout: str, tmp_path: Path, undisturbed: Callable[[str], Outcome]
) -> None:
    """When two ranks with different shards are killed at once, and when one is killed while the
    other is replaced, then losses and final state are those of the undisturbed run."""
    specs = (
        "kill:ranks=0+3,step=12,phase=forward",
        "kill:rank=2,step=24,phase=backward", "kill:rank=1,step=24,phase=repair",
    )  # fmt: skip
    outcome = train(tmp_path / "run", layout, *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed(layout))
    assert [i["processes_started"] for i in outcome.incidents] == [2, 2]


@pytest.mark.soak
def test_ranks_of_one_shard_do_not_complete_a_step_that_others_cannot(tmp_path: Path) -> None:
    """When a rank is killed before it contributes to its all-reduces, and the ranks of the other
    shard have finished their all-reduces, then the ranks of the other shard do not complete the
    step. All ranks return to the end of the step before, and losses and final state are those of
    the undisturbed run."""
    steps = "20"
    undisturbed = run(tmp_path / "undisturbed", script=APART, arguments=(steps,))
    assert undisturbed.code == 0, undisturbed.output
    outcome = run(tmp_path / "run", script=APART, arguments=(steps, "--die", "0,10"))
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed)
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("recover", 10, 0)


@pytest.mark.soak
def test_pipeline_stages_that_wait_for_a_hanging_one_are_not_suspects(
    tmp_path: Path, undisturbed: Callable[[str], Outcome]
) -> None:
    """When a pipeline stage hangs while the next stage waits for its output, or a stage is stopped
    while the stage before waits for its gradients, then the waiting ranks are not taken for hanging
    ranks, and losses and final state are those of the undisturbed run."""
    specs = ("hang:rank=0,step=12,phase=forward", "stop:rank=3,step=24,phase=backward")
    outcome = train(tmp_path / "run", "pipeline", *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed("pipeline"))
    faults = [[(f["kind"], f["rank"]) for f in i["faults"]] for i in outcome.incidents]
    assert faults == [[("hang", 0)], [("hang", 3)]]


@pytest.mark.soak  # test_replicas.py has the same case with the shares of a ReplicaOptimizer
def test_the_job_ends_without_checkpoint_when_a_shard_has_no_holder(tmp_path: Path) -> None:
    """When both holders of a shard are lost at once and there is no checkpoint, then the job ends,
    names the lost shard, and leaves no checkpoint that lacks it."""
    outcome = train(tmp_path / "run", "fsdp", "kill:ranks=1+3,step=12")
    assert outcome.code == 4, outcome.output
    assert "'part.1+3'" in outcome.report["why"]
    places = tmp_path / "run" / "checkpoints"
    assert not places.exists() or list(places.iterdir()) == []


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("fsdp", marks=pytest.mark.soak),
        pytest.param("pipeline", marks=pytest.mark.soak),
        pytest.param("tensor", marks=pytest.mark.soak),
    ],
)
def test_a_dumped_job_is_resumed_bit_for_bit_and_read_whole_by_plain_torch(
    layout: str, tmp_path: Path, undisturbed: Callable[[str], Outcome]
) -> None:
    """When the survivors write one copy of each shard, then --resume trains on bit for bit, and
    plain torch reads whole parameters. Each part of a parameter is equal to what its rank wrote."""
    more = ("--enable", "dump")
    outcome = train(tmp_path / "run", layout, "kill:rank=2,step=20,phase=forward", more=more)
    assert outcome.code == 3, outcome.output
    [place] = (tmp_path / "run" / "checkpoints").glob("step-*")
    whole = GPT(SIZES["tiny"]).state_dict()
    optimizer = {name: torch.empty_like(tensor) for name, tensor in whole.items()}
    state: dict[str, Any] = {
        "model": whole,
        "optim": {"state": {name: {"exp_avg": tensor} for name, tensor in optimizer.items()}},
    }
    dcp.load(state, checkpoint_id=place, no_dist=True)  # type: ignore[attr-defined]  # torch documents this name
    read = [(f"model.{name}", tensor) for name, tensor in whole.items()]
    read += [(f"optim.state.{name}.exp_avg", tensor) for name, tensor in optimizer.items()]
    parts = [path for path in place.iterdir() if path.is_dir()]
    for key, tensor in read:
        written = [part_of(part, key) for part in parts]
        assert any(own is not None for own in written), key
        halves = [chunk for dim in range(tensor.dim()) for chunk in tensor.chunk(2, dim)]
        for own in written:
            assert own is None or any(same(own, each) for each in [tensor, *halves]), key
    resumed = train(tmp_path / "run", layout, more=(*more, "--resume"))
    assert resumed.code == 0, resumed.output
    identical(resumed, undisturbed(layout))


def part_of(place: Path, name: str) -> torch.Tensor | None:
    """
    Return a tensor from the file of one rank, or None if another pipeline stage holds the tensor.
    """
    reader = dcp.FileSystemReader(place)  # type: ignore[attr-defined]  # torch documents this name
    known = reader.read_metadata().state_dict_metadata.get(name)
    if known is None:
        return None
    found = {name: torch.empty(known.size)}  # type: ignore[union-attr]  # it is a tensor
    dcp.load(found, checkpoint_id=place, no_dist=True)  # type: ignore[attr-defined]  # torch documents this name
    return found[name]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """
    Return whether both tensors have the same shape and content.
    """
    return one.shape == other.shape and torch.equal(one, other)


# ---------------------------------------------------------------- optimizer shards in addition


@pytest.fixture(scope="module")
def undisturbed_shares(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return the outcome without a fault."""
    outcome = train(tmp_path_factory.mktemp("shares") / "undisturbed", "shares", **EIGHT)
    assert outcome.code == 0, outcome.output
    return outcome


@pytest.mark.soak
def test_the_job_and_tft_replicas_agree_on_the_holders(undisturbed_shares: Outcome) -> None:
    """When each of eight ranks reports the holders of its shards, then they are those that `tft
    replicas` computes from the sizes."""
    sizes = ("--dp", "4", "--tp", "2", "--optimizer-shards", "2", "--all")
    told = subprocess.run(
        [sys.executable, "-m", "tft", "replicas", *sizes],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in told.stdout.splitlines() if "report group list" in line]
    assert len(lines) == EIGHT["nproc"]
    for line in lines:
        assert line in undisturbed_shares.output


@pytest.mark.soak
def test_optimizer_shards_of_a_model_shard_come_from_their_replicas(
    tmp_path: Path, undisturbed_shares: Outcome
) -> None:
    """When two ranks with different optimizer shards are lost in their update, and one reports a
    memory fault, then each optimizer shard comes from its other holder, and losses and final state
    are those of the undisturbed run."""
    specs = (
        "kill:ranks=0+3,step=4,phase=update",
        "raise:rank=5,step=8,phase=update,kind=memory",
    )  # fmt: skip
    outcome = train(tmp_path / "run", "shares", *specs, **EIGHT)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed_shares)
    assert [i["strategy"] for i in outcome.incidents] == ["recover", "retry"]
    assert [i["steps_lost"] for i in outcome.incidents] == [0, 0]


@pytest.mark.soak
def test_optimizer_shards_are_dumped_and_resumed_bit_for_bit(
    tmp_path: Path, undisturbed_shares: Outcome
) -> None:
    """When a rank is lost and a last checkpoint is written, then it has one copy of each model
    shard and optimizer shard, plain torch reads whole tensors from it, and --resume trains on bit
    for bit."""
    more = ("--enable", "dump")
    outcome = train(tmp_path / "run", "shares", "kill:rank=6,step=6", more=more, **EIGHT)
    assert outcome.code == 3, outcome.output
    [place] = (tmp_path / "run" / "checkpoints").glob("step-*")
    written = {path.name for path in place.iterdir() if path.is_dir()}
    parts = {"dense", "part.0+2+4+6", "part.1+3+5+7"}
    assert written == parts | {f"optimizer.{n}" for n in range(4)}
    model = GPT(SIZES["tiny"])
    missing = {name: torch.full_like(t, torch.nan) for name, t in model.state_dict().items()}
    dcp.load({"model": missing}, checkpoint_id=place, no_dist=True)  # type: ignore[attr-defined]  # torch documents this name
    assert not any(tensor.isnan().any() for tensor in missing.values())
    resumed = train(tmp_path / "run", "shares", more=(*more, "--resume"), **EIGHT)
    assert resumed.code == 0, resumed.output
    identical(resumed, undisturbed_shares)


# ---------------------------------------------------------------- jobs that run only in `make soak`


@pytest.mark.soak
def test_losses_are_the_same_without_optimizer_shards(
    tmp_path: Path, undisturbed_shares: Outcome
) -> None:
    """When the optimizer is not sharded, then every loss is the same."""
    whole = train(tmp_path / "run", "tensor", **EIGHT)
    assert whole.code == 0, whole.output
    assert whole.rows() == undisturbed_shares.rows()


@pytest.mark.soak
def test_a_compiled_model_is_repaired_as_any_other(tmp_path: Path) -> None:
    """When the model is compiled, with the backend that also traces the backward pass and needs no
    compiler, and ranks are killed and broken, then losses and final state are those of the
    undisturbed run."""
    compiled = (*LAYOUTS["fsdp"][1:], "--compile", "aot_eager", "--steps", "16")
    whole = run(tmp_path / "whole", script=SHARDED, arguments=compiled)
    assert whole.code == 0, whole.output
    specs = ("kill:rank=1,step=5,phase=backward", "raise:rank=2,step=10,phase=update,kind=memory")
    options = [word for spec in specs for word in ("--chaos", spec)]
    outcome = run(tmp_path / "run", *options, script=SHARDED, arguments=compiled)
    assert outcome.code == 0, outcome.output
    identical(outcome, whole)
    assert [i["steps_lost"] for i in outcome.incidents] == [0, 0]


@pytest.mark.soak
@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize("phase", PHASES)
def test_every_rank_with_an_optimizer_shard_in_every_phase(
    phase: str, rank: int, tmp_path: Path, undisturbed_shares: Outcome
) -> None:
    """When any of eight ranks is killed in any phase, and another reports a memory fault in the
    same phase later, then losses and final state are those of the undisturbed run."""
    specs = (
        f"kill:rank={rank},step=4,phase={phase}",
        f"raise:rank={(rank + 1) % 8},step=8,phase={phase},kind=memory",
    )
    outcome = train(tmp_path / "run", "shares", *specs, **EIGHT)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed_shares)
    assert [i["steps_lost"] for i in outcome.incidents] == [0, 0]


@pytest.mark.soak
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_in_every_phase(
    layout: str, phase: str, rank: int, tmp_path: Path, undisturbed: Callable[[str], Outcome]
) -> None:
    """When any rank is killed in any phase, and another reports a memory fault in the same phase
    later, then losses and final state are those of the undisturbed run."""
    specs = (
        f"kill:rank={rank},step=20,phase={phase}",
        f"raise:rank={(rank + 1) % 4},step=24,phase={phase},kind=memory",
    )
    outcome = train(tmp_path / "run", layout, *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed(layout))
    assert [i["steps_lost"] for i in outcome.incidents] == [0, 0]
