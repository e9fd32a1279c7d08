"""
The guard of the training state while a function of the user runs, such as an evaluation: what it
notices, and what it puts back when an exception has left the function.
"""

from collections.abc import Callable

import pytest
import torch
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.state_store import StateStore
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

ROOM = 1 << 20


class Rank:
    """
    A rank at the end of a step, and an average of its parameters.
    """

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = StepLR(self.optimizer, step_size=2)
        self.second = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.average = [torch.full_like(each, 7.0) for each in self.model.parameters()]
        self.state: StateStore = adopt(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "scheduler": self.scheduler,
                "others": {"second": self.second},
            },
            None,
        )
        self.state.capture(closing=True)
        self.state.end_step()

    def parameters(self) -> list[Tensor]:
        """
        Return copies of the parameters.
        """
        return [each.detach().clone() for each in self.model.parameters()]

    def copies(self) -> None:
        """
        Copy the average into the parameters.
        """
        with torch.no_grad():
            for parameter, average in zip(self.model.parameters(), self.average, strict=True):
                parameter.copy_(average)

    def copies_data(self) -> None:
        """
        Copy the average into the parameters, in a way that torch does not count.
        """
        for parameter, average in zip(self.model.parameters(), self.average, strict=True):
            parameter.data.copy_(average)

    def refers(self) -> None:
        """
        Let the parameters refer to the memory of the average.
        """
        for parameter, average in zip(self.model.parameters(), self.average, strict=True):
            parameter.data = average

    def replaces(self) -> None:
        """
        Replace a parameter of a module.
        """
        self.model[0].weight = nn.Parameter(self.average[0])


SWAPS = pytest.mark.parametrize("swap", [Rank.copies, Rank.copies_data, Rank.refers, Rank.replaces])


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """
    Return whether the tensors of both lists are equal in pairs.
    """
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@SWAPS
def test_parameters_that_a_broken_off_evaluation_has_swapped_are_put_back(
    swap: Callable[[Rank], None],
) -> None:
    """When an exception leaves an evaluation that has put averaged weights into the model, then
    `clear` puts the weights of training back. The average keeps its content."""
    rank = Rank()
    own = list(rank.model.parameters())
    before = rank.parameters()
    guard = rank.state.guard(ROOM)
    assert guard is not None
    swap(rank)
    assert guard.written()
    rank.state.clear()
    assert guard.written()
    assert equal(rank.parameters(), before)
    assert all(a is b for a, b in zip(rank.model.parameters(), own, strict=True))
    assert all(bool((each == 7.0).all()) for each in rank.average)


@SWAPS
def test_swapped_parameters_without_a_copy_are_noticed(swap: Callable[[Rank], None]) -> None:
    """When there was no room for a copy, then the guard says that the function has written."""
    rank = Rank()
    guard = rank.state.guard(0)
    assert guard is not None
    swap(rank)
    before = rank.parameters()
    rank.state.clear()
    assert guard.written()
    assert equal(rank.parameters(), before)


def test_an_evaluation_that_only_computes_has_not_written() -> None:
    """When an evaluation only calls the model, then nothing counts as written or changed. What an
    incident changes after the function has returned, is not put back."""
    rank = Rank()
    guard = rank.state.guard(ROOM)
    assert guard is not None
    put_back = rank.state.set_aside()
    rank.model.eval()
    rank.model(torch.ones(2, 4)).sum().backward()
    put_back()
    assert not guard.written()
    assert guard.changed() == []
    guard.end()
    rank.copies()
    rank.state.clear()
    assert equal(rank.parameters(), rank.average)


def test_changed_settings_are_named() -> None:
    """When a function changes learning rates or steps the scheduler, then the guard names what has
    changed."""
    rank = Rank()
    rank.optimizer.step()
    cases: list[tuple[Callable[[], object], list[str]]] = [
        (lambda: rank.optimizer.param_groups[0].update(lr=0.01), ["settings"]),
        (lambda: rank.second.param_groups[0].update(lr=0.01), ["second"]),
        (rank.scheduler.step, ["scheduler"]),
    ]
    for change, names in cases:
        guard = rank.state.guard(0)
        assert guard is not None
        change()
        assert guard.changed() == names
        assert not guard.written()
