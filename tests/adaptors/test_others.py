"""
The objects that are kept in addition to model and optimizer (`others`): what another process gets of
them, and what a checkpoint and a copy in host memory give back.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tft_pytorch import Made
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.factory_maker import adopt_make
from tft_pytorch.state_store import StateStore
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.adaptors.test_made import alone
from tests.adaptors.test_state import move
from tft.errors import OrderRefused, UsageError


class Masters(torch.optim.Optimizer):
    """
    An optimizer that keeps 32-bit masters of 16-bit parameters in its state.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # Any: as in torch
        """
        Update the masters, and round the parameters from them.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                if not kept:
                    kept["master"] = parameter.detach().float().clone()
                kept["master"].add_(parameter.grad.float(), alpha=-group["lr"])
                parameter.copy_(kept["master"])


class Chained(torch.optim.Optimizer):
    """
    An optimizer that steps other optimizers, and reads its state and groups from them.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]  # Any: as in torch
        """
        Return the groups of all parts.
        """
        return [group for each in self.parts for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]  # Any: as in torch
        """
        Return the state of all parts.
        """
        return {key: kept for each in self.parts for key, kept in each.state.items()}


class Average:
    """
    A moving average that does not give back what its `state_dict` gave, in one of two ways.
    """

    def __init__(self, way: str) -> None:
        self.way = way
        self.value = torch.tensor([0.123456789])

    def state_dict(self) -> dict[str, Tensor]:
        """
        Return the average.
        """
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """
        Take the average.
        """
        if self.way == "rounds":
            self.value = state["value"].bfloat16().float()
        elif self.way == "overwrites":
            self.value.zero_()
            self.value.add_(state["value"])


class Best:
    """
    A best loss, which becomes a float when it is loaded. The object may be of a version that has no
    name, or of one that loses the history of the losses.
    """

    def __init__(self, *without: str) -> None:
        self.without = without
        self.state: dict[str, Any] = {
            key: value
            for key, value in {"best": 3, "name": "a", "kept": {"history": [1], "size": 1}}.items()
            if key not in without
        }

    def state_dict(self) -> dict[str, Any]:
        """
        Return the present values.
        """
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Take the values that this version knows.
        """
        self.state = {k: v for k, v in state.items() if k not in self.without}
        self.state["best"] = float(state["best"])
        if "history" in self.without:
            self.state["kept"] = {"size": 1}


class Job:
    """
    A model with two optimizers. The second one is among `others`.
    """

    def __init__(self, seed: int, make: Callable[["Job"], torch.optim.Optimizer]) -> None:
        torch.manual_seed(seed)
        self.low, self.high = nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(4, 4)
        self.rate = torch.tensor(0.1)
        self.optimizer = torch.optim.AdamW(self.high.parameters(), lr=self.rate)
        self.second = make(self)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.state: StateStore = adopt(
            {
                "model": nn.ModuleDict({"low": self.low, "high": self.high}),
                "optimizer": self.optimizer,
                "scheduler": self.scheduler,
                "others": {"second": self.second},
            },
            None,
        )

    def train(self, steps: int) -> None:
        """
        Train with the same batches in each job.
        """
        for step in range(steps):
            batch = torch.full((2, 4), 0.37 * (step + 1))
            self.high(self.low(batch.bfloat16()).float()).square().mean().backward()
            self.optimizer.step()
            self.second.step()
            self.scheduler.step()
            self.state.capture(closing=True)
            self.optimizer.zero_grad()
            self.second.zero_grad()


def masters(job: Job) -> torch.optim.Optimizer:
    """
    Return an optimizer whose state has another type than its parameters.
    """
    return Masters(job.low.parameters(), lr=0.1)


def sharing(job: Job) -> torch.optim.Optimizer:
    """
    Return an optimizer that shares the learning rate of the first one.
    """
    return torch.optim.AdamW(job.low.parameters(), lr=job.rate, foreach=False)


def fetched(giver: Job, taker: Job, directory: Path) -> None:
    """
    Move the state as it is sent from rank to rank.
    """
    move(giver.state, taker.state)


def loaded(giver: Job, taker: Job, directory: Path) -> None:
    """
    Move the state by a checkpoint.
    """
    giver.state.save(directory, "dense")
    taker.state.load(directory, "dense")


def restored(giver: Job, taker: Job, directory: Path) -> None:
    """
    Move the state by a checkpoint, and go back to a copy of it in host memory two steps later.
    """
    loaded(giver, taker, directory)
    state = taker.state
    wait = state.backups.keep(3, state.in_use, state.devices, sound=3, copies=2)
    if wait is not None:
        wait()
    taker.train(2)
    state.restore(3)


@pytest.mark.parametrize("make", [masters, sharing])
@pytest.mark.parametrize("moved", [fetched, loaded, restored])
def test_second_optimizer_is_given_back_bit_for_bit(
    make: Callable[[Job], torch.optim.Optimizer],
    moved: Callable[[Job, Job, Path], None],
    tmp_path: Path,
) -> None:
    """When an optimizer among `others` has state of another type than its parameters, or shares its
    learning rate with the first optimizer, then another process gets all of it unchanged. The
    states stay equal in the steps after that."""
    giver, taker = Job(1, make), Job(2, make)
    giver.train(3)

    moved(giver, taker, tmp_path)

    assert taker.state.digests() == giver.state.digests()
    for each in (giver, taker):
        each.train(3)
    assert taker.state.digests() == giver.state.digests()


@pytest.mark.parametrize("among_others", [True, False])
def test_optimizer_that_cannot_be_given_state_is_refused(among_others: bool) -> None:
    """When an optimizer gathers its state from other optimizers each time, then `adopt` refuses it,
    as the optimizer and among `others`."""
    model = nn.Linear(4, 4)
    parts = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    chained = Chained(*parts)
    given: dict[str, Any] = {"model": model, "optimizer": chained}
    if among_others:
        given = {"model": model, "optimizer": parts[0], "others": {"both": chained}}
    with pytest.raises(UsageError, match=r"Chained gathers its state .* anew .* among `others`"):
        adopt(given, None)


@pytest.mark.parametrize("way", ["rounds", "overwrites"])
def test_object_that_does_not_give_back_its_state_is_refused(way: str, tmp_path: Path) -> None:
    """When an object rounds its state while it loads it, or destroys its own tensor, then neither a
    checkpoint nor a copy in host memory is taken, and the message names the object and the part."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = Average(way)
    state = adopt({"model": model, "optimizer": optimizer, "others": {"average": average}}, None)
    why = r"the object average does not have .*: average\.value differs\. .*load_state_dict"

    state.save(tmp_path, "dense")
    with pytest.raises(OrderRefused, match=why):
        state.load(tmp_path, "dense")
    average.value = torch.tensor([0.123456789])
    wait = state.backups.keep(1, state.in_use, state.devices, sound=1, copies=2)
    assert wait is not None
    wait()
    with pytest.raises(OrderRefused, match=why):
        state.restore(1)


def with_best(best: Best) -> StateStore:
    """
    Return the adopted state of a model with the object `best`.
    """
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return adopt({"model": model, "optimizer": optimizer, "others": {"best": best}}, None)


def test_object_of_a_version_with_fewer_attributes_loads_a_checkpoint(tmp_path: Path) -> None:
    """When the version of an object that loads a checkpoint has an attribute less, and makes another
    type of a number, then the checkpoint is loaded. A value within an attribute must not be
    lost."""
    with_best(Best()).save(tmp_path, "dense")
    best = Best("name")
    with_best(best).load(tmp_path, "dense")
    assert best.state == {"best": 3.0, "kept": {"history": [1], "size": 1}}

    with pytest.raises(OrderRefused, match=r"best\.kept differs"):
        with_best(Best("history")).load(tmp_path, "dense")


def test_copy_in_host_memory_needs_all_attributes() -> None:
    """When an object loses an attribute while it loads a copy in host memory, then the copy is
    refused, because the same version of the object has made it."""
    best = Best()
    state = with_best(best)
    wait = state.backups.keep(1, state.in_use, state.devices, sound=1, copies=2)
    assert wait is not None
    wait()
    state.restore(1)
    best.without = ("name",)
    with pytest.raises(OrderRefused, match="the object best does not have the state"):
        state.restore(1)


@pytest.mark.parametrize("lossy", [True, False])
def test_objects_of_a_factory_are_given_their_state_exactly(lossy: bool) -> None:
    """When a factory makes the objects anew, then an optimizer among `others` has its state as
    before, bit for bit. An object that rounds its state is refused."""
    made: list[Masters] = []

    def make() -> Made:
        model = nn.Linear(4, 4).to(torch.bfloat16)
        made.append(Masters(model.parameters(), lr=0.1))
        others = {"second": made[-1]} | ({"average": Average("rounds")} if lossy else {})
        wrapped = DDP(model)
        return Made(
            model=wrapped, optimizer=torch.optim.SGD(model.parameters(), lr=0), others=others
        )

    state = adopt_make({"make": make}, None)
    state.shards(0, 1)
    with alone():
        built = state.rebuild()
        state.rollback(state.capture())
        built.model(torch.full((2, 4), 0.37, dtype=torch.bfloat16)).sum().backward()
        made[-1].step()
        state.capture(closing=True)
        before = state.digests()["second"]
        del built
        state.clear()
    with alone():
        if lossy:
            with pytest.raises(OrderRefused, match="object average does not have the state"):
                state.rebuild()
        else:
            state.rebuild()
            assert state.digests()["second"] == before
        state.clear()


def test_second_optimizer_of_sharded_parameters_is_given_its_state() -> None:
    """When a factory makes a model that FSDP2 shards, then an optimizer among `others` has its
    momentum again, although a new optimizer has no momentum before its first step."""

    def make() -> Made:
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "cut")))
        first, second = (torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters())
        return Made(model=model, optimizer=first, others={"second": second})

    def step(built: Made) -> None:
        built.model(torch.full((2, 4), 0.37)).sum().backward()
        built.optimizer.step()
        built.others["second"].step()
        state.capture(closing=True)

    state = adopt_make({"make": make}, None)
    state.shards(0, 1)
    with alone():
        built = state.rebuild()
        state.rollback(state.capture())
        step(built)
        before = state.digests()
        del built
        state.clear()
    with alone():
        built = state.rebuild()
        assert state.digests() == before
        assert state.rollback(state.capture()) is None
        step(built)
        [kept] = built.others["second"].state.values()
        assert isinstance(kept["momentum_buffer"], DTensor)
        del built
        state.clear()
