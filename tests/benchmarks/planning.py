"""
Measure the planner's time for one incident in milliseconds, for jobs of tp 8, pp 16 and growing dp:
parameters on all ranks of a (tp, pp) place, optimizer shards with two copies, one node of eight
ranks lost. `offers` finds the possible strategies, `repair` plans the transfers to the new
processes, `savers` plans a last checkpoint instead.
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
    Return the shortest time of several calls in milliseconds.
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
    A job that has lost a node.
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
        Return all ranks of the job.
        """
        return frozenset(self.healthy)


def lost_node(dp: int) -> Incident:
    """
    Return the incident in a job with `dp` replicas of the model.
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
    Return the result for one size of the job.
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
    Print one line for each size of the job.
    """
    for dp in REPLICAS:
        print(json.dumps(measured(dp)))


if __name__ == "__main__":
    main()
