"""
What a step has left when it ended: what is put back of it, what goes to others, and what of it is compared.
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
    With buffers that the forward pass changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        (batch, 4) to the same.
        """
        return self.norm(self.linear(x))  # type: ignore[no-any-return]  # torch has no types here


class Live:
    """
    A scheduler that tells what it goes on changing.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.rates = [0.1]

    def state_dict(self) -> dict[str, Any]:  # Any: as in torch
        """
        No copy.
        """
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:  # Any: as in torch
        """
        To these.
        """
        vars(self).update(state)

    def step(self) -> None:
        """
        In place.
        """
        self.steps += 1
        self.rates[0] *= 0.5


def rank(seed: int, **others: Any) -> tuple[StateStore, Net, Any]:  # Any: as in torch
    """
    One with the same weights as any, after a step in which it has seen data of its own.
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


def test_an_average_of_what_each_rank_has_for_itself_is_compared_on_none() -> None:
    """
    When ranks keep an average of a model with running statistics, then it has those of its rank, which are compared on
    no rank, and the averaged weights, which are.
    """
    (first, _, _), (second, _, average) = rank(1), rank(2)
    assert first.compare("dense") == second.compare("dense")
    assert first.digests()["average"] != second.digests()["average"]
    with torch.no_grad():
        average.module.linear.weight[0] += 1.0
    assert first.compare("dense")["average"] != second.compare("dense")["average"]


def test_modes_of_one_rank_alone_are_no_difference() -> None:
    """
    When one rank evaluates for all, and its step ends in that mode, then it holds no other copy than the rest.
    """
    (first, _, _), (second, model, _) = rank(1), rank(2)
    model.eval()
    second.end_step()
    assert first.compare("dense") == second.compare("dense")


def test_who_did_not_end_the_step_gets_the_modes_of_who_did() -> None:
    """
    When a part of the model is put into another mode behind a window, and a rank that was interrupted before that
    fetches the state, then it goes on in the new mode, also when it is rolled back once more; its own modes count again
    from the end of its next step on.
    """
    (giver, model, _), (taker, other, _) = rank(1), rank(2)
    before = taker.capture(closing=True)
    model.norm.eval()
    giver.capture(closing=True)
    giver.end_step()
    payload = giver.give("dense")
    for room, source in zip(taker.take("dense", payload.meta), payload.buffers, strict=True):
        assert room.name == source.name
        room.view[:] = source.view
    taker.taken("dense", payload.meta)
    for _ in range(2):
        taker.rollback(before)
        assert [module.training for module in other.modules()] == [True, True, False]
        other.train()
    after = taker.capture(closing=True)
    noted = taker.end_step()
    other.eval()
    taker.rollback(noted or after)
    assert [module.training for module in other.modules()] == [True, True, True]


def test_a_scheduler_that_tells_what_it_goes_on_changing_is_put_back() -> None:
    """
    When a scheduler returns what it changes in place, and takes its step at the head of an iteration that is cut off,
    then it has not taken it.
    """
    scheduler = Live()
    state, _, _ = rank(1, scheduler=scheduler)
    scheduler.step()
    state.clear()
    assert (scheduler.steps, scheduler.rates) == (0, [0.1])


@pytest.mark.parametrize("by_hand", [True, False])
def test_rates_of_a_step_that_was_cut_off_are_those_of_the_one_before(by_hand: bool) -> None:
    """
    When the learning rate of the next step is set at its head, by hand or by a scheduler, and the step is cut off, then
    it is that of the step before.
    """
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


def test_a_process_that_has_seen_nothing_change_holds_no_other_copy() -> None:
    """
    When a buffer of the model was seen to change on one rank, and another process has the same state and has seen nothing
    yet, then the parts that both compare are equal.
    """

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
        "model.seen",
        "average.module.seen",
    }
    assert not ours["model.seen"]
    assert not ours["average.module.seen"]
