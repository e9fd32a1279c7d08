"""
The replica groups within which the optimizer's state is divided.

Each data-parallel group consists of two replicas with the same state in the same order. The module
also forms all groups again after a process was replaced.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import mpu
from megatron.core.parallel_state import RankGenerator
from megatron.training import get_args

REPLICAS = 2

distributed: Any = dist
"""torch.distributed, with the functions that torch_npu adds."""


@dataclass
class Kind:
    """
    The groups of one kind of parameters: the dense part of a model, or its experts.
    """

    expert: bool
    ranks: list[int]
    """The data-parallel group of this rank."""
    replica: Any = None
    replica_gloo: Any = None

    def half(self) -> list[int]:
        """
        Return the ranks of this rank's replica.
        """
        return next(half for half in halves(self.ranks) if dist.get_rank() in half)


kinds: list[Kind] = []
repair: list[Any] = []
"""The groups in which state is repaired: a group of the devices, and a gloo group."""
_reboot = False


def tft_is_arf_reboot_node() -> bool:
    """
    Return whether this process replaces a lost process and is not yet in any group.
    """
    return _reboot


def set_reboot(value: bool) -> None:
    """
    Set whether this process is a replacement whose groups are not formed yet.
    """
    global _reboot
    _reboot = value


def halves(ranks: list[int]) -> list[list[int]]:
    """
    Return the replicas of a data-parallel group, as lists of ranks.
    """
    size = len(ranks) // REPLICAS
    assert size * REPLICAS == len(ranks), (
        f"the data-parallel group {ranks} is not divided into {REPLICAS}"
    )
    return [ranks[size * replica : size * (replica + 1)] for replica in range(REPLICAS)]


def _lists(expert: bool) -> list[list[int]]:
    args = get_args()
    parts = args.expert_model_parallel_size if expert else args.context_parallel_size
    inner = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * parts
    generator = RankGenerator(
        tp=args.tensor_model_parallel_size,
        ep=args.expert_model_parallel_size if expert else 1,
        dp=args.world_size // inner,
        pp=args.pipeline_model_parallel_size,
        cp=1 if expert else args.context_parallel_size,
        order="tp-cp-ep-dp-pp",
    )
    found: list[list[int]] = generator.get_ranks("dp" if expert else "dp-cp")
    return found


def form() -> None:
    """
    Form the replica groups for the first time in this process. All ranks form them in the same
    order.
    """
    kinds.clear()
    for expert in (False, True):
        lists = _lists(expert)
        kind = Kind(expert, next(ranks for ranks in lists if dist.get_rank() in ranks))
        for half in (half for ranks in lists for half in halves(ranks)):
            group = dist.new_group(half, use_local_synchronization=True)
            gloo = dist.new_group(half, backend="gloo")
            if dist.get_rank() in half:
                kind.replica, kind.replica_gloo = group, gloo
        kinds.append(kind)


def destroy(group: Any) -> None:
    """
    Destroy a group, if it exists.
    """
    if isinstance(group, dist.ProcessGroup):
        dist.destroy_process_group(group)


def reinit_all() -> None:
    """
    Let all device groups of Megatron make new links at their next use.
    """
    seen: set[Any] = set()
    for name, group in sorted(vars(mpu).items()):
        of_device = name.startswith("_") and "GROUP" in name and "GLOO" not in name
        if of_device and isinstance(group, dist.ProcessGroup) and group not in seen:
            seen.add(group)
            distributed.reinit_process_group(group, rebuild_link=True)


def rebuild(fault_ranks: list[int], train_args: Any, ctx: Any) -> None:
    """
    Rebuild handler: reconnect all groups after the processes of `fault_ranks` were replaced.

    Device groups make new links; gloo groups are formed again.
    """
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    set_reboot(False)
    distributed.reinit_process_group(group=None, rebuild_link=True)
    reinit_all()
    gloo = {
        "_DATA_PARALLEL_GROUP_GLOO": kinds[0].ranks,
        "_DATA_PARALLEL_GROUP_WITH_CP_GLOO": kinds[0].ranks,
        "_EXPERT_DATA_PARALLEL_GROUP_GLOO": kinds[1].ranks,
    }
    for name, ranks in gloo.items():
        made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        destroy(getattr(mpu, name))
        setattr(mpu, name, made)
    for kind in kinds:
        kind.replica = distributed.reinit_process_group(kind.replica, rebuild_link=True)
        made = dist.new_group(kind.half(), backend="gloo", use_local_synchronization=True)
        destroy(kind.replica_gloo)
        kind.replica_gloo = made
    train_args[2].take_groups()
    os.environ["TORCH_DIST_INIT_BARRIER"] = "0"


def for_repair(ranks: list[int]) -> list[Any]:
    """
    Form and return the groups of the ranks that send and receive state.
    """
    repair[:] = [
        dist.new_group(ranks, use_local_synchronization=True),
        dist.new_group(ranks, use_local_synchronization=True, backend="gloo"),
    ]
    return repair


def end_repair() -> None:
    """
    Destroy the groups of a repair, after all state has arrived.
    """
    for group in repair:
        destroy(group)
    repair.clear()
