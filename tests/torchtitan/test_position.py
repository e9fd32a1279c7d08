"""
A loader that is made again after an incident goes on at its position, with the same random numbers.
"""

import random
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from tft_pytorch.generators import generators, restore
from tft_torchtitan.position import Position
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]


class Noise(IterableDataset[float]):
    """
    Numbers without a position, which are drawn from all generators of the process.
    """

    def __iter__(self) -> Iterator[float]:
        while True:
            yield random.random() + numpy.random.rand() + torch.rand(()).item()


def trainer() -> Any:
    """
    Return what stands for a trainer.
    """
    return Namespace(dataloader=StatefulDataLoader(Noise(), batch_size=2), ntokens_seen=0)


def test_a_loader_that_is_made_again_draws_the_same_numbers() -> None:
    """When a loader reads items again to come to its position, then the generators of the process
    are put back, and the next batch is that of the loader before."""
    first, position = trainer(), Position()
    position.attach(first)
    batches = iter(first.dataloader)
    for _ in range(3):
        next(batches)
        position.taken()
    state, drawn = position.state_dict(), generators()
    expected = next(batches)

    second, position = trainer(), Position()
    position.load_state_dict(state)
    restore(drawn)
    position.attach(second)
    assert next(iter(second.dataloader)).equal(expected)
