"""
Says where this rank stands in each of its process groups, while its training thread may wait in a
collective. Can be called on any thread.
"""

from collections.abc import Iterable
from contextlib import suppress

import torch.distributed as dist
import xxhash
from torch.distributed import distributed_c10d

from tft.spi import GroupStanding
from tft_pytorch import device
from tft_pytorch.device import Devices
from tft_pytorch.interruptible import InterruptibleGloo

_FEW = 8
"""The most ranks of a group that are told one by one."""
_ON_DEVICE = "a collective on the device"


def standings(devices: Devices) -> list[GroupStanding]:
    """
    Return where this rank stands in each of its process groups.

    The number of collectives on an asynchronous device is the sequence number of its backend. Such a
    group does not say in which collective the device waits.
    """
    numbers = (device.sequence(devices) if devices.asynchronous else None) or {}
    busy = _ON_DEVICE if numbers and not devices.idle() else ""
    found = []
    for group in _groups():
        # the training thread may destroy the group meanwhile
        with suppress(RuntimeError, ValueError, KeyError):
            if isinstance(group, InterruptibleGloo):
                found.append(_standing(group, *group.standing()))
            elif group in numbers:
                found.append(_standing(group, numbers[group], busy))
    return found


def _groups() -> Iterable[dist.ProcessGroup]:
    while True:
        try:
            return list(distributed_c10d._world.pg_map)
        except RuntimeError:
            continue  # the training thread has made or destroyed a group while the list was made


def _standing(group: dist.ProcessGroup, entered: int, inside: str) -> GroupStanding:
    ranks = dist.get_process_group_ranks(group)
    members = ", ".join(map(str, ranks))
    if len(ranks) > _FEW:
        # with all ranks of all groups, the answers of a large job would be too much to read
        members = xxhash.xxh3_64_hexdigest(members.encode())
    return GroupStanding(
        group=group.group_name, size=len(ranks), members=members, entered=entered, inside=inside
    )
