"""
A data loader that shares the samples, in the order of their numbers, out to the data-parallel
ranks.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.training import get_args


class _Dealt:
    """
    The sample numbers of this rank's micro-batches, beginning after the consumed samples.
    """

    def __init__(self, total: int, consumed: int) -> None:
        self._total, self._consumed = total, consumed
        self._size = get_args().micro_batch_size
        self._rank, self._ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()

    def __iter__(self) -> Iterator[list[int]]:
        first = self._consumed + self._rank * self._size
        for begin in range(first, self._total, self._ranks * self._size):
            yield list(range(begin, begin + self._size))


def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
    """
    Return a loader of micro-batches, or None without a data set.
    """
    if dataset is None:
        return None
    return torch.utils.data.DataLoader(
        dataset, batch_sampler=_Dealt(len(dataset), consumed_samples)
    )
