"""
Models that a factory makes over process groups: what the adaptor derives from them, and which
models it refuses.

`tests/e2e/test_sharded.py` runs whole jobs with such models.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tft_pytorch import Made, ReplicaOptimizer
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.factory_maker import adopt_make
from tft_pytorch.forward_buffers import INLINE
from tft_pytorch.shard_content import ShardContent
from tft_pytorch.sharded_state import Parts, room
from tft_pytorch.state_store import StateStore
from tft_pytorch.trees import Disassembly
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore  # torch.distributed imports it from here
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import swa_utils
from torch.testing._internal.distributed.fake_pg import FakeStore

from tft.errors import OrderRefused, UsageError


def of(model: nn.Module) -> Made:
    """
    Return the model with an AdamW optimizer, as a factory returns them.
    """
    return Made(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))


def sharded() -> Made:
    """
    Make a layer that FSDP2 shards over two ranks, in two replicas.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh)
    return of(model)


def sharded_once() -> Made:
    """
    Make a layer that FSDP2 shards over all four ranks, so no rank has a copy.
    """
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return of(model)


def tensor_parallel() -> Made:
    """
    Make a model with tensor parallelism over two ranks, in two replicas.
    """
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["replicate", "shard"])
    return of(model)


def staged() -> Made:
    """
    Make a pipeline of two stages, each replicated by DDP over two ranks.
    """
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    stage = torch.distributed.get_rank() // 2
    return of(DDP(nn.Linear(8, 8), process_group=groups[stage]))


def with_shares(model: nn.Module, group: dist.ProcessGroup) -> Made:
    """
    Return the model with an optimizer whose state is cut into shards over the ranks of `group`.
    """
    optimizer = ReplicaOptimizer(
        model.parameters(), torch.optim.AdamW, group=group, copies=2, lr=0.1
    )
    return Made(model=model, optimizer=optimizer)


def shared() -> Made:
    """
    Make a model for eight ranks: tensor parallelism over two ranks, with four replicas.

    The four ranks with the same part of the model share the optimizer state of that part.
    """
    mesh = init_device_mesh("cpu", (4, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["replicate", "shard"])
    return with_shares(model, mesh["replicate"].get_group())


def adopted(make: Callable[[], Any]) -> StateStore:
    """
    Return the training state after the adaptor has adopted the factory `make`.
    """
    return adopt_make({"make": make}, None)


@pytest.mark.parametrize(
    ("make", "holders"),
    [
        (sharded, {0: (0, 2), 1: (1, 3), 3: (1, 3)}),
        pytest.param(sharded_once, {0: (0,), 2: (2,)}, marks=pytest.mark.soak),
        pytest.param(tensor_parallel, {0: (0, 2), 3: (1, 3)}, marks=pytest.mark.soak),
        (staged, {0: (0, 1), 1: (0, 1), 3: (2, 3)}),
    ],
)
def test_holders_of_a_part_are_read_from_the_made_model(
    make: Callable[[], Made], holders: dict[int, tuple[int, ...]]
) -> None:
    """When a model is distributed over meshes or groups, then the holders of a rank's part are all
    ranks that have the same part. The name of the shard lists these ranks."""
    for rank, ranks in holders.items():
        [copies] = adopted(make).shards(rank, 4)
        assert (copies.shard, copies.ranks) == (f"part.{'+'.join(map(str, ranks))}", ranks)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("rank", "shards"),
    [
        (0, {"part.0+2+4+6": (0, 2, 4, 6), "optimizer.0": (0, 4)}),
        pytest.param(
            5, {"part.1+3+5+7": (1, 3, 5, 7), "optimizer.1": (1, 5)}, marks=pytest.mark.soak
        ),
        pytest.param(
            6, {"part.0+2+4+6": (0, 2, 4, 6), "optimizer.2": (2, 6)}, marks=pytest.mark.soak
        ),
        (7, {"part.1+3+5+7": (1, 3, 5, 7), "optimizer.3": (3, 7)}),
    ],
)
def test_optimizer_share_is_a_separate_shard(rank: int, shards: dict[str, tuple[int, ...]]) -> None:
    """When the optimizer state is divided among the holders of a model part, then a rank has one
    shard for its optimizer share and one for its part."""
    found = adopted(shared).shards(rank, 8)
    assert {copies.shard: copies.ranks for copies in found} == shards


def test_kept_parameters_have_names_without_wrappers() -> None:
    """When a model has DDPs inside other modules, then the kept parameters have the names that
    torch's `get_state_dict` gives."""

    def make() -> Made:
        whole = nn.Sequential(DDP(nn.Sequential(nn.Linear(8, 8))))
        whole.module = DDP(nn.Linear(8, 8))
        return of(whole)

    with alone():
        made = make()
        expected, _ = get_state_dict(made.model, made.optimizer)
        assert Parts(made).parameters.keys() == expected.keys()
        assert expected.keys() == {
            "0.0.weight", "0.0.bias", "module.weight", "module.bias",
        }  # fmt: skip


@contextmanager
def alone() -> Iterator[None]:
    """
    Form a default process group of one rank for the `with` block.
    """
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Counting(nn.Module):
    """
    A model that counts its forward passes in a buffer.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """
        Map (batch, 8) to a tensor of the same shape.
        """
        self.seen += 1
        return self.layer(x)  # type: ignore[no-any-return]  # torch has no types here


@pytest.mark.parametrize("size", [10, INLINE])
def test_buffers_of_a_made_model_are_restored_to_the_last_step(size: int) -> None:
    """When a made model counts in buffers and a step is rolled back, then the rank's state and the
    next made model have the values of the last complete step."""
    maker = adopted(lambda: of(DDP(Counting(size))))
    [shard] = [copies.shard for copies in maker.shards(0, 1)]

    def step(made: Made) -> bytes:
        made.model(torch.randn(2, 8)).sum().backward()
        maker.capture()
        return maker.capture(closing=True)

    with alone():
        model = maker.rebuild()
        maker.rollback(maker.capture())
        local_state = b""
        for _ in range(2):
            local_state = step(model)
    for _ in range(3):
        model.model.module(torch.randn(2, 8))
        maker.capture()
        maker.clear()
        assert (
            bytes(maker.give(shard).buffers[-1].view) == torch.full((size,), 2.0).numpy().tobytes()
        )
        with alone():
            model = maker.rebuild()
            maker.rollback(local_state)
        assert torch.equal(model.model.module.seen, torch.full((size,), 2.0))


def test_made_objects_are_freed_with_their_groups() -> None:
    """When the groups are cleared, then the made model, optimizer, scheduler and average are freed,
    because they refer to the groups."""

    def make() -> Made:
        made = of(DDP(Counting(4)))
        average = swa_utils.AveragedModel(made.model.module)
        scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1)
        return replace(made, scheduler=scheduler, others={"average": average})

    maker = adopted(make)
    maker.shards(0, 1)
    with alone():
        made = maker.rebuild()
        maker.rollback(maker.capture())
        made.model(torch.randn(2, 8)).sum().backward()
        made.optimizer.step()
        maker.capture(closing=True)
        maker.end_step()
        objects = (made.model, made.optimizer, made.scheduler, made.others["average"])
        alive = [weakref.ref(each) for each in objects]
        del made, objects
        maker.clear()
        assert [type(each()).__name__ for each in alive if each() is not None] == []


def test_made_model_can_be_compared_in_the_loop_and_before_it() -> None:
    """When a made model is compared in its loop, then only buffers that the forward pass changes
    are left out. A process that has fetched the state but has not made its model gives equal
    digests for the rest."""
    maker, fresh = (adopted(lambda: of(DDP(Counting(4)))) for _ in range(2))
    for each in (maker, fresh):
        assert [copies.shard for copies in each.shards(0, 1)] == ["dense"]
    with alone():
        made = maker.rebuild()
        maker.capture()
        before = maker.compare("dense")
        made.model(torch.randn(2, 8)).sum().backward()
        maker.capture()
        assert maker.compare("dense") == {**before, "buffer model.seen": ""}
        made.optimizer.step()
        maker.capture(closing=True)
        held = maker.compare("dense")
        payload = maker.give("dense")
    for place, buffer in zip(fresh.take("dense", payload.meta), payload.buffers, strict=True):
        place.view[:] = buffer.view
    fresh.taken("dense", payload.meta)
    fetched = fresh.compare("dense")
    assert fetched.keys() == held.keys()
    assert held["buffer model.seen"] == ""
    assert {name for name, digest in fetched.items() if digest != held[name]} == {
        "buffer model.seen"
    }


def test_replica_optimizer_over_a_group_without_a_factory_is_refused() -> None:
    """When a ReplicaOptimizer is made over a group but not in a factory, then it is refused. A
    ReplicaOptimizer without ranks or group is refused too."""
    model = nn.Linear(8, 8)
    with pytest.raises(UsageError, match="the rank and the world of the session, or the group"):
        ReplicaOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        group = dist.group.WORLD
        assert group is not None
        made = with_shares(model, group)
        with pytest.raises(UsageError, match="was made over a process group"):
            adopt({"model": made.model, "optimizer": made.optimizer}, None)
    finally:
        dist.destroy_process_group()


def test_trial_of_the_factory_does_not_change_torchs_generator() -> None:
    """When a factory is called for a trial and sets a seed, then the state of torch's generator
    does not change."""

    def make() -> Made:
        torch.manual_seed(7)
        return sharded()

    torch.manual_seed(0)
    before = torch.get_rng_state()
    adopted(make).shards(0, 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_give_is_refused_before_the_model_is_made() -> None:
    """When another rank asks for a shard before the factory was called for training, then the order
    is refused, because the model of a trial call is not the start of training."""
    maker = adopted(sharded)
    maker.shards(0, 4)
    with pytest.raises(OrderRefused, match=r"make of session\.adopt has not been called yet"):
        maker.give("part.0+2")


def described(groups: list[dict[str, Any]], others: list[str]) -> ShardContent:
    """
    Return the description of a shard without tensors, with these optimizer groups and other parts.
    """
    kept = Disassembly()
    return ShardContent(
        form=2,
        tensors={},
        spans={},
        optimizer=kept.take_apart({"state": {}, "param_groups": groups}, "optim"),
        others={name: kept.take_apart({}, name) for name in others},
    )


SETTLED = [{"params": [], "lr": 0.1}]
UNSETTLED: list[dict[str, Any]] = [{"params": []}]
DECAYED: list[dict[str, Any]] = [{"params": ["a"], "lr": 0.1}, {"params": ["b"], "lr": 0.2}]
SWAPPED: list[dict[str, Any]] = [{"params": ["b"], "lr": 0.1}, {"params": ["a"], "lr": 0.2}]


@pytest.mark.parametrize(
    ("there", "here", "sentence"),
    [
        (described(UNSETTLED, []), described(SETTLED, []), r"the groups \[\], but this rank .* the groups \[0\]"),
        (described(SETTLED, []), described(UNSETTLED, []), r"the groups \[0\], but this rank .* the groups \[\]"),
        (
            described(SETTLED, []), described(SETTLED, ["scheduler"]),
            r"objects \(others\) \[\], but this rank has the objects \['scheduler'\]",
        ),
        (
            described(SETTLED, ["scheduler"]), described(SETTLED, []),
            r"objects \(others\) \['scheduler'\], but this rank has the objects \[\]",
        ),
        (
            described(UNSETTLED, []), described(UNSETTLED, ["average"]),
            r"objects \(others\) \[\], but this rank has the objects \['average'\]",
        ),
        (
            described(SWAPPED, []), described(DECAYED, []),
            "a is in the parameter group 1 of the optimizer on the sending rank, but in the parameter group 0 on "
            "this rank",
        ),
        (
            described(DECAYED, []), described([DECAYED[0], {"params": [], "lr": 0.2}], []),
            "b is in the parameter group 1 of the optimizer on the sending rank, but in no parameter group on this "
            "rank",
        ),
    ],
)  # fmt: skip
def test_shard_with_other_settings_than_this_rank_is_refused(
    there: ShardContent, here: ShardContent, sentence: str
) -> None:
    """When the parameter groups, schedulers or averages of a shard differ from those of this rank,
    then the rank refuses to take the shard. Training does not continue with fresh settings."""
    room(here.meta(), here)
    with pytest.raises(OrderRefused, match=sentence):
        room(there.meta(), here)


def test_shard_with_an_average_is_taken_by_a_rank_without_it() -> None:
    """When a shard has a moving average that began only during training, then a rank that has no
    average yet takes the shard."""
    taken = room(described(UNSETTLED, ["average"]).meta(), described(UNSETTLED, []))
    assert list(taken.others) == ["average"]


def plain() -> Made:
    """
    Make a model that is not distributed.
    """
    return of(nn.Linear(8, 8))


def with_running_statistics() -> Made:
    """
    Make a sharded model with a BatchNorm layer, which keeps running statistics.
    """
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return of(model)


def shared_with_strangers() -> Made:
    """
    Make a sharded model whose optimizer state is cut over a group of ranks that hold different
    parts of the model.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh)
    return with_shares(model, mesh["shard"].get_group())


def shared_without_a_group() -> Made:
    """
    Make a sharded model whose `ReplicaOptimizer` gets a rank and a world size instead of a group.

    Only a model that the script hands over directly, without a factory, may do this.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh)
    rank = dist.get_rank()
    optimizer = ReplicaOptimizer(model.parameters(), torch.optim.AdamW, rank=rank, world=4, lr=0.1)
    return Made(model=model, optimizer=optimizer)


def shared_in_16_bits() -> Made:
    """
    Make a sharded model in bfloat16 whose `ReplicaOptimizer` keeps 32-bit master copies.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh)
    return with_shares(model, mesh["replicate"].get_group())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            shared_with_strangers,
            r"over the ranks \[0, 1\], but the same part .* is on the ranks \[0, 2\]",
        ),
        (shared_without_a_group, "must be given the group"),
        (shared_in_16_bits, "Make the parameters with 32 bits"),
        (plain, "weight is neither distributed over a device mesh nor in a DDP"),
        (with_running_statistics, "1 keeps running statistics"),
        (lambda: nn.Linear(8, 8), "make of session.adopt must return a Made, not a Linear"),
        (lambda: Made(model=3, optimizer=4), "make of session.adopt must return Made"),
    ],
)
def test_factory_with_an_unrepairable_model_is_refused(make: Callable[[], Any], why: str) -> None:
    """When the factory makes a model or optimizer that cannot be repaired, then it is refused at
    the start."""
    with pytest.raises(UsageError, match=why):
        adopted(make).shards(0, 4)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "parts",
    [{"make": sharded, "model": nn.Linear(2, 2)}, {"make": 3}, {"make": sharded, "data": 3}],
)
def test_invalid_argument_beside_a_factory_is_refused(parts: dict[str, Any]) -> None:
    """When a model is handed over together with a factory, or the factory, data position or `wrap`
    is not valid, then `adopt_make` raises `UsageError`."""
    with pytest.raises(UsageError):
        adopt_make(parts, None)
    with pytest.raises(UsageError):
        adopt_make({"make": sharded}, lambda: None)
