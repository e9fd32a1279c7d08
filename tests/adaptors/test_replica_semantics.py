"""
What a user sees of `ReplicaOptimizer`: where it behaves like torch's own optimizers, and where it
does not.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import pytest
import torch
from tft_pytorch import ReplicaOptimizer
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.optimizer_shards import Share
from tft_pytorch.state_store import StateStore
from torch import Tensor, nn

from tft.errors import OrderRefused, UsageError


def net() -> nn.Sequential:
    """
    Make a model with parameters of several sizes, each with a gradient.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 2))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def over(
    model: nn.Module,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    rank: int = 1,
) -> ReplicaOptimizer:
    """
    Make the `ReplicaOptimizer` of one of four ranks.

    By default this is rank 1, which holds the second of two shards of the optimizer state.
    """
    return ReplicaOptimizer(grouped(model), optimizer, rank=rank, world=4, lr=0.01)


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """
    Return two parameter groups. The second has its own learning rate.
    """
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights}, {"params": biases, "lr": 0.5}]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_a_whole_optimizer_is_loaded_into_the_share(rank: int, dtype: torch.dtype) -> None:
    """When a share of a `ReplicaOptimizer` loads the state of an optimizer over all parameters,
    then its next step equals that of the whole optimizer. The share gives the resulting state to
    other ranks."""
    model = net()
    whole = torch.optim.AdamW(grouped(model), lr=0.01)
    whole.step()
    whole.param_groups[0]["lr"] = 0.125
    ours = net()
    ours.load_state_dict(model.state_dict())
    ours.to(dtype)
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        mine.grad = None
        mine.grad_dtype = torch.float32
        assert theirs.grad is not None
        mine.grad = theirs.grad.clone()
        if dtype != torch.float32:
            theirs.data = mine.detach().float()
    optimizer = over(ours, rank=rank)
    # the state is copied, because torch keeps the given tensors themselves
    optimizer.load_state_dict(deepcopy(whole.state_dict()))
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.5]
    whole.step()
    optimizer.step()
    names = [name for name, _ in ours.named_parameters()]
    theirs_by_name = dict(model.named_parameters())
    given = Share(ours, optimizer).state()["state"]
    assert 0 < len(given) < len(names)
    for name, kept in given.items():
        theirs = whole.state[theirs_by_name[name]]
        assert all(torch.equal(kept[key], theirs[key]) for key in theirs)
    for name, parameter in ours.named_parameters():
        if name in given:
            assert torch.equal(optimizer.kept_for(parameter), theirs_by_name[name])


def test_optimizer_state_for_other_parameters_is_refused() -> None:
    """When the loaded state is that of a model with other parameters, then it is refused, and
    nothing has changed."""
    optimizer = over(net())
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=9.0)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    every = list(net().parameters())
    divided = torch.optim.AdamW([{"params": every[:1]}, {"params": every[1:]}], lr=9.0)
    assert sizes != [1, len(every) - 1]
    for state in (other.state_dict(), divided.state_dict()):
        with pytest.raises(UsageError, match=r"the state belongs to another optimizer"):
            optimizer.load_state_dict(state)
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]


def test_loading_16_bit_parameters_without_their_masters_is_refused() -> None:
    """When a script's own functions load 16-bit parameters without their 32-bit master copies, then
    this is refused. The message says what to save, and the parameters stay as loaded. With the
    master copies, training continues bit for bit."""

    def adopted() -> tuple[nn.Module, ReplicaOptimizer, StateStore]:
        model = net().bfloat16()
        optimizer = ReplicaOptimizer(
            model.parameters(), torch.optim.AdamW, rank=0, world=2, lr=0.01
        )
        return model, optimizer, adopt({"model": model, "optimizer": optimizer}, None)

    def masters(optimizer: ReplicaOptimizer) -> list[Tensor]:
        found = [optimizer.master(p) for p in optimizer.owned]
        return [master for master in found if master is not None]

    def same(one: nn.Module, other: nn.Module) -> bool:
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    model, optimizer, before = adopted()
    optimizer.step()
    kept = deepcopy((model.state_dict(), optimizer.optim.state_dict(), masters(optimizer)))
    beside = {shard: before.beside(shard) for shard in ("dense", "optimizer.0")}

    read, again, after = adopted()
    read.load_state_dict(kept[0])
    after.replaced("dense", beside["dense"])
    again.optim.load_state_dict(kept[1])
    with pytest.raises(OrderRefused, match=r"0\.weight, .*: optimizer\.master\(p\) of each p"):
        after.replaced("optimizer.0", beside["optimizer.0"])
    assert same(read, model)
    for master, own in zip(masters(again), kept[2], strict=True):
        master.copy_(own)
    for shard in ("optimizer.0", "dense"):
        after.replaced(shard, beside[shard])
    optimizer.step()
    again.step()
    assert same(read, model)


def test_the_learning_rate_of_the_next_step_is_saved() -> None:
    """When a scheduler has lowered the learning rate after the last step, and a script's own
    functions save and load the inner optimizer, then the next step has the lowered rate."""

    def adopted() -> tuple[nn.Module, ReplicaOptimizer, StateStore]:
        model = net()
        optimizer = ReplicaOptimizer(
            model.parameters(), torch.optim.AdamW, rank=0, world=2, lr=0.01
        )
        return model, optimizer, adopt({"model": model, "optimizer": optimizer}, None)

    model, optimizer, before = adopted()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    optimizer.step()
    scheduler.step()
    beside = {shard: before.beside(shard) for shard in ("dense", "optimizer.0")}
    kept = deepcopy((model.state_dict(), optimizer.optim.state_dict()))
    read, again, after = adopted()
    read.load_state_dict(kept[0])
    again.optim.load_state_dict(kept[1])
    for shard, told in beside.items():
        after.replaced(shard, told)
    assert [group["lr"] for group in again.param_groups] == [0.001]


def test_state_dict_of_a_share_is_refused() -> None:
    """When `state_dict` of a sharded optimizer is called, then it is refused, because it would
    contain only this rank's share."""
    with pytest.raises(UsageError, match="only this rank's share of the state"):
        over(net()).state_dict()


def test_step_with_a_closure_is_refused() -> None:
    """When `step` is called with a closure that computes gradients, then the optimizer refuses it
    and has changed nothing."""
    model = net()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(UsageError, match="takes no closure"):
        over(model).step(lambda: 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_optimizer_that_computes_gradients_in_its_step_is_refused() -> None:
    """When an optimizer computes gradients in its step and uses all parameters at once, as LBFGS
    does, then it is refused, with and without a `ReplicaOptimizer`."""
    model = net()
    with pytest.raises(UsageError, match="LBFGS computes gradients within its own step"):
        adopt({"model": model, "optimizer": torch.optim.LBFGS(model.parameters())}, None)
    with pytest.raises(UsageError, match="LBFGS needs all parameters at once"):
        ReplicaOptimizer(net().parameters(), torch.optim.LBFGS, rank=0, world=2)


class Counting(torch.optim.SGD):
    """
    An optimizer that counts its steps in its parameter groups.
    """

    def __init__(self, params: Iterable[Tensor], **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            group.setdefault("steps", 0)

    def step(self, closure: Any = None) -> Any:  # Any: as in torch
        """
        Count the step in each group, and apply the step of SGD.
        """
        for group in self.param_groups:
            group["steps"] += 1
        return super().step(closure)


def test_values_in_the_parameter_groups_are_kept_over_steps() -> None:
    """When an optimizer counts its steps in its parameter groups, then the count increases with
    each step and is visible in `param_groups`."""
    optimizer = over(net(), Counting)
    for _ in range(3):
        optimizer.step()
    assert [group["steps"] for group in optimizer.param_groups] == [3, 3]


def test_memory_layout_of_weights_is_kept() -> None:
    """When weights are stored with their channels last, then they still are after they are cut into
    shares."""
    flat = nn.Conv2d(3, 4, 2)
    deep = nn.Conv3d(3, 4, 2)
    flat.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch has no types here
    deep.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # torch has no types here
    before = [p.detach().clone() for p in (flat.weight, deep.weight)]
    model = nn.ModuleList([flat, deep])
    ReplicaOptimizer(model.parameters(), torch.optim.SGD, rank=0, world=2, lr=0.1)
    assert flat.weight.is_contiguous(memory_format=torch.channels_last)
    assert deep.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert torch.equal(flat.weight, before[0])
    assert torch.equal(deep.weight, before[1])
