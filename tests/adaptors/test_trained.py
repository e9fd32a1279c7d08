"""
Which parameters are trained stays the same.
"""

import pytest
import torch
from tft_pytorch import Made
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.state_store import StateStore
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.adaptors.test_made import adopted as adopted_make
from tests.adaptors.test_made import alone, of
from tft.errors import UsageError


def state_of(model: nn.Module) -> StateStore:
    """
    Handed over.
    """
    return adopt({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, None)


def test_parameters_that_are_frozen_while_training_are_refused() -> None:
    """
    When parameters are frozen, or thawed, while training, then that is said when the window closes, with their
    names and what to do; those that were frozen before are none of that.
    """
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    state = state_of(model)
    state.capture(closing=True)
    model[1].weight.requires_grad_(False)
    with pytest.raises(
        UsageError, match=r"requires_grad of 1\.weight was changed .* before session\.adopt"
    ):
        state.capture(closing=True)
    model.requires_grad_(True)
    with pytest.raises(UsageError, match=r"requires_grad of 0\.weight, 0\.bias was changed"):
        state.capture(closing=True)


def test_parameters_that_are_frozen_for_a_part_of_a_step_are_trained_again() -> None:
    """
    When a script freezes parameters for a part of each step, as those of a discriminator, and the step is given
    up there, then they are trained again before there is another wrapper.
    """
    model = nn.Linear(2, 2)
    state = state_of(model)
    state.capture(closing=True)
    model.requires_grad_(False)
    state.capture()
    state.clear()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_in_a_made_model_too() -> None:
    """
    When a model was made over groups, then the same is refused, and what is made anew counts as it was made.
    """
    maker: StateStore = adopted_make(lambda: of(DDP(nn.Linear(8, 8))))
    maker.shards(0, 1)
    with alone():
        made: Made = maker.rebuild()
        maker.capture(closing=True)
        made.model.requires_grad_(False)
        with pytest.raises(UsageError, match="requires_grad of weight, bias was changed"):
            maker.capture(closing=True)
        maker.clear()
        maker.rebuild()
        maker.capture(closing=True)
        maker.clear()
