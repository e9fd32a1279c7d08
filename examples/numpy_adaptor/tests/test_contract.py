"""
The adaptor keeps the contract of tft.

    pip install './examples/numpy_adaptor[test]'
    pytest examples/numpy_adaptor
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import toynet

from tft.testing.contract import AdaptorContract, Training
from tft.testing.contract_ranks import Update


class Batches:
    """
    Batches of this rank, made of a seed and their number.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._position = 0

    def next(self) -> Any:  # Any: an array of numpy
        """
        Return the next batch.
        """
        self._position += 1
        return np.random.default_rng([self._rank, self._position]).normal(size=(8, 4))

    def state_dict(self) -> dict[str, Any]:
        """
        Return the position.
        """
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Go to a position.
        """
        self._position = state["position"]


class ToyTraining(Training):
    """
    A small network of toynet.
    """

    adaptor = "numpy"

    def parts(self) -> Mapping[str, Any]:
        """
        Return what the script would hand over.
        """
        self.network = toynet.Network(4, 8, 2, seed=0)
        self.network.generator = np.random.default_rng([1, self.rank])
        self.optimizer = toynet.Momentum(self.network.parameters)
        self.data = Batches(self.rank)
        return {
            "model": self.network,
            "optimizer": self.optimizer,
            "data": self.data,
            "wrap": lambda: toynet.Replicated(self.network),
        }

    def step(self, model: toynet.Replicated, update: Update) -> object:
        """
        Train one step.
        """
        inputs = self.data.next()
        loss, gradients = model.gradients(inputs, inputs[:, :2])
        gradients = model.average(gradients)
        with update():
            self.optimizer.step(gradients)
        return loss.hex()

    def damage(self) -> None:
        """
        Change one parameter.
        """
        next(iter(self.network.parameters.values())).flat[0] += 1.0


class TestToynet(AdaptorContract):
    """
    The tests of the contract, with this training.
    """

    training = ToyTraining
