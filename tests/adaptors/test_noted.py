"""
The state that a rank notes at the end of a step: what a rollback restores, what a successor
receives, and what is compared between ranks.
"""

from typing import Any

import pytest
import torch
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.state_store import StateStore
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel


class Net(nn.Module):
    """
    A network with running statistics, which the forward pass changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Map (batch, 4) to a tensor of the same shape.
        """
        return self.norm(self.linear(x))  # type: ignore[no-any-return]  # torch has no types here


class Live:
    """
    A scheduler whose `state_dict` returns the live object, which later steps change in place.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.rates = [0.1]

    def state_dict(self) -> dict[str, Any]:  # Any: as in torch
        """
        Return the attributes of the scheduler itself, not a copy.
        """
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:  # Any: as in torch
        """
        Set the attributes to the values in `state`.
        """
        vars(self).update(state)

    def step(self) -> None:
        """
        Count the step and halve the rate, both in place.
        """
        self.steps += 1
        self.rates[0] *= 0.5


def rank(seed: int, **others: Any) -> tuple[StateStore, Net, Any]:  # Any: as in torch
    """
    Return the state of a rank after one step with data that depends on `seed`.

    All ranks have the same weights. `others` are additional parts of the training state.
    """
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model)
    state = adopt(
        {"model": model, "optimizer": optimizer, "others": {"average": average}, **others}, None
    )
    torch.manual_seed(seed)
    model(torch.randn(8, 4))
    state.capture(closing=True)
    average.update_parameters(model)
    state.end_step()
    return state, model, average


def move(giver: StateStore, taker: StateStore) -> None:
    """
    Copy the shard of `giver` to `taker`.
    """
    payload = giver.give("dense")
    for room, source in zip(taker.take("dense", payload.meta), payload.buffers, strict=True):
        assert room.name == source.name
        room.view[:] = source.view
    taker.taken("dense", payload.meta)


def test_running_statistics_in_an_average_are_not_compared() -> None:
    """When a moving average includes a rank's own running statistics, then these statistics are not
    compared between ranks. The averaged weights are compared."""
    (first, _, _), (second, _, average) = rank(1), rank(2)
    assert first.compare("dense") == second.compare("dense")
    assert first.digests()["average"] != second.digests()["average"]
    with torch.no_grad():
        average.module.linear.weight[0] += 1.0
    assert first.compare("dense")["average"] != second.compare("dense")["average"]


@pytest.mark.parametrize("averages", [True, False])
def test_running_statistics_of_another_rank_in_an_average_are_named(averages: bool) -> None:
    """When a rank gets the state of another rank, and a moving average averages running statistics,
    then the rollback says that they are those of the other rank. If the average only copies those
    of the model, then nothing is lost. A rank that keeps its own state loses nothing either."""
    torch.manual_seed(0)
    ranks = []
    for seed in (1, 2):
        model = Net()
        average = AveragedModel(model, use_buffers=averages)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = adopt(
            {"model": model, "optimizer": optimizer, "others": {"average": average}}, None
        )
        torch.manual_seed(seed)
        ranks.append((state, state.capture(closing=True)))
        model(torch.randn(8, 4))
        average.update_parameters(model)
        ranks[-1] = state, state.capture(closing=True)
    (giver, _), (taker, captured) = ranks
    assert taker.rollback(captured) is None
    move(giver, taker)
    lost = taker.rollback(captured)
    assert (lost is None) == (not averages)
    if lost is not None:
        assert lost.startswith("the running statistics of average.module.norm differ between ranks")
    assert taker.rollback(captured) is None


def test_running_statistics_of_a_teacher_count_an_interrupted_step_twice() -> None:
    """When the forward pass of a step also runs a teacher with running statistics, and the step is
    computed again, then the rollback says that these statistics have counted it twice."""
    torch.manual_seed(0)
    model, teacher = Net(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = adopt({"model": model, "optimizer": optimizer, "others": {"teacher": teacher}}, None)
    captured = state.capture(closing=True)
    teacher(torch.randn(8, 4))
    lost = state.rollback(captured)
    assert lost is not None
    assert lost.startswith("the running statistics of teacher.norm have counted a forward pass")
    assert state.rollback(captured) is None


def test_module_modes_of_one_rank_do_not_count_as_a_difference() -> None:
    """When one rank puts the model into evaluation mode and ends its step in that mode, then its
    shard compares as equal to that of the other ranks."""
    (first, _, _), (second, model, _) = rank(1), rank(2)
    model.eval()
    second.end_step()
    assert first.compare("dense") == second.compare("dense")


def test_interrupted_rank_gets_the_module_modes_of_the_completed_step() -> None:
    """When the mode of a module changes after the update window, then an interrupted rank that
    fetches the state has the new mode after each rollback. From the end of its own next step, its
    own modes are restored."""
    (giver, model, _), (taker, other, _) = rank(1), rank(2)
    before = taker.capture(closing=True)
    model.norm.eval()
    giver.capture(closing=True)
    giver.end_step()
    move(giver, taker)
    for _ in range(2):
        taker.rollback(before)
        assert [module.training for module in other.modules()] == [True, True, False]
        other.train()
    after = taker.capture(closing=True)
    noted = taker.end_step()
    other.eval()
    taker.rollback(noted or after)
    assert [module.training for module in other.modules()] == [True, True, True]


def test_scheduler_that_changes_its_returned_state_in_place_is_restored() -> None:
    """When a scheduler changes in place the state that it has returned, and makes a step in an
    iteration that is cut off, then its state before that step is restored."""
    scheduler = Live()
    state, _, _ = rank(1, scheduler=scheduler)
    scheduler.step()
    state.clear()
    assert (scheduler.steps, scheduler.rates) == (0, [0.1])


@pytest.mark.parametrize("by_hand", [True, False])
def test_learning_rate_set_in_a_cut_off_step_is_restored(by_hand: bool) -> None:
    """When the learning rate is set at the head of a step, by hand or by a scheduler, and the step
    is cut off, then the earlier learning rate is restored."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    state = adopt({"model": model, "optimizer": optimizer, "scheduler": scheduler}, None)
    optimizer.step()
    state.capture(closing=True)
    state.end_step()
    if by_hand:
        optimizer.param_groups[0]["lr"] = 0.7
    else:
        scheduler.step()
    state.clear()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == (0, [0.1])


@pytest.mark.parametrize("by_hand", [True, False])
def test_learning_rate_of_another_optimizer_set_in_a_cut_off_step_is_restored(
    by_hand: bool,
) -> None:
    """When the learning rate of an optimizer among the others is set at the head of a step, by hand
    or by a scheduler among the others, and the step is cut off, then the earlier learning rate is
    restored."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in model)
    scheduler = StepLR(second, step_size=1, gamma=0.5)
    others = {"second": second, "rates": scheduler}
    state = adopt({"model": model, "optimizer": first, "others": others}, None)
    second.step()
    state.capture(closing=True)
    state.end_step()
    if by_hand:
        second.param_groups[0]["lr"] *= 0.1
    else:
        scheduler.step()
    state.clear()
    assert second.param_groups[0]["lr"] == 0.1
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == (0, [0.1])


def test_successor_without_observed_changes_compares_as_equal() -> None:
    """When one process has seen the forward pass change a buffer and another process with the same
    state has not, then the parts that both processes compare are equal."""

    def state() -> tuple[StateStore, nn.Module, nn.Module]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        model.register_buffer("seen", torch.zeros(1))
        average = AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = {"model": model, "optimizer": optimizer, "others": {"average": average}}
        return adopt(parts, None), model, average

    (old, model, _), (new, _, average) = state(), state()
    assert old.compare("dense") == new.compare("dense")
    old.capture(closing=True)
    model.get_buffer("seen").add_(1)
    old.capture(closing=True)
    average.get_buffer("module.seen").add_(2)
    ours, theirs = old.compare("dense"), new.compare("dense")
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == {
        "buffer model.seen",
        "buffer average.module.seen",
    }
    assert not ours["buffer model.seen"]
    assert not ours["buffer average.module.seen"]
