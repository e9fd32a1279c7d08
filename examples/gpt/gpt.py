"""
The example's model: a decoder-only transformer over bytes, with its optimizer and schedule.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

TOKENS = 256
"""One token for each byte value."""

DROPOUT = 0.1
"""More than zero, so that the random state of a rank affects its losses."""

LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """
    The size of a model, and the size of the batches of a rank.
    """

    layers: int
    heads: int
    width: int
    context: int
    batch: int


SIZES = {
    # 0.5 M parameters: short steps, and enough gradients for two of DDP's buckets
    "tiny": Size(layers=2, heads=4, width=128, context=64, batch=2),
    # 32 M parameters: enough state to move; little to read, so a step stays short on a CPU
    "small": Size(layers=8, heads=9, width=576, context=32, batch=1),
}


class Block(nn.Module):
    """
    Attention followed by a two-layer perceptron. The result of each is added to its input.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.attended = nn.Linear(size.width, size.width)
        self.before_perceptron = nn.LayerNorm(size.width)
        self.perceptron = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """
        Map (batch, context, width) to the same shape.
        """
        x = x + self.dropout(self.attended(self._attention(self.before_attention(x))))
        x = x + self.dropout(self.perceptron(self.before_perceptron(x)))
        return x

    def _attention(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        query, key, value = (
            part.view(batch, context, self.heads, -1).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(
            query, key, value, dropout_p=DROPOUT if self.training else 0.0, is_causal=True
        )
        return seen.transpose(1, 2).reshape(batch, context, width)


class GPT(nn.Module):
    """
    The model. Called with inputs and targets, it returns the mean loss in nats per byte.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, TOKENS, bias=False)
        self.apply(_initialise)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """
        Return the mean loss. Both arguments are token numbers of shape (batch, context).
        """
        places = torch.arange(inputs.shape[1])
        x = self.blocks(self.dropout(self.tokens(inputs) + self.positions(places)))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def make_optimizer(model: nn.Module, kind: Callable[..., Optimizer] = AdamW) -> Optimizer:
    """
    Return AdamW, or an optimizer built on it, with two parameter groups: matrices have weight
    decay, biases and norms have none.
    """
    parameters = list(model.parameters())
    return kind(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
    )


def make_scheduler(optimizer: Optimizer, steps: int) -> LambdaLR:
    """
    Return a schedule: a tenth of the steps to warm up, then half a cosine down to a tenth of the
    full rate.
    """
    warmup = max(1, steps // 10)

    def share(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        way = (done - warmup) / max(1, steps - warmup)
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, way))

    return LambdaLR(optimizer, share)
