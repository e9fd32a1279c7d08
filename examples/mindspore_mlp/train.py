"""
Data-parallel training with MindSpore that survives faults: a small network learns to tell mixed
sine waves apart.

    tft run --adaptor mindspore --nproc-per-node 4 examples/mindspore_mlp/train.py --steps 60

This is an ordinary PyNative script except for the lines with `session` and `group`. The losses go
to the run directory as in the GPT example, with the same `record.py`.
"""

import argparse
from pathlib import Path
from sys import path

import mindspore
import numpy
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset
from tft_mindspore import Rows, group

import tft

path.insert(0, str(Path(__file__).parents[1] / "gpt"))
from record import Record

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--graph", action="store_true", help="compile the step: graph mode")
args = parser.parse_args()
if args.graph:
    mindspore.set_context(mode=mindspore.GRAPH_MODE)

session = tft.init()
record = Record(session.run_dir, session.rank)

mindspore.set_seed(args.seed)  # the same weights, and the same shuffling, on all ranks
draw = numpy.random.RandomState(args.seed)
kinds = draw.randint(0, 8, 2048).astype(numpy.int32)
waves = numpy.sin(numpy.outer(kinds + 1, numpy.linspace(0, 3, 32))) + draw.randn(2048, 32)
rows = NumpySlicesDataset(
    {"wave": waves.astype(numpy.float32), "kind": kinds},
    shuffle=True, num_shards=session.world, shard_id=session.rank,
).batch(16, drop_remainder=True)  # fmt: skip
data = Rows(rows, epochs=1 + args.steps // rows.get_dataset_size())

network = nn.SequentialCell(
    nn.Dense(32, args.width), nn.ReLU(), nn.Dense(args.width, args.width), nn.ReLU(), nn.Dense(args.width, 8)
)  # fmt: skip
optimizer = nn.Adam(network.trainable_params(), nn.ExponentialDecayLR(0.005, 0.9, 20))
session.adopt(model=network, optimizer=optimizer, data=data)
loss_of = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")


def forward(wave: mindspore.Tensor, kind: mindspore.Tensor) -> mindspore.Tensor:
    return loss_of(network(wave), kind)


gradients_of = mindspore.value_and_grad(forward, None, optimizer.parameters)


def train(session: tft.Session) -> None:
    for step in session.steps(args.steps):
        loss, gradients = gradients_of(*data.next())
        record.write(step, float(loss))
        gradients = group().mean(gradients)
        with session.update():
            optimizer(tuple(gradients))
        if session.rank == 0 and step % 20 == 0:
            print(f"step {step} loss {float(loss):.3f}")


session.run(train)
record.finish(session.digests())
