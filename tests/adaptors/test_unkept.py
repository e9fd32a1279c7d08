"""
Attributes that change while training and are not kept are found, and what is kept otherwise is not.
"""

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from tft_pytorch.unkept import Unkept
from torch import nn
from torch.utils.data import DataLoader


class Average:
    """
    An average as people write it.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.inner = SimpleNamespace()


def numbers() -> Iterator[int]:
    """
    Yield numbers.
    """
    for number in range(10):  # noqa: UP028 (its local variable is looked at)
        yield number


def looked_at(trained: nn.Module, **attributes: Any) -> tuple[Any, Unkept]:
    """
    Return an object with these attributes, and what looks at it. The attribute `large` is too large.
    """
    owner = SimpleNamespace(**attributes)
    unkept = Unkept(trained)
    unkept.watch(owner, lambda name: name != "large", frozenset({"own"}))
    assert list(unkept.changed()) == []
    return owner, unkept


def grown(owner: Any) -> None:
    """
    Change an average.
    """
    owner.value.total += 1


@pytest.mark.parametrize(
    ("name", "value", "change"),
    [
        ("value", Average(), grown),
        ("value", [Average()], lambda owner: setattr(owner.value[0], "total", 1.0)),
        ("value", [object()], lambda owner: owner.value.append(object())),
        ("value", nn.Linear(2, 2), lambda owner: owner.value.bias.data.add_(1)),
        ("value", count(), lambda owner: next(owner.value)),
        ("value", numbers(), lambda owner: (next(owner.value), next(owner.value))),
        ("value", iter([1, 2, 3]), lambda owner: next(owner.value)),
        ("value", iter(DataLoader(range(8))), lambda owner: next(owner.value)),  # type: ignore[arg-type]
        ("large", torch.zeros(9000), lambda owner: owner.large.add_(1)),
        ("large", torch.ones(9000), lambda owner: setattr(owner, "large", owner.large * 0.9)),
        ("large", numpy.zeros(9000), lambda owner: owner.large.__iadd__(1)),
        ("large", [0] * 9000, lambda owner: owner.large.append(1)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_changes_of_what_is_not_kept_are_found(name: str, value: Any, change: Any) -> None:
    """When an attribute with another value than plain ones changes, or a large one, then it is found
    with its name and the reason. When nothing changes, then nothing is found."""
    owner, unkept = looked_at(nn.Linear(1, 1), **{name: value})
    assert list(unkept.changed()) == []
    change(owner)
    ((kind, found, why),) = unkept.changed()
    assert (kind, found) == ("SimpleNamespace", name)
    assert ("32 KiB" if name == "large" else "no plain value") in why
    assert list(unkept.changed()) == []


def test_what_is_kept_or_belongs_to_the_training_is_not_found() -> None:
    """When plain attributes change, or the trained model, its optimizer and its loader, or values of
    the computation of this step, then nothing is found."""
    model = nn.Linear(2, 2)
    wrapper = nn.Sequential(model)
    loader: Any = DataLoader(range(8))  # type: ignore[arg-type]
    owner, unkept = looked_at(
        model, own=Average(), count=0, seen={1}, model=model, wrapper=wrapper, parameters=[model.weight],
        optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), loader=loader, function=len,
        large=None,
    )  # fmt: skip
    other = SimpleNamespace(own=Average())
    unkept.watch(other, lambda name: True, frozenset({"own"}))
    owner.others = [other, object()]
    for step in range(3):
        owner.own.total += 1
        other.number = step
        owner.count += 1
        owner.seen.add(step)
        owner.large = model(torch.rand(3, 2))
        owner.large.sum().backward()
        owner.optimizer.step()
        next(iter(loader))
        assert list(unkept.changed()) == []
