"""
The example's data: the sources of Python's own standard library, as bytes.

They are on every machine that runs Python, so nothing is downloaded; one interpreter always
gives the same text. `Batches` draws from it by (seed, rank, position): its only state is a number.
"""

import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

BUDGET = 1 << 20
"""Bytes of text. Read in a few milliseconds, and more than a short run can learn by heart."""


def load_corpus(budget: int = BUDGET) -> Tensor:
    """
    The first `budget` bytes of the library's modules, sorted by name: one token per byte.
    """
    text = bytearray()
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += source.read_bytes()
        if len(text) >= budget:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:budget]


class Batches:
    """
    The stream of batches of one rank. The batch at a position is always the same one.
    """

    def __init__(self, text: Tensor, *, batch: int, context: int, seed: int, rank: int) -> None:
        self._text = text
        self._batch = batch
        self._context = context
        self._stream = f"{seed}/{rank}"
        self._position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """
        Inputs and targets, each (batch, context) of token numbers.
        """
        draw = random.Random(f"{self._stream}/{self._position}")
        self._position += 1
        last = len(self._text) - self._context - 1
        starts = [draw.randint(0, last) for _ in range(self._batch)]
        windows = torch.stack([self._text[s : s + self._context + 1] for s in starts]).long()
        return windows[:, :-1], windows[:, 1:]

    def skip(self, batches: int) -> None:
        """
        Leave out the next batches.
        """
        self._position += batches

    def state_dict(self) -> dict[str, int]:
        """
        How many batches have been drawn.
        """
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Go on as if so many batches had been drawn.
        """
        self._position = state["position"]
