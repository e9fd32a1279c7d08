"""
Finds out, for each process group of this rank, how many collectives the rank has begun in it, and
in which collective it waits. The functions can be called on any thread, also while the training
thread waits in a collective.
"""

from collections.abc import Iterable
from contextlib import suppress

import torch.distributed as dist
import xxhash
from torch.distributed import distributed_c10d

from tft.spi import GroupStanding
from tft_pytorch import device
from tft_pytorch.device import Devices
from tft_pytorch.flight_recorder import open_collectives
from tft_pytorch.interruptible import InterruptibleGloo

_FEW = 8
"""The maximum number of ranks of a group that are listed one by one."""
_ON_DEVICE = "a collective on the device"


def standings(devices: Devices) -> list[GroupStanding]:
    """
    Return, for each process group of this rank, how many collectives the rank has begun, and in
    which collective it waits.

    On an asynchronous device, torch's flight recorder says in which collective the device waits.
    Without the flight recorder, only one number is known: how many collectives the host has begun
    (the sequence number of the backend).
    """
    numbers = (device.sequence(devices) if devices.asynchronous else None) or {}
    idle = devices.answer() if numbers else True
    busy = "" if idle else _ON_DEVICE
    # `open_collectives` holds Python's global lock while it asks the device, so it must not be
    # called if the device does not answer
    waits = open_collectives() if idle is False else {}
    found = []
    for group in _groups():
        # the training thread may destroy the group meanwhile
        with suppress(RuntimeError, ValueError, KeyError):
            if isinstance(group, InterruptibleGloo):
                found.append(_standing(group, *group.standing()))
            elif group.group_name in waits:
                wait = waits[group.group_name]
                found.append(_standing(group, wait.number, wait.name))
            elif group in numbers:
                # if `waits` has any entry, the device waits in a collective of another group, so it
                # does not wait in a collective of this group
                found.append(_standing(group, numbers[group], "" if waits else busy))
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
