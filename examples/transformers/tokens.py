"""
The data of the examples: sequences of tokens that a small model can learn.
"""

import torch
from torch.utils.data import Dataset


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """
    Sequences that count upwards, each in steps of its own.
    """

    def __init__(self, number: int, seed: int) -> None:
        self._number, self._seed = number, seed

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        first, distance = torch.randint(1, 8, (2,), generator=generator)
        tokens = (first + distance * torch.arange(16)) % 64
        return {"input_ids": tokens, "labels": tokens.clone()}
