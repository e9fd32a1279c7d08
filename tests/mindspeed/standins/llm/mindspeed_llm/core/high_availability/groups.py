"""
The groups within which the optimizer's state is divided: each data-parallel group is two of them, whose ranks hold the
same in the same order. And how all groups are formed anew when a process is new.
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
"""With what torch_npu adds to it."""


@dataclass
class Kind:
    """
    Of the dense part of a model, or of its experts.
    """

    expert: bool
    ranks: list[int]
    """The data-parallel group of this rank."""
    replica: Any = None
    replica_gloo: Any = None

    def half(self) -> list[int]:
        """
        The replica that this rank is in.
        """
        return next(half for half in halves(self.ranks) if dist.get_rank() in half)


kinds: list[Kind] = []
repair: list[Any] = []
"""The groups in which state is repaired: of the devices, and of gloo."""
_reboot = False


def tft_is_arf_reboot_node() -> bool:
    """
    This process takes the place of one that was lost, and is in no group yet.
    """
    return _reboot


def set_reboot(value: bool) -> None:
    """
    Until the groups are formed anew.
    """
    global _reboot
    _reboot = value


def halves(ranks: list[int]) -> list[list[int]]:
    """
    The replicas of a data-parallel group.
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
    For the first time in this process, by all ranks in one order.
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
    If there is one.
    """
    if isinstance(group, dist.ProcessGroup):
        dist.destroy_process_group(group)


def reinit_all() -> None:
    """
    Megatron's groups of devices make their links anew.
    """
    seen: set[Any] = set()
    for name, group in sorted(vars(mpu).items()):
        of_device = name.startswith("_") and "GROUP" in name and "GLOO" not in name
        if of_device and isinstance(group, dist.ProcessGroup) and group not in seen:
            seen.add(group)
            distributed.reinit_process_group(group, rebuild_link=True)


def rebuild(fault_ranks: list[int], train_args: Any, ctx: Any) -> None:
    """
    A process is new in these ranks: groups of devices make their links anew, those of gloo are made anew.
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
    The groups of those who send state and receive it.
    """
    repair[:] = [
        dist.new_group(ranks, use_local_synchronization=True),
        dist.new_group(ranks, use_local_synchronization=True, backend="gloo"),
    ]
    return repair


def end_repair() -> None:
    """
    All state is where it is to be.
    """
    for group in repair:
        destroy(group)
    repair.clear()
