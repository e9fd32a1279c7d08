"""
A job of eight cards on one CPU, card after card, as far as a CPU can be one: what
`test_redundancy.py` runs.

    cards.py train DIRECTORY     two epochs; a checkpoint of each card after each
    cards.py resume DIRECTORY    loads the newest of each card, and trains one more
    cards.py end DIRECTORY       card 1 is gone after step 3; the others save a last checkpoint
    cards.py go-on DIRECTORY     all go on from that, to the end of the epoch

A layer is cut into four by its outputs, and each part is on two cards: cards R and R + 4 hold the same. Each
output has an error of its own, so no card needs to hear from another: the loss of the job is the mean of
those of its parts. Prints, for each card, the losses of its steps, bit for bit.
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
"""So many steps have been done when a card is lost."""
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


class Last(train.Callback):  # type: ignore[misc]  # as above
    """
    Ends the training of a card with its part of a last checkpoint, if it is to write one.
    """

    def __init__(self, directory: Path, card: int) -> None:
        super().__init__()
        self.card = card
        self.series = open_series(directory, card, "mlp")

    def step_end(self, run_context: train.RunContext) -> None:
        """
        Called by MindSpore.
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
    As MindSpore saves it.
    """
    mindspore.save_checkpoint(cell, str(path), integrated_save=False)


def every_epoch(directory: Path, card: int) -> train.Callback:
    """
    MindSpore's own checkpoints, in the place of the guide.
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
    Train one card; the losses of its steps.
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
    Two epochs, undisturbed.
    """
    return {
        card: run(card, epochs=2, saved=None, callback=every_epoch(directory, card))
        for card in range(CARDS)
    }


def resume_all(directory: Path) -> dict[int, list[str]]:
    """
    One epoch more, of what each card finds in its own directory.
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
    An epoch that is cut off.
    """
    return {
        card: run(card, epochs=1, saved=None, callback=Last(directory, card))
        for card in range(CARDS)
    }


def go_on(directory: Path) -> dict[int, list[str]]:
    """
    The rest of it.
    """
    found = find(directory, REPLICAS, high_availability=True)
    return {
        card: run(card, epochs=1, skip=found.epoch, saved=file, callback=None)
        for card, file in found.files.items()
    }


def main() -> None:
    """
    All cards, one after another.
    """
    modes = {"train": train_all, "resume": resume_all, "end": end_all, "go-on": go_on}
    mode, directory = sys.argv[1], Path(sys.argv[2])
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    sys.stdout.write(json.dumps(modes[mode](directory)) + "\n")


main()
