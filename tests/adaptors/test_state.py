"""
The shard of a rank: every kind of state arrives unchanged in another process.

State that cannot be transferred is refused when the script hands it over.
"""

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.memory import readable, writable
from tft_pytorch.state_store import StateStore
from tft_pytorch.trees import Disassembly, put_together
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.adaptors.ranks import Batches, Net, Recipe, make_optimizer
from tft.errors import MalformedMessage, OrderRefused, UsageError
from tft.protocol.codec import pack, unpack


class Odd(nn.Module):
    """
    A model with tensors of every kind that can be transferred.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bfloat = nn.Parameter(torch.randn(5, 3, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.images = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.tensor(int(torch.randint(1 << 40, ()))))
        self.register_buffer("mask", torch.rand(7) > 0.5, persistent=False)
        self.register_buffer("absent", None)


def trained(kind: str, seed: int, steps: int) -> tuple[Net, torch.optim.Optimizer, Any]:
    """
    Return the state of a model, an optimizer and a scheduler after `steps` steps.
    """
    torch.manual_seed(seed)
    net = Net("batch")
    optimizer = make_optimizer(Recipe(optimizer=kind), net, 0, 1)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch)),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        ],
        [2],
    )
    data = Batches(seed)
    for _ in range(steps):
        net(data.next()).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return net, optimizer, scheduler


def move(giver: StateStore, taker: StateStore) -> None:
    """
    Copy the shard `dense` from `giver` to `taker`, byte by byte.
    """
    payload = giver.give("dense")
    for buffer, room in zip(payload.buffers, taker.take("dense", payload.meta), strict=True):
        assert buffer.name == room.name
        room.view[:] = buffer.view
    taker.taken("dense", payload.meta)


@pytest.mark.parametrize("steps", [0, 3])
def test_state_from_another_device_type_is_loaded(steps: int) -> None:
    """When a shard comes from another device type, for example a checkpoint of a GPU job in a CPU
    job, then its content is loaded into model and optimizer. The device `meta` stands for the other
    type."""
    kept = [trained("tensor_lr", 1, 3), trained("tensor_lr", 2, steps)]
    one, other = (adopt({"model": m, "optimizer": o, "scheduler": s}, None) for m, o, s in kept)
    payload = one.give("dense")
    told = unpack(payload.meta)
    assert isinstance(told, dict)
    tensors = [[*each[:3], "meta" if each[2] else each[3]] for each in told["tensors"]]
    elsewhere = pack(told | {"tensors": tensors})

    for buffer, room in zip(payload.buffers, other.take("dense", elsewhere), strict=True):
        room.view[:] = buffer.view
    other.taken("dense", elsewhere)

    for name in ("parameters", "optimizer", "scheduler"):
        assert one.digests()[name] == other.digests()[name]


@pytest.mark.parametrize("kind", ["adamw", "sgd", "tensor_lr"])
@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.soak), 3])
def test_untrained_model_takes_the_whole_state(kind: str, steps: int) -> None:
    """When an untrained model takes the shard of a trained model, then the digests of both are
    equal, and remain equal after the next steps."""
    kept = [trained(kind, 1, steps), trained(kind, 2, 0)]
    one, other = (adopt({"model": m, "optimizer": o, "scheduler": s}, None) for m, o, s in kept)

    move(one, other)

    for name in ("parameters", "optimizer", "scheduler"):
        assert one.digests()[name] == other.digests()[name]
    for net, optimizer, scheduler in kept:
        torch.manual_seed(3)
        for _ in range(3):
            net(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert one.digests() == other.digests()


def test_every_kind_of_tensor_is_moved() -> None:
    """When tensors have unusual types, no elements, no dimensions or another order than row-major,
    then they are equal after the transfer."""
    models = [Odd(), Odd()]
    one, other = (
        adopt({"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.1)}, None)
        for m in models
    )
    strides = [tensor.stride() for tensor in models[1].state_dict().values()]

    move(one, other)

    for (name, there), here in zip(
        models[0].state_dict().items(), models[1].state_dict().values(), strict=True
    ):
        assert torch.equal(there, here), name
    assert torch.equal(models[0].get_buffer("mask"), models[1].get_buffer("mask"))
    assert [tensor.stride() for tensor in models[1].state_dict().values()] == strides


def test_every_kind_of_tensor_is_saved(tmp_path: Path) -> None:
    """When tensors with unusual types, no elements, no dimensions or another order than row-major
    are written to disk, then a second model reads equal tensors."""
    models = [Odd(), Odd()]
    one, other = (
        adopt({"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.1)}, None)
        for m in models
    )

    one.save(tmp_path, "dense")
    other.load(tmp_path, "dense")

    assert one.digests() == other.digests()


class Nested:
    """
    An object with tensors in tuples.
    """

    def __init__(self, number: float) -> None:
        self.kept = {"pair": (torch.tensor(number), 2), "rows": [("a", torch.full((2,), number))]}

    def state_dict(self) -> dict[str, Any]:
        """
        Return the tuples.
        """
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Take the tuples.
        """
        self.kept = state


def test_tensors_in_tuples_are_saved(tmp_path: Path) -> None:
    """When tensors are in tuples, as betas that are tensors, then a checkpoint can be read, and has
    them as plain torch finds them, too."""

    def make(number: float) -> StateStore:
        model = nn.Linear(2, 2)
        betas = (torch.tensor(number), torch.tensor(0.9))
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=torch.tensor(number), betas=betas, foreach=False
        )
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        parts = {"model": model, "optimizer": optimizer, "others": {"nested": Nested(number)}}
        return adopt(parts, None)

    one, other = make(0.5), make(0.25)
    one.save(tmp_path, "dense")
    other.load(tmp_path, "dense")

    assert one.digests() == other.digests()
    plain: dict[str, Any] = {"optim": {"param_groups": [{"betas": (0, 0)}]}}
    dcp_load(plain, storage_reader=FileSystemReader(tmp_path / "dense"), no_dist=True)
    assert plain["optim"]["param_groups"][0]["betas"] == (0.5, torch.tensor(0.9))


def test_contiguous_tensor_is_read_and_written_without_a_copy() -> None:
    """When a tensor is contiguous, then it is read and written in its own memory, without a copy."""
    tensor = torch.arange(4.0)

    view = readable("x", tensor).view
    writable("x", tensor).buffer.view[:4] = bytes(4)

    assert (view.format, view.ndim, view.nbytes) == ("B", 1, 16)
    tensor[3] = 7.0
    assert numpy.frombuffer(view, numpy.float32).tolist() == [0.0, 1.0, 2.0, 7.0]


def test_each_part_has_its_own_digest() -> None:
    """When one part of the state changes, then the digest of this part changes, and no other digest
    does."""
    net, optimizer, scheduler = trained("adamw", 1, 1)
    data = Batches(0)
    adopted = adopt(
        {"model": net, "optimizer": optimizer, "scheduler": scheduler, "data": data}, None
    )
    before = adopted.digests()
    assert adopted.digests() == before

    def changed() -> set[str]:
        nonlocal before
        earlier, before = before, adopted.digests()
        return {name for name in before if before[name] != earlier[name]}

    with torch.no_grad():
        net.first.weight[3, 3] += 1e-6
    assert changed() == {"parameters"}
    next(iter(optimizer.state.values()))["exp_avg"][0] += 1e-6
    assert changed() == {"optimizer"}
    scheduler.last_epoch += 1
    assert changed() == {"scheduler"}
    torch.rand(1)
    assert changed() == {"rng"}
    data.next()
    assert changed() == {"data"}


def test_shard_without_reserved_memory_is_refused() -> None:
    """When a shard is reported as received and no memory was reserved for it before, then it is
    refused."""
    net, optimizer, _ = trained("adamw", 1, 1)
    adopted = adopt({"model": net, "optimizer": optimizer}, None)
    payload = adopted.give("dense")

    with pytest.raises(OrderRefused, match="for which this rank has reserved memory"):
        adopted.taken("dense", payload.meta)


@pytest.mark.parametrize("difference", ["shape", "type", "groups", "scheduler"])
def test_shard_of_another_model_is_refused(difference: str) -> None:
    """When the two ranks of a transfer train different models, then the receiving rank refuses the
    shard and names the difference."""

    def build(layers: int, dtype: torch.dtype, **parts: Any) -> StateStore:
        model = nn.Linear(3, layers).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if difference == "scheduler" and parts:
            parts["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if difference == "groups" and parts:
            optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
        return adopt({"model": model, "optimizer": optimizer, **parts}, None)

    there = build(3, torch.float32)
    here = build(
        4 if difference == "shape" else 3,
        torch.float64 if difference == "type" else torch.float32,
        data=Batches(0),
    )

    with pytest.raises(OrderRefused) as refused:
        here.take("dense", there.give("dense").meta)

    telling = {
        "shape": "float32 [3",
        "type": "float64",
        "groups": "parameter groups",
        "scheduler": "has the object scheduler",
    }
    assert telling[difference] in str(refused.value)


def test_description_of_another_adaptor_version_is_refused() -> None:
    """When the sending rank runs another version of the adaptor, then the receiving rank refuses
    the description and says so."""
    model = nn.Linear(2, 2)
    adopted = adopt({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, None)

    with pytest.raises(
        MalformedMessage, match="format number 2, but this version of tft reads format 3"
    ):
        adopted.take("dense", pack({"form": 2}))


def parts(**others: Any) -> dict[str, Any]:
    """
    Return a valid model and optimizer, with the parts in `others` added or replaced.
    """
    model = others.pop("model", None) or nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if isinstance(model, nn.Module) else 1
    return {"model": model, "optimizer": optimizer} | others


def expanded() -> nn.Module:
    """
    Make a model with a buffer whose elements share the same memory.
    """
    model = nn.Linear(2, 2)
    model.register_buffer("wide", torch.zeros(1).expand(3))
    return model


def stranger() -> torch.optim.Optimizer:
    """
    Make an optimizer of a parameter that does not belong to any model.
    """
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


class Unplain:
    """
    A scheduler whose state contains a set, which cannot be transferred.
    """

    def state_dict(self) -> dict[str, object]:
        """
        Return a state that contains a set.
        """
        return {"seen": {1, 2}}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """
        Do nothing: no test calls this method.
        """


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            lambda: parts(model=3),
            "model given to session.adopt must be a torch.nn.Module, not a int",
        ),
        (
            lambda: parts(optimizer=None),
            "optimizer given to session.adopt must be a torch.optim.Optimizer",
        ),
        (lambda: parts(data=3), "data must have the methods state_dict"),
        (lambda: parts(ema=3), "was given ema"),
        (lambda: parts(others=[]), "others must be a dict"),
        (lambda: parts(others={"optim": nn.Linear(1, 1)}), "others has the name 'optim', which"),
        (lambda: parts(others={"a.b": nn.Linear(1, 1)}), "others has the name 'a.b', which"),
        (lambda: parts(others={"ema": 3}), "ema must have the methods state_dict"),
        (lambda: parts(rng=("torch", "jax")), "rng has the unknown names jax"),
        (lambda: parts(optimizer=stranger()), "parameters that do not belong to the model"),
        (lambda: parts(model=nn.Linear(2, 2, device="meta")), "is on device meta"),
        (lambda: parts(model=nn.LazyLinear(2)), "lazy"),
        (lambda: parts(model=expanded()), "wide is expanded"),
        (lambda: parts(scheduler=Unplain()), "scheduler.seen holds a builtins.set"),
    ],
)
def test_adopt_refuses_objects_that_cannot_be_kept(given: Any, complaint: str) -> None:
    """When an object is handed over that could not be kept, then `adopt` refuses it and names the
    object and the reason."""
    with pytest.raises(UsageError, match=complaint):
        adopt(given(), None)


def test_containers_keep_their_types_after_packing() -> None:
    """When state is taken apart, packed and put together, then its containers have the same types,
    and its tensors are the given ones."""
    weight = torch.ones(2)
    tree = {
        "betas": (0.9, 0.999),
        "nested": [{"x": (1, [2, None])}, OrderedDict(b=1, a=2)],
        "milestones": Counter({3: 1, 5: 2}),
        "weight": weight,
        "numpy": numpy.float64(0.5),
        "size": torch.Size([2, 3]),
        7: {"tensor": "not one"},
        (1, 2): b"bytes",
    }
    apart = Disassembly()

    plain = unpack(pack(apart.take_apart(tree, "t")))
    back = put_together(plain, {"t.weight": weight})

    assert isinstance(back, dict)
    assert apart.tensors == {"t.weight": weight}
    assert back.pop("weight") is tree.pop("weight")
    assert back == tree
    assert type(back["milestones"]) is Counter
    assert type(back["nested"][1]) is OrderedDict
    assert list(back["nested"][1]) == ["b", "a"]


def test_shared_tensor_stays_shared_after_packing() -> None:
    """When two values are the same tensor object, then they are also one tensor object after they
    are taken apart and put together."""
    apart = Disassembly()
    rate = torch.ones(())
    plain = [apart.take_apart([rate, 1], "groups"), apart.take_apart({"last": rate}, "scheduler")]

    groups, scheduler = (put_together(part, apart.tensors) for part in plain)

    assert list(apart.tensors) == ["groups.0"]
    assert groups == [rate, 1]
    assert isinstance(scheduler, dict)
    assert scheduler["last"] is rate


@pytest.mark.parametrize(
    "tree",
    [
        {"fast": {"a": torch.ones(1)}, "fast.a": torch.zeros(1)},
        {1: torch.ones(1), "1": torch.zeros(1)},
        {torch.ones(1): 1, torch.zeros(1): 2},
    ],
)
def test_two_tensors_of_one_name_are_refused(tree: Any) -> None:
    """When the keys of dicts give two tensors the same name, then the state is refused, since one
    tensor would take the place of the other. One tensor may have two such places."""
    with pytest.raises(UsageError, match=r"two tensors have the name ema.*\(1 and '1'\)"):
        Disassembly().take_apart(tree, "ema")
    one = torch.ones(1)
    Disassembly().take_apart({1: one, "1": one}, "ema")


@pytest.mark.parametrize("plain", [{"a": 1, "b": 2}, {"set": []}, {"tensor": "gone"}, {}])
def test_data_that_is_not_packed_state_is_refused(plain: object) -> None:
    """When bytes are not the result of packing a state, then they are refused as malformed."""
    with pytest.raises(MalformedMessage):
        put_together(plain, {})


def test_a_wrapped_model_is_refused() -> None:
    """When the model handed over is already a DDP, then it is refused, and the message tells the
    user to use `wrap`."""

    class Wrapped(DDP):
        """
        A DDP wrapper that can be made without a process group.
        """

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.module = nn.Linear(2, 2)

    with pytest.raises(UsageError, match="wrap=lambda"):
        adopt(parts(model=Wrapped()), None)
