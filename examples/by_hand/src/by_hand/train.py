"""
The training script: mostly the calls that tft needs. Run it with `tft agent -m by_hand.train`, and
with the number of steps if it is not to be 1500.
"""

import json
import sys
import time
from typing import Any

import numpy as np
import toynet

import tft

STEPS = int(sys.argv[1]) if sys.argv[1:] else 1500  # half a minute: time to type a command


class Position:
    """
    The data of this toy: a number that grows by 1, from which each batch is made.
    """

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """
        Return the position.
        """
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Set the position.
        """
        self.count = state["count"]


session = tft.init()  # joins the job that the agent has started this process for
network = toynet.Network(4, 16, 2, seed=0)
optimizer = toynet.Momentum(network.parameters)
network.generator = np.random.default_rng([1, session.rank])
position = Position()
session.adopt(
    model=network, optimizer=optimizer, data=position, wrap=lambda: toynet.Replicated(network)
)


def train(session: tft.Session) -> None:
    """
    Run the training loop. tft calls this again after every incident.
    """
    for _ in session.steps(STEPS):
        time.sleep(0.02)  # a larger network would need it
        position.count += 1
        inputs = np.random.default_rng([session.rank, position.count]).normal(size=(8, 4))
        loss, gradients = session.model.gradients(inputs, inputs[:, :2])
        session.record({"loss": loss.hex()})
        gradients = session.model.average(gradients)
        with session.update():
            optimizer.step(gradients)


session.run(train)
final = json.dumps(dict(session.digests()), indent=2)
(session.run_dir / f"final-rank{session.rank}.json").write_text(final + "\n")
