"""
What the plain scripts and their forms with tft share: models, data and the command line. Small, so
that each script runs in seconds on a CPU.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

CONTEXT = 32
"""Tokens in a sequence."""
VOCABULARY = 96
CLASSES = 10
SIDE = 16
"""Pixels of an image in each direction."""


def arguments(steps: int) -> argparse.Namespace:
    """
    Return the arguments of a script: `--steps` and `--out`, a directory for its files.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--out", default="")
    return parser.parse_args()


class Decoder(nn.Module):
    """
    A decoder of two layers with dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 64)
        self.positions = nn.Embedding(CONTEXT, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """
        Return the mean loss of the tokens `y` that follow the tokens `x`, both (batch, CONTEXT).
        """
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        found = self.tokens(x) + self.positions(torch.arange(CONTEXT))
        logits = self.head(self.layers(found, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.view(-1, VOCABULARY), y.reshape(-1))


def corpus(split: str) -> Tensor:
    """
    Return the tokens of a split, `train` or `val`: a text of repeated words with noise.
    """
    generator = torch.Generator().manual_seed(1 if split == "train" else 2)
    words = torch.randint(VOCABULARY, (50, 5), generator=generator)
    return words[torch.randint(50, (4000,), generator=generator)].reshape(-1)


def sequences(tokens: Tensor, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """
    Return `batch` random sequences of tokens, and the tokens that follow them, both (batch, CONTEXT).
    """
    starts = torch.randint(len(tokens) - CONTEXT, (batch,), generator=generator).tolist()
    x = torch.stack([tokens[i : i + CONTEXT] for i in starts])
    y = torch.stack([tokens[i + 1 : i + 1 + CONTEXT] for i in starts])
    return x, y


class Images(Dataset[tuple[Tensor, int]]):
    """
    Images of bars in ten classes, which are shifted and flipped at random as they are read.
    """

    def __init__(self, count: int, *, augment: bool) -> None:
        self._count, self._augment = count, augment

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        kind = index % CLASSES
        generator = torch.Generator().manual_seed(index)
        image = 0.1 * torch.randn(1, SIDE, SIDE, generator=generator)
        image[:, kind : kind + 3] += 1.0
        if self._augment:
            image = image.roll(int(torch.randint(-2, 3, ())), dims=2)
            image = image.flip(2) if torch.rand(()) < 0.5 else image
        return image, kind


def classifier() -> nn.Module:
    """
    Return a convolutional network with batch norms, for images of (1, SIDE, SIDE).
    """
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, CLASSES),
    )  # fmt: skip
