"""
A script that simulates a job of eight cards on one CPU by training one card after another.

`test_redundancy.py` runs the script.

    cards.py train DIRECTORY     two epochs; each card saves a checkpoint after each epoch
    cards.py resume DIRECTORY    each card loads its newest checkpoint and trains one more epoch
    cards.py end DIRECTORY       card 1 is lost after step 3; the others save a last checkpoint
    cards.py go-on DIRECTORY     all cards continue from that checkpoint to the end of the epoch

A layer is divided into four parts by its outputs. Each part is on two cards: cards R and R + 4 hold
the same part. Each output has its own error, so the cards need not communicate. The loss of the job
is the mean of the losses of its parts. The script prints the losses of each card's steps, bit for
bit.
"""

import json
import sys
from pathlib import Path

import mindspore
import numpy
from mindspore import nn, train
from tft_mindspore.layout import find, open_series, savers
from tft_mindspore.mindformers import Sizes

PARTS = 4
CARDS = 2 * PARTS
REPLICAS = Sizes(dp=2, tp=PARTS).replicas()
GONE_AFTER = 3
"""The number of completed steps when a card is lost."""
STEPS = 5
"""The number of steps in an epoch."""
INPUTS, OUTPUTS = 6, 8

_random = numpy.random.default_rng(7)
_TEACHER = _random.standard_normal((INPUTS, OUTPUTS), dtype=numpy.float32)
_BATCHES = _random.standard_normal((STEPS, 16, INPUTS), dtype=numpy.float32)
_BEGIN = _random.standard_normal((OUTPUTS, INPUTS), dtype=numpy.float32)


class Losses(train.Callback):  # type: ignore[misc]  # MindSpore ships no types
    """
    A callback that keeps the loss of each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def step_end(self, run_context: train.RunContext) -> None:
        """
        Keep the loss. MindSpore calls this after each step.
        """
        loss = run_context.original_args().net_outputs
        self.seen.append(loss.asnumpy().tobytes().hex())


class Last(train.Callback):  # type: ignore[misc]  # as above
    """
    A callback that ends the training of a card and saves the card's part of a last checkpoint.

    A card saves only if it is chosen to do so.
    """

    def __init__(self, directory: Path, card: int) -> None:
        super().__init__()
        self.card = card
        self.series = open_series(directory, card, "mlp")

    def step_end(self, run_context: train.RunContext) -> None:
        """
        Save and stop after step `GONE_AFTER`. MindSpore calls this after each step.
        """
        told = run_context.original_args()
        if told.cur_step_num < GONE_AFTER:
            return
        if self.card in savers(REPLICAS, gone={1}):
            self.series.save(GONE_AFTER, 1, lambda path: save(told.train_network, path))
            self.series.note(GONE_AFTER, 1)
        run_context.request_stop()


def save(cell: nn.Cell, path: Path) -> None:
    """
    Save the parameters of `cell` with MindSpore's own function.
    """
    mindspore.save_checkpoint(cell, str(path), integrated_save=False)


def every_epoch(directory: Path, card: int) -> train.Callback:
    """
    Return MindSpore's own checkpoint callback, with the directory layout of MindSpore's guide.
    """
    config = train.CheckpointConfig(
        save_checkpoint_steps=STEPS, keep_checkpoint_max=4, integrated_save=False
    )
    place = directory / f"rank_{card}"
    return train.ModelCheckpoint(prefix="checkpoint", directory=str(place), config=config)


def run(
    card: int, *, epochs: int, skip: int = 0, saved: Path | None, callback: train.Callback | None
) -> list[str]:
    """
    Train one card and return the losses of its steps.

    `skip` batches of each epoch are left out. `saved` is the checkpoint to begin with.
    """
    width = OUTPUTS // PARTS
    part = slice(card % PARTS * width, (card % PARTS + 1) * width)
    begin = mindspore.Tensor(_BEGIN[part])
    layer = nn.Dense(INPUTS, width, weight_init=begin, bias_init="zeros")
    optimizer = nn.Momentum(layer.trainable_params(), learning_rate=0.05, momentum=0.9)
    if saved is not None:
        loaded = mindspore.load_checkpoint(str(saved))
        for holder in (layer, optimizer):
            missing, _ = mindspore.load_param_into_net(holder, loaded)
            assert not missing, missing
    losses = Losses()
    rows = [(batch, (batch @ _TEACHER)[:, part]) for batch in _BATCHES[skip:]]
    data = mindspore.dataset.GeneratorDataset(rows, column_names=["x", "y"], shuffle=False)
    model = train.Model(layer, loss_fn=nn.MSELoss(), optimizer=optimizer)
    callbacks = [losses, *([] if callback is None else [callback])]
    model.train(epochs, data, callbacks=callbacks, dataset_sink_mode=False)
    return losses.seen


def train_all(directory: Path) -> dict[int, list[str]]:
    """
    Train two epochs without a fault; return the losses by card.
    """
    return {
        card: run(card, epochs=2, saved=None, callback=every_epoch(directory, card))
        for card in range(CARDS)
    }


def resume_all(directory: Path) -> dict[int, list[str]]:
    """
    Train one more epoch from the newest checkpoint in each card's own directory; return the losses.
    """
    return {
        card: run(
            card,
            epochs=1,
            saved=max((directory / f"rank_{card}").glob("checkpoint-*.ckpt")),
            callback=every_epoch(directory, card),
        )
        for card in range(CARDS)
    }


def end_all(directory: Path) -> dict[int, list[str]]:
    """
    Train an epoch that ends early with a last checkpoint; return the losses.
    """
    return {
        card: run(card, epochs=1, saved=None, callback=Last(directory, card))
        for card in range(CARDS)
    }


def go_on(directory: Path) -> dict[int, list[str]]:
    """
    Train the rest of the epoch from the last checkpoint; return the losses.
    """
    found = find(directory, REPLICAS, high_availability=True)
    return {
        card: run(card, epochs=1, skip=found.epoch, saved=file, callback=None)
        for card, file in found.files.items()
    }


def main() -> None:
    """
    Train all cards, one after another, and print the losses.
    """
    modes = {"train": train_all, "resume": resume_all, "end": end_all, "go-on": go_on}
    mode, directory = sys.argv[1], Path(sys.argv[2])
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    sys.stdout.write(json.dumps(modes[mode](directory)) + "\n")


main()
