"""
Computes which rank sends which state to which rank in a repair. Every rank computes the same
transfers from the facts of all ranks.

As in MindIO, the program's repair function gets all transfers of its rank in one call. It also gets
all ranks that take part, because it may form a process group of them first.

Sources, at mind-cluster 22bb3d98: `HandleRepair` in `processor.cpp`, lines 823 to 883,
`GenerateRepairMsg` in `controller.cpp`, lines 2049 to 2106, and `RepairSelectReplica` in
`replica_manager.cpp`, lines 96 to 130.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindio_ttp.exchange import Body
from tft.errors import OrderRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """
    One transfer of a rank's part of a state, of dense parameters or of experts, to another rank.
    """

    type: int
    """The index of the group in the list that the program has passed to
    `tft_set_optimizer_replica`."""
    source: int
    destination: int
    step: int
    """The step, by tft's count, after which the sent state was complete."""


def units(told: Mapping[int, Body], world: int) -> tuple[Unit, ...]:
    """
    Return all transfers, ordered by type and destination. `told` has the needs and the offers of
    each rank.

    The source of a shard is the first rank after the destination that offers the shard of the
    needed step. After the last rank of the world, the search continues at rank 0. Raises
    `OrderRefused` if no rank offers the shard, or if the source itself needs state.
    """
    found = []
    for destination, said in told.items():
        for shard, step in said["needs"]:
            sources = [rank for rank, other in told.items() if [shard, step] in other["offers"]]
            if not sources:
                raise OrderRefused(f"no rank offers {shard} of step {step} to rank {destination}")
            source = min(sources, key=lambda rank: (rank - destination) % world)
            if told[source]["needs"]:
                raise OrderRefused(
                    f"rank {source} is to send {shard} to rank {destination}, but needs state "
                    "itself"
                )
            kind = int(shard.removeprefix("group").partition(".")[0])
            found.append(Unit(type=kind, source=source, destination=destination, step=step))
    return tuple(sorted(found, key=lambda unit: (unit.type, unit.destination)))


def participants(all_units: Sequence[Unit]) -> list[int]:
    """
    Return the ranks that send or receive, in order.
    """
    return sorted({rank for unit in all_units for rank in (unit.source, unit.destination)})
