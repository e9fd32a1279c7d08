"""
A job of eight cards on one CPU, card after card, as far as a CPU can be one: what
`test_redundancy.py` runs.

    cards.py train DIRECTORY     two epochs; a checkpoint of each card after each
    cards.py resume DIRECTORY    loads the newest of each card, and trains one more

A layer is cut into four by its outputs, and each part is on two cards: cards R and R + 4 hold the same. Each
output has an error of its own, so no card needs to hear from another: the loss of the job is the mean of
those of its parts. Prints, for each card, the losses of its steps, bit for bit.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import mindspore
import numpy
from mindspore import nn, train

PARTS = 4
CARDS = 2 * PARTS
STEPS = 5
"""In an epoch."""
INPUTS, OUTPUTS = 6, 8

_random = numpy.random.default_rng(7)
_TEACHER = _random.standard_normal((INPUTS, OUTPUTS), dtype=numpy.float32)
_BATCHES = _random.standard_normal((STEPS, 16, INPUTS), dtype=numpy.float32)
_BEGIN = _random.standard_normal((OUTPUTS, INPUTS), dtype=numpy.float32)


class Losses(train.Callback):  # type: ignore[misc]  # MindSpore ships no types
    """
    Keeps the loss of each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def step_end(self, run_context: train.RunContext) -> None:
        """
        Called by MindSpore.
        """
        loss = run_context.original_args().net_outputs
        self.seen.append(loss.asnumpy().tobytes().hex())


def batches(part: slice) -> Iterator[tuple[numpy.ndarray, numpy.ndarray]]:
    """
    An epoch, as the cards of a part see it.
    """
    for batch in _BATCHES:
        yield batch, (batch @ _TEACHER)[:, part]


def newest(directory: Path) -> Path:
    """
    Of a card, by its epoch.
    """
    return max(directory.glob("checkpoint-*.ckpt"))


def run(card: int, directory: Path, *, resume: bool) -> list[str]:
    """
    Train one card; the losses of its steps.
    """
    width = OUTPUTS // PARTS
    part = slice(card % PARTS * width, (card % PARTS + 1) * width)
    layer = nn.Dense(INPUTS, width, weight_init=mindspore.Tensor(_BEGIN[part]), bias_init="zeros")
    optimizer = nn.Momentum(layer.trainable_params(), learning_rate=0.05, momentum=0.9)
    if resume:
        saved = mindspore.load_checkpoint(str(newest(directory)))
        for holder in (layer, optimizer):
            missing, _ = mindspore.load_param_into_net(holder, saved)
            assert not missing, missing
    losses = Losses()
    config = train.CheckpointConfig(
        save_checkpoint_steps=STEPS, keep_checkpoint_max=4, integrated_save=False
    )
    kept = train.ModelCheckpoint(prefix="checkpoint", directory=str(directory), config=config)
    data = mindspore.dataset.GeneratorDataset(
        list(batches(part)), column_names=["x", "y"], shuffle=False
    )
    model = train.Model(layer, loss_fn=nn.MSELoss(), optimizer=optimizer)
    epochs = 1 if resume else 2
    model.train(epochs, data, callbacks=[losses, kept], dataset_sink_mode=False)
    return losses.seen


def main() -> None:
    """
    All cards, one after another.
    """
    mode, directory = sys.argv[1], Path(sys.argv[2])
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    seen = {
        card: run(card, directory / f"rank_{card}", resume=mode == "resume")
        for card in range(CARDS)
    }
    sys.stdout.write(json.dumps(seen) + "\n")


main()
