"""
Which tensors of a shard belong to one rank alone, because they are buffers that the forward pass
changes.
"""

import pytest
import torch
from tft_pytorch.forward_buffers import RunningBuffers
from torch import nn


class Scaled(nn.Module):
    """
    A model with a buffer whose name is also the last word of a parameter's name.
    """

    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(1))
        self.fc = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)


@pytest.mark.parametrize("module", ["ema", "ema.module"])
def test_a_moving_average_of_a_parameter_is_no_buffer(module: str) -> None:
    """When a moving average has the names of a model behind its own, then the averages of buffers
    are found, and those of parameters are not, although a buffer has the name of their end."""
    model = Scaled()
    names = [f"model.{name}" for name in model.state_dict()]
    averages = [f"{module}.{name}" for name in model.state_dict()]
    own = RunningBuffers(model, lambda: True).own([*names, *averages, "optim.state.fc.weight.step"])
    buffers = [name for name, _ in model.named_buffers()]
    assert own.keys() == {f"{owner}.{name}" for owner in ("model", module) for name in buffers}
