"""
The set of parameters that are trained must not change during a job.
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
    Return the adopted state of the model with an SGD optimizer.
    """
    return adopt({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, None)


def test_freezing_or_unfreezing_parameters_while_training_is_refused() -> None:
    """When parameters are frozen or unfrozen while training, then the next update window is refused
    before it opens, so that a last checkpoint can be saved. The message names the parameters and
    says what to do. Parameters that were frozen before training are accepted."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    state = state_of(model)
    state.opening()
    model[1].weight.requires_grad_(False)
    with pytest.raises(
        UsageError, match=r"requires_grad of 1\.weight was changed .* before session\.adopt"
    ):
        state.opening()
    model.requires_grad_(True)
    with pytest.raises(UsageError, match=r"requires_grad of 0\.weight, 0\.bias was changed"):
        state.opening()


def test_temporarily_frozen_parameters_are_unfrozen_after_a_fault() -> None:
    """When a script freezes parameters for a part of a step, and the step is abandoned in that
    part, then `clear` unfreezes them before another wrapper is built."""
    model = nn.Linear(2, 2)
    state = state_of(model)
    state.opening()
    model.requires_grad_(False)
    state.capture()
    state.clear()
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.soak
def test_freezing_parameters_of_a_model_made_over_groups_is_refused() -> None:
    """When parameters of a model that a factory made over groups are frozen while training, then
    this is refused. When the model is made again, then later checks compare with the parameters of
    the new model."""
    maker: StateStore = adopted_make(lambda: of(DDP(nn.Linear(8, 8))))
    maker.shards(0, 1)
    with alone():
        made: Made = maker.rebuild()
        maker.opening()
        made.model.requires_grad_(False)
        with pytest.raises(UsageError, match="requires_grad of weight, bias was changed"):
            maker.opening()
        maker.clear()
        maker.rebuild()
        maker.opening()
        maker.clear()
