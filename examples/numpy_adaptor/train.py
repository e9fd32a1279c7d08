"""
Train a toy network on four processes. The job survives faults.

    tft run --nproc-per-node 4 --adaptor numpy train.py --steps 60
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import toynet
from numpy.typing import NDArray

import tft

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--seconds", type=float, default=0.02, help="how much longer a step takes")
args = parser.parse_args()


class Batches:
    """
    The batches of this rank. Each is made from a seed and the number of the batch.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._position = 0

    def next(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """
        Return the inputs and targets of the next batch.
        """
        self._position += 1
        draw = np.random.default_rng([self._rank, self._position])
        inputs = draw.normal(size=(32, 8))
        return inputs, np.sin(inputs[:, :4]) + inputs[:, 4:]

    def state_dict(self) -> dict[str, Any]:
        """
        Return the position.
        """
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Set the position.
        """
        self._position = state["position"]


session = tft.init()
network = toynet.Network(8, 64, 4, seed=0)  # the same parameters on every rank
optimizer = toynet.Momentum(network.parameters)
network.generator = np.random.default_rng([1, session.rank])  # but its own dropout on each
data = Batches(session.rank)
session.adopt(
    model=network, optimizer=optimizer, data=data, wrap=lambda: toynet.Replicated(network)
)


def train(session: tft.Session) -> None:
    """
    Run the training loop. tft calls this again after every incident.
    """
    for step in session.steps(args.steps):
        time.sleep(args.seconds)  # a larger network would need it
        loss, gradients = session.model.gradients(*data.next())
        session.record({"loss": loss.hex()})  # before the all-reduce, see README.md
        gradients = session.model.average(gradients)
        with session.update():
            optimizer.step(gradients)
        if session.rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss:.4f}")


session.run(train)
final = json.dumps(dict(session.digests()), indent=2)
(session.run_dir / f"final-rank{session.rank}.json").write_text(final + "\n")
