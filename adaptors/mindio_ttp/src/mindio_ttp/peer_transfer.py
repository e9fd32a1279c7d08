"""
Computes which rank sends which state to which rank in a repair. Every rank computes the same
transfers, because every rank has received the facts of all ranks.

As in the library MindIO, the program's repair function gets all transfers of its rank in one call.
The repair function also gets the list of all ranks that send or receive state, because it may form
a process group of these ranks first.

Sources in MindIO, at commit 22bb3d98 of the repository mind-cluster: `HandleRepair` in
`processor.cpp` (lines 823 to 883), `GenerateRepairMsg` in `controller.cpp` (lines 2049 to 2106),
and `RepairSelectReplica` in `replica_manager.cpp` (lines 96 to 130).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindio_ttp.exchange import Body
from tft.errors import OrderRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """
    One transfer in a repair: the rank `source` sends its part of a state to the rank `destination`.
    The state is that of the dense parameters or of the experts.
    """

    type: int
    """The kind of state: 0 for dense parameters, 1 for experts. The number is the index of the
    group of ranks in the list that the program has passed to `tft_set_optimizer_replica`."""
    source: int
    destination: int
    step: int
    """The step to whose end the sent state belongs. The step is numbered by tft's count, and not by
    the program's own count."""


def units(told: Mapping[int, Body], world: int) -> tuple[Unit, ...]:
    """
    Return all transfers of a repair, ordered by kind of state and destination. `told` says for each
    rank which shards the rank needs, and which shards it offers, each with a step.

    The source of a transfer is the first rank after the destination that offers the needed shard of
    the needed step. After the last rank of the world, the search continues at rank 0. Raises
    `OrderRefused` if no rank offers the shard, or if the source itself needs state.
    """
    found = []
    for destination, said in told.items():
        for shard, step in said["needs"]:
            sources = [rank for rank, other in told.items() if [shard, step] in other["offers"]]
            if not sources:
                raise OrderRefused(
                    f"rank {destination} needs the shard {shard} of step {step}, but no rank has a "
                    "copy of this shard at this step"
                )
            source = min(sources, key=lambda rank: (rank - destination) % world)
            if told[source]["needs"]:
                raise OrderRefused(
                    f"rank {source} is to send the shard {shard} to rank {destination}, but rank "
                    f"{source} itself needs state from another rank"
                )
            kind = int(shard.removeprefix("group").partition(".")[0])
            found.append(Unit(type=kind, source=source, destination=destination, step=step))
    return tuple(sorted(found, key=lambda unit: (unit.type, unit.destination)))


def participants(all_units: Sequence[Unit]) -> list[int]:
    """
    Return the ranks that send or receive state in the transfers `all_units`, in ascending order.
    """
    return sorted({rank for unit in all_units for rank in (unit.source, unit.destination)})
