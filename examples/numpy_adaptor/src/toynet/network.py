"""
The network, its optimizer, and the wrapper that trains it on several processes.
"""

import numpy as np
from numpy.typing import NDArray

from toynet import group

Arrays = dict[str, NDArray[np.float64]]
"""Arrays by name."""


class Network:
    """
    A perceptron with one hidden layer and dropout, for regression.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, *, seed: int) -> None:
        """
        Create the parameters. `seed` determines them, so that they are the same on all ranks.
        """
        draw = np.random.default_rng(seed)
        self.parameters: Arrays = {
            "w1": draw.normal(0.0, inputs**-0.5, (inputs, hidden)),
            "b1": np.zeros(hidden),
            "w2": draw.normal(0.0, hidden**-0.5, (hidden, outputs)),
            "b2": np.zeros(outputs),
        }
        self.generator = np.random.default_rng()
        """Draws the dropout. Each rank gives it a seed of its own."""
        self.dropout = 0.1

    def gradients(
        self, inputs: NDArray[np.float64], targets: NDArray[np.float64]
    ) -> tuple[float, Arrays]:
        """
        Return the loss (mean squared error) on a batch, and the gradients of all parameters.

        `inputs` has the shape (batch, inputs), `targets` the shape (batch, outputs).
        """
        p = self.parameters
        active = np.tanh(inputs @ p["w1"] + p["b1"])
        kept = (self.generator.random(active.shape) >= self.dropout) / (1.0 - self.dropout)
        hidden = active * kept
        error = hidden @ p["w2"] + p["b2"] - targets
        back = 2.0 * error / error.size
        inner = (back @ p["w2"].T) * kept * (1.0 - active**2)
        return float(np.mean(error**2)), {
            "w1": inputs.T @ inner,
            "b1": inner.sum(axis=0),
            "w2": hidden.T @ back,
            "b2": back.sum(axis=0),
        }


class Momentum:
    """
    Gradient descent with momentum. Changes the parameters in place.
    """

    def __init__(self, parameters: Arrays, *, rate: float = 0.05, momentum: float = 0.9) -> None:
        self.parameters = parameters
        self.velocity: Arrays = {name: np.zeros_like(p) for name, p in parameters.items()}
        self.rate = rate
        self.momentum = momentum

    def step(self, gradients: Arrays) -> None:
        """
        Make one step.
        """
        for name, parameter in self.parameters.items():
            velocity = self.velocity[name]
            velocity *= self.momentum
            velocity += gradients[name]
            parameter -= self.rate * velocity


class Replicated:
    """
    A network of which each rank has a copy, and whose gradients are averaged over the group.
    """

    def __init__(self, network: Network) -> None:
        self._network = network

    def gradients(
        self, inputs: NDArray[np.float64], targets: NDArray[np.float64]
    ) -> tuple[float, Arrays]:
        """
        Return the loss and the gradients on the batch of this rank.
        """
        return self._network.gradients(inputs, targets)

    def average(self, gradients: Arrays) -> Arrays:
        """
        Return the average over all ranks. One all-reduce moves all gradients. Raises
        `toynet.Broken`.
        """
        flat = np.concatenate([each.ravel() for each in gradients.values()])
        flat /= group.all_reduce(flat)
        ends = np.cumsum([each.size for each in gradients.values()])[:-1]
        parts = zip(gradients.items(), np.split(flat, ends), strict=True)
        return {name: part.reshape(old.shape) for (name, old), part in parts}
