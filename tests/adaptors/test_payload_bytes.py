"""
The bytes that leave a rank: payloads of shards, digests, captures and the files of checkpoints.

The ranks of one job may run different versions of the adaptor. A checkpoint may also be read by a
different version than the one that wrote it. So these bytes must not change. A developer who has to
change them must give the description of a shard a new form number.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from tft_pytorch import Made, ReplicaOptimizer
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.factory_maker import adopt_make
from tft_pytorch.state_store import StateStore
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore

from tft.spi import pack

RANK, WORLD = 1, 4


class Momentum(torch.optim.Optimizer):
    """
    An optimizer whose state does not depend on the version of torch and whose arithmetic is exact.
    """

    def __init__(self, params: Any, lr: float | Tensor = 0.5) -> None:  # Any: as in torch
        super().__init__(params, {"lr": lr, "nested": {"betas": (0.5, 0.25)}})

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # torch overloads it
        """
        Add the gradients to the sum in the state, and apply the sum times the learning rate.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                if not kept:
                    kept |= {"step": 0, "sum": torch.zeros_like(parameter, requires_grad=False)}
                kept["step"] += 1
                with torch.no_grad():
                    kept["sum"] += parameter.grad
                    parameter -= kept["sum"] * group["lr"]


class Position:
    """
    The position of a rank in its training data.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"epoch": 1, "order": torch.arange(3)}

    def state_dict(self) -> dict[str, Any]:  # Any: as in torch
        """
        Return the position.
        """
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:  # Any: as in torch
        """
        Set the position to the one in `state`.
        """
        self.state = dict(state)


class Average(Position):
    """
    A moving average of a parameter, whose state also has a number and a tuple.
    """

    def __init__(self, like: Tensor) -> None:
        self.state = {"0.weight": like.detach() * 2, "counted": 3, "limits": (1, 2.5)}


class Counting(nn.Module):
    """
    A module with two buffers and a parameter that is tied to that of another layer.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(4.0))
        self.register_buffer("hidden", torch.arange(2.0), persistent=False)
        self.tied = layer.weight

    def get_extra_state(self) -> dict[str, int]:
        """
        Return the extra state, which torch also writes into its checkpoints.
        """
        return {"count": 7}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """
        Do nothing: the extra state never changes.
        """


def numbered(model: nn.Module) -> nn.Module:
    """
    Set the parameters to values with which every processor computes exactly, and return the model.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(float(parameter.numel())).view(parameter.shape) / 8)
    return model


def net() -> nn.Sequential:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, Counting(layer), nn.BatchNorm1d(4), nn.Linear(4, 2))


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """
    Apply one optimizer step in which every gradient is 0.25.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 0.25)
    optimizer.step()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "lr": torch.tensor(0.25)},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]


def whole() -> StateStore:
    """
    Return the state of a job in which every rank holds a complete copy.
    """
    model = numbered(net())
    optimizer = Momentum(groups_of(model))
    first = next(model.parameters())
    state = adopt(
        {
            "model": model,
            "optimizer": optimizer,
            "scheduler": Average(first[0]),
            "others": {"average": Average(first)},
            "data": Position(),
        },
        None,
    )
    state.rebuild()
    stepped(optimizer)
    return state


def shares(dtype: torch.dtype) -> Callable[[], StateStore]:
    """
    Return a function that makes a state whose optimizer is cut into two shards.
    """

    def made() -> StateStore:
        model = numbered(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))).to(dtype)
        optimizer = ReplicaOptimizer(groups_of(model), Momentum, rank=RANK, world=WORLD)
        stepped(optimizer)
        return adopt({"model": model, "optimizer": optimizer}, None)

    return made


def mixed() -> Made:
    """
    Make a layer that FSDP2 shards over two ranks in two replicas, behind a DDP layer on all ranks.
    """
    small, trunk = nn.Linear(4, 4), numbered(nn.Linear(4, 4))
    numbered(small)
    fully_shard(trunk, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "cut")))
    model = nn.Sequential(DDP(nn.Sequential(small, Counting(small))), trunk)
    optimizer = Momentum(groups_of(model))
    average = Average(small.weight)
    return Made(model=model, optimizer=optimizer, scheduler=Position(), others={"average": average})


def cut() -> Made:
    """
    Make a model that FSDP2 shards over two ranks in two replicas, with an optimizer cut into two
    shards.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "cut"))
    model = nn.Sequential(numbered(nn.Linear(4, 4)), numbered(nn.Linear(4, 4)))
    fully_shard(model, mesh=mesh)
    group = mesh["copies"].get_group()
    return Made(
        model=model, optimizer=ReplicaOptimizer(model.parameters(), Momentum, group=group, copies=2)
    )


def factory(make: Callable[[], Made]) -> Callable[[], StateStore]:
    """
    Return a function that makes the state of the factory `make`. Its process groups send nothing.
    """

    def made() -> StateStore:
        state = adopt_make({"make": make, "data": Position()}, None)
        state.shards(RANK, WORLD)
        with pretended():
            built = state.rebuild()
            stepped(built.optimizer)
            state.capture(closing=True)
            state.clear()
        return state

    return made


@contextmanager
def pretended() -> Iterator[None]:
    """
    Form a fake default process group, which sends nothing, for the `with` block.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def digest_of(content: object) -> str:
    """
    Return the first half of a digest of plain values.
    """
    return xxhash.xxh3_128_hexdigest(pack(content))[:16]


def found_in(state: StateStore, directory: Path) -> dict[str, str]:
    """
    Return a digest of each kind of bytes that leave the rank, by name.
    """
    torch.manual_seed(0)
    found = {
        f"capture {closing}": digest_of(state.capture(closing=closing)) for closing in (False, True)
    }
    found["digests"] = digest_of(list(state.digests().items()))
    found["generators"] = digest_of(list(state.generators().items()))
    for each in state.shards(RANK, WORLD):
        name = each.shard
        payload = state.give(name)
        found[f"{name} meta"] = digest_of(payload.meta)
        found[f"{name} buffers"] = digest_of([[b.name, bytes(b.view)] for b in payload.buffers])
        found[f"{name} compared"] = digest_of(sorted(state.compare(name).items()))
        found[f"{name} saved"] = _entries(directory, state.save(directory / "saved", name), name)
        staged = state.stage(name)(directory / "staged")
        assert staged == sorted(staged)
        found[f"{name} moved"] = _moved(state, name)
        state.load(directory / "staged", name)
        again = state.give(name)
        assert [bytes(b.view) for b in again.buffers] == [bytes(b.view) for b in payload.buffers]
    return found


def _entries(directory: Path, files: list[str], shard: str) -> str:
    metadata = FileSystemReader(directory / "saved" / shard).read_metadata()
    kept: Any = metadata.state_dict_metadata
    names = [[name, [*getattr(kept[name], "size", [])]] for name in sorted(kept)]
    return digest_of([files, names])


def _moved(state: StateStore, shard: str) -> str:
    payload = state.give(shard)
    content = [bytes(buffer.view) for buffer in payload.buffers]
    room = state.take(shard, payload.meta)
    for buffer, received in zip(room, content, strict=True):
        buffer.view[:] = received
    state.taken(shard, payload.meta)
    assert state.give(shard).meta == payload.meta
    return digest_of([buffer.name for buffer in room])


STATES: dict[str, Callable[[], Any]] = {
    "whole": whole,
    "shares": shares(torch.float32),
    "shares with masters": shares(torch.bfloat16),
    "mixed": factory(mixed),
    "cut": factory(cut),
}
EXPECTED: dict[str, dict[str, str]] = {
    "cut": {
        "capture False": "cfdd54d36ca3360e",
        "capture True": "cfdd54d36ca3360e",
        "digests": "4fd33d983a32b036",
        "generators": "63c6fe826a9dd8b2",
        "optimizer.1 buffers": "039e321bbba6676f",
        "optimizer.1 compared": "18768c3835b860db",
        "optimizer.1 meta": "359d5522988a17ae",
        "optimizer.1 moved": "f3b27b5aeeb27246",
        "optimizer.1 saved": "856daa012b60b74d",
        "part.1+3 buffers": "acfcc8a1a10b1182",
        "part.1+3 compared": "f97d95597b39be40",
        "part.1+3 meta": "8cc4c321a1cd36b6",
        "part.1+3 moved": "acfcc8a1a10b1182",
        "part.1+3 saved": "2ccf2efa1b957679",
    },
    "mixed": {
        "capture False": "cfdd54d36ca3360e",
        "capture True": "cfdd54d36ca3360e",
        "dense buffers": "01d73b7816d331f5",
        "dense compared": "fd637e83edccae46",
        "dense meta": "b65e249aa86ded6e",
        "dense moved": "8b3f0ed8217ab548",
        "dense saved": "41ba12ed29788d28",
        "digests": "4eb0b16ff5deeae3",
        "generators": "63c6fe826a9dd8b2",
        "part.1+3 buffers": "930a4b30e19459cd",
        "part.1+3 compared": "9c1132ad8990f4a7",
        "part.1+3 meta": "e89fb98146c97ac2",
        "part.1+3 moved": "ca2e635a55b391cf",
        "part.1+3 saved": "d7c5d7032d13990c",
    },
    "shares": {
        "capture False": "69097ac802d27426",
        "capture True": "69097ac802d27426",
        "dense buffers": "974e6ec22cefcc8e",
        "dense compared": "ab381643f46d536f",
        "dense meta": "45d6e8d057a6553f",
        "dense moved": "2990579e5001c8fa",
        "dense saved": "49e01198926ac0de",
        "digests": "146f8c3e5c08d1fe",
        "generators": "76acfda4af4e7221",
        "optimizer.1 buffers": "2978c5052c12ac85",
        "optimizer.1 compared": "0ef1b0356cb225fd",
        "optimizer.1 meta": "87bd4eeaebdc8aa1",
        "optimizer.1 moved": "266f72bfc67efe84",
        "optimizer.1 saved": "5658d639e5b249d4",
    },
    "shares with masters": {
        "capture False": "69097ac802d27426",
        "capture True": "69097ac802d27426",
        "dense buffers": "974e6ec22cefcc8e",
        "dense compared": "ab381643f46d536f",
        "dense meta": "45d6e8d057a6553f",
        "dense moved": "2990579e5001c8fa",
        "dense saved": "49e01198926ac0de",
        "digests": "07218f9714e3ee9f",
        "generators": "76acfda4af4e7221",
        "optimizer.1 buffers": "3549030715ed55b1",
        "optimizer.1 compared": "bccb6cbb449e7a17",
        "optimizer.1 meta": "54872a980e3de686",
        "optimizer.1 moved": "35baa28f43a33da5",
        "optimizer.1 saved": "ceccebd25f6e79f6",
    },
    "whole": {
        "capture False": "7cfcad44276a8d3a",
        "capture True": "1af7f837a1d8f494",
        "dense buffers": "60b28ae5140dc5d7",
        "dense compared": "5b1caf194974e801",
        "dense meta": "bb32a41ae6fd4341",
        "dense moved": "0d0ff5c024286b54",
        "dense saved": "cac732ad0b5d9901",
        "digests": "4a85b2377a44e4eb",
        "generators": "63c6fe826a9dd8b2",
    },
}


@pytest.mark.parametrize("kind", STATES)
def test_payload_bytes_are_equal_to_those_of_the_earlier_version(kind: str, tmp_path: Path) -> None:
    """When the state of a small model is given, digested, captured and saved, then its bytes are
    equal to those of the earlier version."""
    assert found_in(STATES[kind](), tmp_path) == EXPECTED[kind]
