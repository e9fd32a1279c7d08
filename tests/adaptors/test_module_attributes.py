"""
Plain attributes of a model's modules come back after an incident, also in a replacement process, and
those that cannot be kept are named.
"""

import timeit
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.module_attributes import LIMIT, ModuleAttributes
from tft_pytorch.state_store import StateStore
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tft.errors import MalformedMessage


class Phase(Enum):
    """
    A phase of a curriculum.
    """

    EARLY = 1
    LATE = 2


class Net(nn.Module):
    """
    A network that counts its forward passes, with attributes as people have them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.1)
        self.rnn = nn.LSTM(4, 4)
        self.calls = 0
        self.tau: float | None = 1.0
        self.phase = Phase.EARLY
        self.mean = torch.zeros(4)
        self.seen: list[float] = []
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """
        Count, and map (batch, 4) to a tensor of the same shape.
        """
        self.calls += 1
        self.late = self.calls > 1
        return self.drop(self.first(x))  # type: ignore[no-any-return]  # torch has no types here


class Caches(nn.Module):
    """
    A layer that computes a table when the input is longer than before, as rotary embeddings do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.length = 0
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """
        Map (batch, length) to a tensor of the same shape.
        """
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.table = torch.arange(self.length, dtype=torch.float32)
        assert self.table is not None
        return x * self.scale * self.table[: x.shape[1]]


def begun(model: nn.Module, **others: nn.Module) -> StateStore:
    """
    Return the state of a model, at the moment at which training begins.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = {"model": model, "optimizer": optimizer, "others": others}
    state = adopt(parts, None, attributes=True)
    state.rebuild()
    return state


def changed(model: Net) -> None:
    """
    Change attributes of the model.
    """
    model(torch.ones(1, 4))
    model(torch.ones(1, 4))
    model.drop.p = 0.5
    model.tau = None
    model.phase = Phase.LATE


def found(model: Net) -> list[Any]:
    """
    Return the attributes that the function `changed` changes.
    """
    late = getattr(model, "late", "no")
    return [model.calls, late, model.drop.p, model.tau, model.phase]


def test_attributes_are_rolled_back_and_reach_a_replacement() -> None:
    """When attributes of modules change in an abandoned step, then a rollback restores those of the
    last complete step, and a replacement process gets them too."""
    model, fresh = Net(), Net()
    state, other = begun(model), begun(fresh)
    at_start = state.capture(closing=True)
    changed(model)
    complete = state.capture(closing=True)
    model(torch.ones(1, 4))
    model.drop.p = 0.9
    state.capture()
    for each in (state, other):
        each.rollback(complete)
    assert found(model) == found(fresh) == [2, True, 0.5, None, Phase.LATE]
    for each in (state, other):
        each.rollback(at_start)
    assert found(model) == found(fresh) == [0, "no", 0.1, 1.0, Phase.EARLY]


def test_number_beside_a_tensor_that_is_not_kept_is_left_alone() -> None:
    """When a module changes a number together with a tensor that is not kept, such as the length of
    a cached table, then a replacement gets neither, and computes both."""
    model, fresh = Caches(), Caches()
    state, other = begun(model), begun(fresh)
    state.capture(closing=True)
    model(torch.ones(1, 8))
    noted = state.capture(closing=True)
    other.rollback(noted)
    assert (fresh.length, fresh.table) == (0, None)
    assert fresh(torch.ones(1, 8)).equal(model(torch.ones(1, 8)))
    state.rollback(noted)
    assert model.length == 8


def test_attribute_changed_in_the_tail_belongs_to_the_end_of_the_step() -> None:
    """When the tail of a step changes an attribute, then the state of the end of the step has the
    change."""
    model, fresh = Net(), Net()
    state = begun(model)
    state.capture(closing=True)
    model.drop.p = 0.3
    ended = state.end_step()
    assert ended is not None
    begun(fresh).rollback(ended)
    assert fresh.drop.p == 0.3
    assert state.end_step() == ended


def test_attributes_of_other_modules_are_kept() -> None:
    """When a module among the others changes an attribute, then a replacement gets it."""
    other, fresh = nn.Dropout(0.1), nn.Dropout(0.1)
    state = begun(Net(), noise=other)
    other.p = 0.7
    begun(Net(), noise=fresh).rollback(state.capture(closing=True))
    assert fresh.p == 0.7


def test_state_of_another_number_of_modules_is_left_alone() -> None:
    """When the state is of a model with other modules, then attributes stay as they are. A state that
    cannot be read is refused."""
    model = Net()
    state = begun(model)
    changed(model)
    noted, _ = state._local_state.attributes.noted()
    other = nn.Sequential(nn.Dropout(0.2), nn.Linear(1, 1))
    attributes = begun(other)._local_state.attributes
    assert attributes.put_back(noted) is None
    assert other[0].p == 0.2
    with pytest.raises(MalformedMessage, match="attributes of modules"):
        attributes.put_back(3)


def test_large_text_is_not_kept_and_named() -> None:
    """When an attribute grows too large, then it is named, the report of an incident has it, and the
    others are kept."""
    model, fresh = Net(), Net()
    state = begun(model)
    vars(model)["log"] = "x" * LIMIT
    model.drop.p = 0.5
    [(what, why)] = state.unkept().items()
    assert (what, "16 KiB" in why) == ("log", True)
    assert "log" in (begun(fresh).rollback(state.capture(closing=True)) or "")
    assert fresh.drop.p == 0.5


def _mean(model: Net) -> None:
    model.mean += 1.0


def _new_mean(model: Net) -> None:
    model.mean = model.mean + 1.0


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_mean, "Net.mean"),
        (_new_mean, "Net.mean"),
        (lambda model: model.seen.append(1.0), "Net.seen"),
    ],
)
def test_attribute_that_is_not_kept_is_named(change: Callable[[Net], None], name: str) -> None:
    """When a tensor without register_buffer or a list changes, then it is named with the remedy, and
    only when it changes."""
    model = Net()
    state = begun(model)
    assert state.unkept() == {}
    change(model)
    [(what, why)] = state.unkept().items()
    assert what == name
    assert "register_buffer" in why
    assert state.unkept() == {}


def test_ordinary_modules_are_not_named() -> None:
    """When modules train that keep something in attributes of torch, or that compute a tensor anew in
    each step, then nothing is named, and nothing is noted."""

    class Own(nn.LSTM):
        pass

    class Quiet(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.first(x)
            return self.drop(self.hidden)  # type: ignore[no-any-return]  # torch has no types here

    model = nn.ModuleDict(
        {
            "net": Quiet(),
            "spectral": parametrizations.spectral_norm(nn.Linear(4, 4)),
            "old": nn.utils.spectral_norm(nn.Linear(4, 4)),
            "norm": nn.BatchNorm1d(4),
            "attention": nn.MultiheadAttention(4, 2),
            "lstm": nn.LSTM(4, 4),
            "own": Own(4, 4),
        }
    )
    state = begun(model)
    x = torch.ones(2, 4)
    for _ in range(3):
        out = [model[name](x) for name in ("net", "spectral", "old", "norm")]
        out += [model[name](x[None])[0] for name in ("lstm", "own")]
        out.append(model["attention"](x, x, x)[0])
        total: Any = torch.stack([each.sum() for each in out]).sum()
        total.backward()
        model.eval()
        model.train()
        assert state.unkept() == {}
        assert state._local_state.attributes.noted() == (None, 0)


def test_compiled_model_keeps_its_attributes() -> None:
    """When a compiled model counts its forward passes, then a replacement gets the number."""
    model, fresh = Net(), Net()
    compiled: Any = torch.compile(model, backend="eager")
    state = begun(compiled)
    compiled(torch.ones(1, 4))
    assert state.unkept() == {}
    begun(torch.compile(fresh, backend="eager")).rollback(state.capture(closing=True))  # type: ignore[arg-type]  # it is a module
    assert fresh.calls == model.calls == 1


def test_a_thousand_modules_cost_little() -> None:
    """When a model has a thousand modules whose attributes rest, then to look for changes takes less
    than a millisecond, in the best of 20 measurements."""
    attributes = ModuleAttributes()
    attributes.watch(nn.ModuleList(nn.Dropout(0.1) for _ in range(1000)))
    attributes.begin()

    best = min(timeit.repeat(attributes.noted, number=10, repeat=20)) / 10

    assert best < 1e-3
