"""
The data of the example: the source files of Python's standard library, as bytes.

Every machine with Python has these files, so nothing is downloaded. The same interpreter always
gives the same text. `Batches` draws its batches from (seed, rank, position); its only state is a
number, the position.
"""

import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

BUDGET = 1 << 20
"""The number of bytes of text. They are read in a few milliseconds, and are more than a short run
can learn by heart."""


def load_corpus(budget: int = BUDGET) -> Tensor:
    """
    Return the first `budget` bytes of the library's modules, sorted by name: one token per byte.
    """
    text = bytearray()
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += source.read_bytes()
        if len(text) >= budget:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:budget]


class Batches:
    """
    The stream of batches of one rank. The batch at a position is always the same.
    """

    def __init__(self, text: Tensor, *, batch: int, context: int, seed: int, rank: int) -> None:
        self._text = text
        self._batch = batch
        self._context = context
        self._stream = f"{seed}/{rank}"
        self._position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """
        Return the next batch: inputs and targets, each token numbers of shape (batch, context).
        """
        draw = random.Random(f"{self._stream}/{self._position}")
        self._position += 1
        last = len(self._text) - self._context - 1
        starts = [draw.randint(0, last) for _ in range(self._batch)]
        windows = torch.stack([self._text[s : s + self._context + 1] for s in starts]).long()
        return windows[:, :-1], windows[:, 1:]

    def skip(self, batches: int) -> None:
        """
        Skip the next `batches` batches.
        """
        self._position += batches

    def state_dict(self) -> dict[str, int]:
        """
        Return the number of batches that have been drawn.
        """
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Continue as if this number of batches had been drawn.
        """
        self._position = state["position"]
