"""
Decides which shards the training state has on this rank.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tft_pytorch.buckets import Wrappers
from tft_pytorch.names import parameter_names
from tft_pytorch.optimizer_shards import Settings, Share, Whole
from tft_pytorch.replicas import ReplicaOptimizer
from tft_pytorch.state import Shard
from tft_pytorch.tensor_holders import DENSE


def shards_of(
    model: nn.Module,
    optimizer: Optimizer,
    others: Mapping[str, Any],  # Any: each has its own type
    wrappers: Wrappers,
) -> list[Shard]:
    """
    Return the shards of this rank: without a `ReplicaOptimizer` one shard `dense`, which every rank
    holds.

    With a `ReplicaOptimizer` there is a second shard `optimizer.N`, with the parameters that this
    rank owns and their state. `N` is the number of this rank's share. Then `dense` is the rest.
    """
    if not isinstance(optimizer, ReplicaOptimizer):
        whole = Whole(model, optimizer)
        return [Shard(DENSE, model, whole, others=others, wrappers=wrappers)]
    names = {p: f"model.{name}" for p, name in parameter_names(model).items()}
    dealt = frozenset(names[p] for group in optimizer.param_groups for p in group["params"])
    owned = frozenset(names[p] for p in optimizer.owned)
    return [
        Shard(
            DENSE,
            model,
            Settings(model, optimizer),
            belongs=lambda name: name not in dealt,
            others=others,
            wrappers=wrappers,
        ),
        Shard(
            f"optimizer.{optimizer.share}",
            model,
            Share(model, optimizer),
            holders=optimizer.holders(),
            belongs=owned.__contains__,
        ),
    ]
