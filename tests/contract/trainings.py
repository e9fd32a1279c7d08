"""
A small training with each framework, for the contract suite. The processes of the suite import it.
"""

import array
import random
from collections.abc import Mapping
from typing import Any

import torch
import torch._dynamo  # the first `optimizer.step` imports it
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tft.testing.adaptor import group
from tft.testing.contract import Training
from tft.testing.contract_ranks import Update


class Numbers:
    """
    The model and the data of the fake adaptor.
    """

    def __init__(self, rank: int) -> None:
        self.values = array.array("d", [0.0] * 100)
        self._rank = rank
        self._position = 0

    def draw(self) -> float:
        """
        Draw the next number of this rank.
        """
        self._position += 1
        return random.Random(1000 * self._rank + self._position).random()

    def state_dict(self) -> dict[str, int]:
        """
        Return the position.
        """
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Set the position.
        """
        self._position = state["position"]


class FakeTraining(Training):
    """
    A training that adds up numbers.
    """

    adaptor = "fake"

    def parts(self) -> Mapping[str, Any]:
        """
        Return the parts. The model is its own data.
        """
        self._numbers = Numbers(self.rank)
        return {"model": self._numbers, "data": self._numbers}

    def step(self, model: Numbers, update: Update) -> object:
        """
        Add the numbers of all ranks.
        """
        total = group().add(model.draw())
        with update():
            for place in range(len(model.values)):
                model.values[place] += total * place
        return total.hex()

    def damage(self) -> None:
        """
        Change one number.
        """
        self._numbers.values[7] += 1.0


class Batches:
    """
    Batches drawn from a random generator of this rank.
    """

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)

    def next(self) -> torch.Tensor:
        """
        Return the next batch.
        """
        return torch.randn(8, 16, generator=self.generator)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """
        Return the position.
        """
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """
        Set the position.
        """
        self.generator.set_state(state["generator"])


class TorchTraining(Training):
    """
    A network with dropout and batch norm under DDP.
    """

    adaptor = "pytorch"

    def parts(self) -> Mapping[str, Any]:
        """
        Return model, optimizer, scheduler, data and wrapper.
        """
        torch.manual_seed(0)
        self._model = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4)
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.01)
        self._scheduler = torch.optim.lr_scheduler.StepLR(self._optimizer, 2, gamma=0.5)
        self._data = Batches(self.rank)
        torch.manual_seed(100 + self.rank)  # dropout differs between ranks
        return {
            "model": self._model,
            "optimizer": self._optimizer,
            "scheduler": self._scheduler,
            "data": self._data,
            "wrap": lambda: DistributedDataParallel(self._model),
        }

    def step(self, model: DistributedDataParallel, update: Update) -> object:
        """
        Train one step of DDP.
        """
        loss = model(self._data.next()).square().mean()
        loss.backward()
        told = loss.item()
        with update():
            self._optimizer.step()
            self._scheduler.step()
            self._optimizer.zero_grad()
        assert dist.is_initialized()
        return told.hex()

    def damage(self) -> None:
        """
        Change one weight.
        """
        with torch.no_grad():
            next(self._model.parameters())[0, 0] += 1.0
