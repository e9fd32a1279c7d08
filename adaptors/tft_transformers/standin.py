"""
A process group that stands in for the real ones until training begins.

When `TrainingArguments` are made, accelerate reads the rank and the number of ranks from the
default process group. If there is no such group, accelerate makes one. But tft must form the groups
itself, when training begins and after every incident. So `init` makes the stand-in the default
group: it knows the rank and the number of ranks, and refuses to communicate.
"""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store  # the classes of torch.distributed

from tft.errors import UsageError

_BACKEND = "tft_standin"

_OPERATIONS = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv",
    "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip


class StandIn(dist.ProcessGroup):
    """
    A process group whose collectives raise `UsageError`.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch declares another constructor
        self._rank, self._size = rank, size

    def rank(self) -> int:
        """
        Return the number of this rank.
        """
        return self._rank

    def size(self) -> int:
        """
        Return the number of ranks.
        """
        return self._size

    def getBackendName(self) -> str:
        """
        Return the name of this backend.
        """
        return _BACKEND


def _refusal(operation: str) -> Callable[..., None]:
    def refuse(self: StandIn, *arguments: object, **named: object) -> None:
        raise UsageError(
            f"the ranks cannot communicate ({operation}) before trainer.train() or after it: tft "
            "forms the process groups when training begins. Remove the call. If it is "
            "main_process_first(), let each rank do the work itself, or do the work before the job "
            "starts"
        )

    return refuse


for _operation in _OPERATIONS:
    setattr(StandIn, _operation, _refusal(_operation))


def stand_in(rank: int, world: int) -> None:
    """
    Make the stand-in the default process group of this process.
    """
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _make, devices=["cpu", "cuda", "npu"])
    dist.init_process_group(_BACKEND, store=HashStore(), rank=rank, world_size=world)


def stand_aside() -> None:
    """
    Remove the stand-in, so that tft can form the real process groups.
    """
    if dist.is_initialized() and dist.get_backend() == _BACKEND:
        dist.destroy_process_group()


def _make(store: Store, rank: int, size: int, timeout: timedelta) -> StandIn:
    return StandIn(rank, size)
