"""
The example with its model cut up, by FSDP2, by tensor parallelism and into the stages of a pipeline, on
real torch, with ranks killed and broken: each run is compared bit for bit with the undisturbed one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gpt import GPT, SIZES

from tests.e2e.conftest import GPT_STEPS
from tests.e2e.jobs import ROOT, Outcome, identical, run

EXAMPLES = ROOT / "examples" / "gpt"
SHARDED = EXAMPLES / "sharded.py"
LAYOUTS = {
    "fsdp": (SHARDED, "--layout", "fsdp"),
    "tensor": (SHARDED, "--layout", "tensor"),
    "pipeline": (EXAMPLES / "pipeline.py",),
}
"""In each, ranks 0 and 2 have the same part, and ranks 1 and 3."""
PHASES = ("forward", "backward", "update", "between")


def train(run_dir: Path, layout: str, *specs: str, more: tuple[str, ...] = ()) -> Outcome:
    """
    The job, with what chaos does to it.
    """
    options = [word for spec in specs for word in ("--chaos", spec)]
    script, *arguments = LAYOUTS[layout]
    steps = ("--steps", str(GPT_STEPS))
    return run(run_dir, *options, *more, script=script, arguments=(*steps, *arguments))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """
    Without any fault, by layout.
    """
    where = tmp_path_factory.mktemp("sharded")
    outcomes = {layout: train(where / layout, layout) for layout in LAYOUTS}
    for outcome in outcomes.values():
        assert outcome.code == 0, outcome.output
    return outcomes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_killed_and_broken_in_any_phase_change_nothing(
    layout: str, tmp_path: Path, undisturbed: dict[str, Outcome]
) -> None:
    """
    When a rank is killed in each phase of a step in turn, and one reports a memory fault, then each time
    its part comes from the one rank that has it too, and losses and final state are those of the
    undisturbed run.
    """
    specs = [
        f"kill:rank={rank},step={7 * (rank + 1)},phase={phase}" for rank, phase in enumerate(PHASES)
    ]
    outcome = train(
        tmp_path / "run", layout, *specs, "raise:rank=1,step=35,phase=update,kind=memory"
    )
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed[layout])
    assert [i["strategy"] for i in outcome.incidents] == ["recover"] * len(PHASES) + ["retry"]
    assert [i["steps_lost"] for i in outcome.incidents] == [0] * (len(PHASES) + 1)


@pytest.mark.parametrize("layout", ["fsdp", "pipeline"])
def test_two_ranks_that_leave_each_part_a_holder_change_nothing(
    layout: str, tmp_path: Path, undisturbed: dict[str, Outcome]
) -> None:
    """
    When two ranks with different parts are killed at once, and when one is killed while the other is
    replaced, then nothing changes.
    """
    specs = (
        "kill:rank=0,step=12,phase=forward", "kill:rank=3,step=12,phase=forward",
        "kill:rank=2,step=24,phase=backward", "kill:rank=1,step=24,phase=repair",
    )  # fmt: skip
    outcome = train(tmp_path / "run", layout, *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed[layout])
    assert [i["processes_started"] for i in outcome.incidents] == [2, 2]


def test_stages_that_wait_for_one_that_hangs_leave_it(
    tmp_path: Path, undisturbed: dict[str, Outcome]
) -> None:
    """
    When a stage hangs while the next one waits for what it is to send, and another stops while the one
    before waits for what comes back, then who waits is not taken for who hangs, and nothing changes.
    """
    specs = ("hang:rank=0,step=12,phase=forward", "stop:rank=3,step=24,phase=backward")
    outcome = train(tmp_path / "run", "pipeline", *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed["pipeline"])
    faults = [[(f["kind"], f["rank"]) for f in i["faults"]] for i in outcome.incidents]
    assert faults == [[("hang", 0)], [("hang", 3)]]


def test_a_part_without_a_holder_is_not_made_up(tmp_path: Path) -> None:
    """
    When both ranks that have a part are lost at once and there is no checkpoint, then the job ends, says
    which part is gone, and leaves no checkpoint that lacks it.
    """
    outcome = train(tmp_path / "run", "fsdp", "kill:rank=1,step=12", "kill:rank=3,step=12")
    assert outcome.code == 4, outcome.output
    assert "'part.1'" in outcome.report["why"]
    places = tmp_path / "run" / "checkpoints"
    assert not places.exists() or list(places.iterdir()) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dumped_job_is_resumed_bit_for_bit_and_read_whole_by_plain_torch(
    layout: str, tmp_path: Path, undisturbed: dict[str, Outcome]
) -> None:
    """
    When the survivors write one copy of each part, then --resume goes on bit for bit, and plain torch
    reads whole parameters, of which each part is what its rank has written.
    """
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
    dcp.load(state, checkpoint_id=place, no_dist=True)  # type: ignore[attr-defined]  # as documented
    read = [(f"model.{name}", tensor) for name, tensor in whole.items()]
    read += [(f"optim.state.{name}.exp_avg", tensor) for name, tensor in optimizer.items()]
    for key, tensor in read:
        written = [part_of(place / f"part.{part}", key) for part in (0, 1)]
        assert any(own is not None for own in written), key
        halves = [chunk for dim in range(tensor.dim()) for chunk in tensor.chunk(2, dim)]
        for own in written:
            assert own is None or any(same(own, each) for each in [tensor, *halves]), key
    resumed = train(tmp_path / "run", layout, more=(*more, "--resume"))
    assert resumed.code == 0, resumed.output
    identical(resumed, undisturbed[layout])


def part_of(place: Path, name: str) -> torch.Tensor | None:
    """
    A tensor as one rank has written it; None: it is of a stage that this rank has not.
    """
    reader = dcp.FileSystemReader(place)  # type: ignore[attr-defined]  # as documented
    known = reader.read_metadata().state_dict_metadata.get(name)
    if known is None:
        return None
    found = {name: torch.empty(known.size)}  # type: ignore[union-attr]  # it is a tensor
    dcp.load(found, checkpoint_id=place, no_dist=True)  # type: ignore[attr-defined]  # as documented
    return found[name]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """
    Of the same shape and content.
    """
    return one.shape == other.shape and torch.equal(one, other)


@pytest.mark.soak
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_in_every_phase(
    layout: str, phase: str, rank: int, tmp_path: Path, undisturbed: dict[str, Outcome]
) -> None:
    """
    When any rank is killed in any phase, and another reports a memory fault in the same phase later,
    then nothing changes.
    """
    specs = (
        f"kill:rank={rank},step=20,phase={phase}",
        f"raise:rank={(rank + 1) % 4},step=30,phase={phase},kind=memory",
    )
    outcome = train(tmp_path / "run", layout, *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed[layout])
    assert [i["steps_lost"] for i in outcome.incidents] == [0, 0]
