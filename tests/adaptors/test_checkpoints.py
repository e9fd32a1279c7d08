"""
Last checkpoints: a new tft process and a process with plain torch both load them and continue with
the same results.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.checkpoints import join
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.adaptors.conftest import NewJob
from tests.adaptors.ranks import Recipe
from tft import checkpoint
from tft.errors import CheckpointCorrupt, OrderRefused

BUILD = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 8))
    model.tied = model[0]
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.01},
         {"params": [*model[1].parameters(), *model[3].parameters()], "weight_decay": 0.0}]
    )
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)

def train(model, optimizer, scheduler, steps):
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses
"""

PLAIN = """
import sys
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

model, optimizer, scheduler = build()
model_state, optimizer_state = get_state_dict(model, optimizer)
state = {"model": model_state, "optim": optimizer_state, "scheduler": scheduler.state_dict()}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
set_state_dict(
    model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
)
scheduler.load_state_dict(state["scheduler"])

assert not [name for name in sys.modules if name.startswith("tft")]
print(*train(model, optimizer, scheduler, range(3, 7)))
"""


def test_plain_torch_loads_a_checkpoint_and_gets_equal_losses(tmp_path: Path) -> None:
    """When a script without tft loads the model, optimizer and scheduler from a checkpoint, then
    its next losses are equal to those of the saved job."""
    namespace: dict[str, Any] = {}
    exec(BUILD, namespace)
    model, optimizer, scheduler = namespace["build"]()
    namespace["train"](model, optimizer, scheduler, range(3))
    state = adopt({"model": model, "optimizer": optimizer, "scheduler": scheduler}, None)
    state.save(tmp_path, "dense")
    expected = namespace["train"](model, optimizer, scheduler, range(3, 7))

    plain = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", BUILD + PLAIN, str(tmp_path / "dense")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.split() == expected


def test_compiled_model_is_saved_under_plain_parameter_names(tmp_path: Path) -> None:
    """When the model or a module of it is compiled, then plain torch loads the checkpoint into a
    model that is not compiled."""

    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))

    plain = net()
    inner = net()
    inner[1] = torch.compile(inner[1], backend="eager")  # type: ignore[assignment]  # it returns a Module
    for kind, model in {"whole": torch.compile(net(), backend="eager"), "inner": inner}.items():
        assert isinstance(model, nn.Module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        adopt({"model": model, "optimizer": optimizer}, None).save(tmp_path / kind, "dense")
        read = {name: torch.full_like(t, -1) for name, t in plain.state_dict().items()}
        dcp.load({"model": read}, checkpoint_id=tmp_path / kind / "dense", no_dist=True)  # type: ignore[attr-defined]  # torch documents this name
        for tensor, own in zip(read.values(), model.state_dict().values(), strict=True):
            assert torch.equal(tensor, own)


@pytest.mark.parametrize(
    ("recipe", "completed"),
    [
        (Recipe(), 0),
        pytest.param(Recipe(), 3, marks=pytest.mark.soak),
        pytest.param(Recipe(optimizer="sgd", norm="batch"), 1, marks=pytest.mark.soak),
        (Recipe(optimizer="tensor_lr"), 2),
    ],
    ids=["before the first step", "adamw", "sgd and batch norm", "tensor lr"],
)
def test_resumed_job_is_bitwise_equal(
    job: NewJob, tmp_path: Path, recipe: Recipe, completed: int
) -> None:
    """When fresh processes load a checkpoint saved in the middle of a step and their own rank-local
    state, then the job continues bitwise equal. All later losses, gradients and digests are those
    of the saved job."""
    saved = job(3, recipe)
    saved.all("train", completed)
    local_states = saved.all("local_state", completed)
    saved.all("interrupt")
    saved.all("clear")
    names = saved.ranks[1].ask("save", tmp_path)
    saved.form()
    saved.all("build")
    saved.all("roll_back", completed, None)
    expected = saved.all("train", 6), saved.all("digests")

    resumed = job(3, recipe)
    resumed.all("clear")
    resumed.all("load", tmp_path)
    resumed.form()
    resumed.all("build")
    for rank, local_state in zip(resumed.ranks, local_states, strict=True):
        rank.ask("roll_back", completed, local_state)

    assert names == ["dense/.metadata", "dense/__0_0.distcp"]
    assert all((tmp_path / name).is_file() for name in names)
    assert (resumed.all("train", 6), resumed.all("digests")) == expected


def test_job_resumed_with_the_scripts_own_functions_is_bitwise_equal(
    job: NewJob, tmp_path: Path
) -> None:
    """When the script's own functions save and load the shards, then a resumed job reduces
    gradients in the same order as before. All later losses, gradients and digests are equal to
    those without the interruption."""
    saved = job(3, Recipe(norm="batch"))
    saved.all("train", 3)
    local_states = saved.all("local_state", 3)
    saved.all("clear")
    saved.ranks[1].ask("save_own", tmp_path)
    saved.form()
    saved.all("build")
    saved.all("roll_back", 3, None)
    expected = saved.all("train", 6), saved.all("digests")

    resumed = job(3, Recipe(norm="batch"))
    resumed.all("clear")
    resumed.all("load_own", tmp_path)
    resumed.form()
    resumed.all("build")
    for rank, local_state in zip(resumed.ranks, local_states, strict=True):
        rank.ask("roll_back", 3, local_state)
    assert (resumed.all("train", 6), resumed.all("digests")) == expected


def test_repeated_save_removes_files_of_an_earlier_attempt(tmp_path: Path) -> None:
    """When a save is repeated, then it removes the files of the earlier attempt from its directory."""
    model = torch.nn.Linear(2, 2)
    state = adopt({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, None)
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "__1_0.distcp").write_bytes(b"of a saver that was killed")

    names = state.save(tmp_path, "dense")

    assert sorted(f"dense/{file.name}" for file in (tmp_path / "dense").iterdir()) == names
    assert [checkpoint.digest_file(tmp_path, name).size > 0 for name in names] == [True, True]


def test_shards_of_a_killed_attempt_are_not_joined(tmp_path: Path) -> None:
    """When a killed attempt has left shards of other names in the directory, then the joined
    checkpoint does not include them."""

    def saved(place: Path, model: nn.Module) -> list[str]:
        optimizer = torch.optim.SGD(model.parameters())
        return adopt({"model": model, "optimizer": optimizer}, None).save(place, "dense")

    saved(tmp_path, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)))
    (tmp_path / "dense").rename(tmp_path / "a-part")
    own = nn.Sequential(nn.Linear(2, 2))
    names = saved(tmp_path, own)
    copies = [f"copy-rank1/{name}" for name in names]

    assert join(tmp_path, [*names, *copies, "local-state-rank0.bin"]) == [".metadata"]

    known = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {name for name in known if name.startswith("model.")} == {
        "model.0.weight",
        "model.0.bias",
    }
    read = {name: torch.full_like(t, -1) for name, t in own.state_dict().items()}
    dcp.load({"model": read}, checkpoint_id=tmp_path, no_dist=True)  # type: ignore[attr-defined]  # torch documents this name
    for name, tensor in own.state_dict().items():
        assert torch.equal(read[name], tensor)


def test_missing_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    """When the checkpoint is missing or was written by another program, then loading is refused.
    Saving a shard that the model does not have is refused too."""
    model = torch.nn.Linear(2, 2)
    state = adopt({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, None)
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        state.load(tmp_path, "dense")

    from torch.distributed.checkpoint.state_dict_saver import save

    save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dense", no_dist=True)
    with pytest.raises(CheckpointCorrupt, match=r"no entry tft\.meta"):
        state.load(tmp_path, "dense")
    with pytest.raises(OrderRefused, match="this rank has no shard 'sparse'"):
        state.save(tmp_path, "sparse")
