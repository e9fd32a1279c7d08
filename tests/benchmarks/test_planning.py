"""
Tests that the plan which `planning` measures is correct.
"""

from tests.benchmarks.planning import NODE, REPLICAS, lost_node
from tests.core.placements import replaced, terms
from tft.core.plan.offers import offers
from tft.core.plan.repair import SOURCES, Repair, plan_repair


def test_the_plan_repairs_a_lost_node_of_a_hundred_thousand_ranks() -> None:
    """When 99,968 ranks of tp 8, pp 16 and dp 781 lose a node of eight, then each of the eight
    fetches its parameters from eight replicas, and its optimizer shard from its other holders: one,
    or two where 781 by two leaves one over. No other rank fetches state."""
    incident = lost_node(REPLICAS[-1])
    topology, healthy, members = incident.topology, incident.healthy, incident.members
    assert len(members) == 99_968
    made = {o.strategy: o for o in offers(topology, incident.lost, members, terms())}
    assert made["recover"].why_not is None
    assert made["scale_in"].leaving == tuple(range(128))
    for first, copies in ((NODE[0], 2), (128 + NODE[0], 1)):
        ranks = range(first, first + len(NODE))
        plan = plan_repair(topology, replaced(healthy, ranks), members, terms())
        assert isinstance(plan, Repair)
        assert plan.transfers.keys() == set(ranks)
        for rank, parts in plan.transfers.items():
            parameters, state = ([source.rank for source in part.sources] for part in parts)
            assert len(set(parameters)) == SOURCES
            assert len(state) == copies
            assert {source % 128 for source in (*parameters, *state)} == {rank % 128}
