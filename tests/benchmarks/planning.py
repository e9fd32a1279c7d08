"""
How long the planner takes for one incident, in milliseconds, for worlds of tp 8, pp 16 and dp as
large as it takes: parameters on all ranks of a (tp, pp) place, optimizer shards with two copies,
one node of eight ranks lost. `offers` is what is chosen from, `repair` who copies what once the new
processes are there, `savers` who would write the last checkpoint instead.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.core.placements import everybody, grid, replaced, terms, without
from tft.core.plan.offers import offers
from tft.core.plan.repair import plan_repair
from tft.core.plan.savers import savers
from tft.core.plan.standing import Standing
from tft.core.plan.topology import Topology

REPLICAS = (8, 78, 781)
"""1,024, 9,984 and 99,968 ranks; 781 is odd, so that the groups are of unequal size."""
NODE = range(8, 16)
ROUNDS = 3


def fastest(call: Callable[[], object]) -> float:
    """
    Milliseconds.
    """
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """
    A world that has lost a node.
    """

    topology: Topology
    healthy: dict[int, Standing]
    lost: dict[int, Standing]
    """With the processes of the node gone."""
    new: dict[int, Standing]
    """With others in their places, which hold nothing yet."""

    @property
    def members(self) -> frozenset[int]:
        """
        All ranks.
        """
        return frozenset(self.healthy)


def lost_node(dp: int) -> Incident:
    """
    The incident, in a world of so many replicas of the model.
    """
    topology = grid(8, 16, dp, copies=2)
    healthy = everybody(len(topology.nodes))
    return Incident(
        topology=topology,
        healthy=healthy,
        lost=without(healthy, NODE),
        new=replaced(healthy, NODE),
    )


def measured(dp: int) -> dict[str, object]:
    """
    The result for one world.
    """
    incident = lost_node(dp)
    topology, members, lost = incident.topology, incident.members, incident.lost
    took = {
        "offers": fastest(lambda: offers(topology, lost, members, terms())),
        "repair": fastest(lambda: plan_repair(topology, incident.new, members, terms())),
        "savers": fastest(lambda: savers(topology, lost, 4, None, spread=True)),
    }
    took["incident"] = took["offers"] + took["repair"]
    return {
        "benchmark": "planning",
        "unit": "ms",
        "ranks": len(members),
        "shards": len(topology.groups),
        **{name: round(value, 1) for name, value in took.items()},
        "limit": 2000,
    }


def main() -> None:
    """
    One line for each world.
    """
    for dp in REPLICAS:
        print(json.dumps(measured(dp)))


if __name__ == "__main__":
    main()
