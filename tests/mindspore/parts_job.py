"""
A script that divides its optimizer into two shares.

    parts_job.py --steps N

Each rank updates one half of the parameters and keeps only the moments of this half. Rank R+2 has
the same half as rank R.
"""

import argparse
from pathlib import Path
from sys import path

import mindspore
import numpy
from mindspore import Tensor, nn
from tft_mindspore import Part, group

import tft

path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from record import Record

SHARES = 2

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
args = parser.parse_args()

session = tft.init()
record = Record(session.run_dir, session.rank)
share = session.rank % SHARES
mindspore.set_seed(3)
network = nn.SequentialCell(
    nn.Dense(16, 32), nn.ReLU(), nn.Dense(32, 16), nn.Tanh(), nn.Dense(16, 4)
)
weights = list(network.trainable_params())
shares = [weights[each::SHARES] for each in range(SHARES)]
optimizer = nn.Adam(shares[share], 0.01)


class Draws:
    """
    A data source whose rows depend only on the rank and the position.
    """

    position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """
        Return the next batch and advance the position.
        """
        draw = numpy.random.RandomState(1000 * session.rank + self.position)
        self.position += 1
        rows = draw.randn(8, 16).astype(numpy.float32)
        return Tensor(rows), Tensor(numpy.sin(rows[:, :4]))

    def state_dict(self) -> dict[str, int]:
        """
        Return the position.
        """
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Set the position.
        """
        self.position = state["position"]


data = Draws()
moments = [p.name for p in optimizer.get_parameters() if p.name.startswith("moment")]
session.adopt(
    model=network,
    optimizer=optimizer,
    data=data,
    shards={
        f"optimizer.{share}": Part(
            names=[*(p.name for p in shares[share]), *moments],
            ranks=range(share, session.world, SHARES),
        )
    },
    elsewhere=[p.name for p in shares[1 - share]],
)


def forward(rows: Tensor, wanted: Tensor) -> Tensor:
    """
    Return the loss.
    """
    return ((network(rows) - wanted) ** 2).mean()


gradients_of = mindspore.value_and_grad(forward, None, weights)


def share_out() -> None:
    """
    Broadcast each half of the parameters from a rank that updates it to all other ranks.
    """
    for owner, owned in enumerate(shares):
        given = group().broadcast(owned, root=owner)
        if owner != share:
            for parameter, value in zip(owned, given, strict=True):
                parameter.copy_(value)


def train(session: tft.Session) -> None:
    """
    Train the steps. At the beginning of each step, the ranks exchange their halves of the
    parameters.
    """
    for step in session.steps(args.steps):
        share_out()
        loss, gradients = gradients_of(*data.next())
        record.write(step, float(loss))
        mean = group().mean(gradients)
        with session.update():
            optimizer(tuple(mean[share::SHARES]))


session.run(train)
record.finish(session.digests())
