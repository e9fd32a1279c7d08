"""
The example with experts that are spread over ranks, on real torch, with faults injected into ranks.

Each run is compared bit for bit with the undisturbed one. A rank has two shards: `dense`, which all
ranks hold, and its experts, which one other rank also holds.
"""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from gpt import GPT, SIZES

from tests.e2e.jobs import ROOT, Outcome, identical, run

SCRIPT = ROOT / "examples" / "gpt" / "experts.py"
STEPS = ("--steps", "16")
PHASES = ("forward", "backward", "update", "between")


def train(run_dir: Path, *specs: str, more: tuple[str, ...] = (), **how: Any) -> Outcome:
    """
    Run the job with these chaos faults and return its outcome.
    """
    options = [word for spec in specs for word in ("--chaos", spec)]
    return run(run_dir, *options, *more, script=SCRIPT, arguments=STEPS, **how)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of the job without any fault.
    """
    outcome = train(tmp_path_factory.mktemp("experts") / "undisturbed")
    assert outcome.code == 0, outcome.output
    return outcome


@pytest.mark.soak
def test_faults_on_ranks_with_experts_leave_the_losses_unchanged(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """When ranks are killed, two with different experts at once among them, and one reports a
    memory fault, then experts come from the one replica that has them, the dense part from any
    rank, and losses and final state are those of the undisturbed run."""
    specs = (
        "kill:rank=1,step=4,phase=backward",
        "kill:ranks=0+3,step=8,phase=update",
        "raise:rank=2,step=12,phase=update,kind=memory",
    )  # fmt: skip
    outcome = train(tmp_path / "run", *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed)
    assert [i["strategy"] for i in outcome.incidents] == ["recover", "recover", "retry"]
    assert [i["steps_lost"] for i in outcome.incidents] == [0, 0, 0]
    # the report line names the group of the shard with the fewest holders: that of the experts
    for rank in range(4):
        assert f"rank:{rank}, report group list: {[rank % 2, rank % 2 + 2]}" in outcome.output


# ---------------------------------------------------------------- jobs that run only in `make soak`


@pytest.mark.soak
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("phase", PHASES)
def test_every_rank_in_every_phase(
    phase: str, rank: int, tmp_path: Path, undisturbed: Outcome
) -> None:
    """When any rank is killed in any phase, and another reports a memory fault in the same phase
    later, then losses and final state are those of the undisturbed run."""
    specs = (
        f"kill:rank={rank},step=6,phase={phase}",
        f"raise:rank={(rank + 1) % 4},step=11,phase={phase},kind=memory",
    )
    outcome = train(tmp_path / "run", *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed)
    assert [i["steps_lost"] for i in outcome.incidents] == [0, 0]


@pytest.mark.soak
def test_the_job_ends_without_checkpoint_when_experts_have_no_holder(tmp_path: Path) -> None:
    """When both ranks that hold some experts are lost at once and there is no checkpoint, then the
    job ends, names the lost shard, and leaves no checkpoint that lacks it."""
    outcome = train(tmp_path / "run", "kill:ranks=1+3,step=6")
    assert outcome.code == 4, outcome.output
    assert "'part.1+3'" in outcome.report["why"]
    places = tmp_path / "run" / "checkpoints"
    assert not places.exists() or list(places.iterdir()) == []


@pytest.mark.soak
def test_experts_without_a_holder_come_from_a_periodic_checkpoint(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """When both ranks that hold some experts are lost at once, then all ranks return to the newest
    periodic checkpoint, and the later losses are those of the undisturbed run."""
    more = ("--checkpoint-every", "3")
    specs = ("kill:ranks=0+2,step=8",)
    outcome = train(tmp_path / "run", *specs, more=more)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed)


@pytest.mark.soak
def test_a_dumped_job_is_resumed_bit_for_bit_and_read_whole_by_plain_torch(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """When the survivors write one copy of each shard, then --resume trains on bit for bit, and
    plain torch reads the dense part and all experts from the checkpoint."""
    more = ("--enable", "dump")
    outcome = train(tmp_path / "run", "kill:rank=2,step=8", more=more)
    assert outcome.code == 3, outcome.output
    [place] = (tmp_path / "run" / "checkpoints").glob("step-*")
    written = {path.name for path in place.iterdir() if path.is_dir()}
    assert written == {"dense", "part.0+2", "part.1+3"}
    reader = dcp.FileSystemReader(place)  # type: ignore[attr-defined]  # torch documents this name
    known = reader.read_metadata().state_dict_metadata
    for name in GPT(SIZES["tiny"]).state_dict():
        assert f"model.{name}" in known or ".perceptron." in name
    for expert in range(2):
        assert f"model.blocks.1.perceptron.experts.{expert}.0.weight" in known
    resumed = train(tmp_path / "run", more=(*more, "--resume"))
    assert resumed.code == 0, resumed.output
    identical(resumed, undisturbed)
