"""
A script in graph mode, in which an operator inside the compiled graph can fail once.

    graph_job.py STEPS [RANK,STEP]

The second argument names the rank and the step of the failure.
"""

import sys
from pathlib import Path

import mindspore
import numpy
from mindspore import Tensor, nn, ops
from tft_mindspore import group

import tft

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from record import Record

steps, *struck = sys.argv[1:]
session = tft.init()
record = Record(session.run_dir, session.rank)
mindspore.set_context(mode=mindspore.GRAPH_MODE)
mindspore.set_seed(3)


def through(rows: numpy.ndarray) -> numpy.ndarray:
    """
    Return `rows` unchanged. In the named rank and step, raise an error, once in a run.
    """
    mark = Path(session.run_dir) / "failed"
    if struck == [f"{session.rank},{session.step}"] and not mark.exists():
        mark.touch()
        raise RuntimeError("UCEError error occurs when execute, error_code=507053")
    return rows


class Network(nn.Cell):  # type: ignore[misc]  # MindSpore has no types
    """
    A layer behind an operator that is implemented in Python.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dense(8, 4)
        self.through = ops.Custom(through, lambda x: x, lambda x: x, "pyfunc")

    def construct(self, rows: Tensor) -> Tensor:
        """
        Run the operator and the layer.
        """
        return self.layer(self.through(rows))


network = Network()
optimizer = nn.Adam(network.trainable_params(), 0.01)
session.adopt(model=network, optimizer=optimizer)


def forward(rows: Tensor) -> Tensor:
    """
    Return the loss.
    """
    return (network(rows) ** 2).mean()


gradients_of = mindspore.value_and_grad(forward, None, optimizer.parameters)


def train(session: tft.Session) -> None:
    """
    Train the steps with random rows that depend on the rank and the step.
    """
    for step in session.steps(int(steps)):
        draw = numpy.random.RandomState(100 * session.rank + step)
        loss, gradients = gradients_of(Tensor(draw.randn(4, 8).astype(numpy.float32)))
        record.write(step, float(loss))
        gradients = group().mean(gradients)
        with session.update():
            optimizer(tuple(gradients))


session.run(train)
record.finish(session.digests())
