"""
Plans of the planner for random placements and losses.
"""

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.placements import ALL, terms
from tft.core.plan.coverage import covered_step
from tft.core.plan.offers import offers
from tft.core.plan.repair import Repair, plan_repair
from tft.core.plan.savers import savers
from tft.core.plan.standing import Standing
from tft.core.plan.topology import Topology, strided

STEPS = st.integers(0, 4)

unhurried = settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.too_slow])
"""A slow example is no failure, because the machine may be busy. In about half of the situations,
no step has all shards."""


@st.composite
def placements(draw: st.DrawFn) -> Topology:
    """
    Draw a topology with several kinds of state, each cut over some ranks in its own way.
    """
    world = draw(st.integers(1, 12))
    groups: dict[str, tuple[int, ...]] = {}
    for kind in range(draw(st.integers(1, 3))):
        ranks = draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True))
        groups |= strided(f"kind{kind}", ranks, draw(st.integers(1, len(ranks))))
    width = draw(st.integers(1, 4))
    return Topology(
        groups=groups,
        columns={
            r: tuple(q for q in range(world) if q // width == r // width) for r in range(world)
        },
        nodes={rank: rank // width for rank in range(world)},
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[Topology, dict[int, Standing], int | None]:
    """
    Draw a topology, the standings of its ranks, and the latest step that may be used.
    """
    topology = draw(placements())
    standings = {
        rank: Standing(
            rank=rank,
            alive=draw(st.sampled_from([True, True, True, False])),
            held=draw(st.one_of(st.none(), STEPS)),
            sound=draw(st.sampled_from([True, True, False])),
            backups=tuple(draw(st.sets(STEPS, max_size=2))),
            strategies=ALL,
        )
        for rank in topology.nodes
    }
    return topology, standings, draw(st.one_of(st.none(), STEPS))


def good(standing: Standing, step: int, ceiling: int | None) -> bool:
    """
    Return whether the rank holds a valid copy of `step`, and `step` is not after `ceiling`.

    The planner has the same rule. This function states it a second time, independently.
    """
    if not standing.alive or (ceiling is not None and step > ceiling):
        return False
    return step in standing.backups or (standing.sound and standing.held == step)


@unhurried
@given(situations())
def test_agreed_step_is_the_highest_step_that_sound_ranks_cover(
    situation: tuple[Topology, dict[int, Standing], int | None],
) -> None:
    """When ranks are at arbitrary steps, then the agreed step is the highest step of which every
    shard has a usable copy. If there is no such step, then there is no agreed step."""
    topology, standings, ceiling = situation
    covered = [
        step
        for step in range(5)
        if all(
            any(good(standings[rank], step, ceiling) for rank in ranks)
            for ranks in topology.groups.values()
        )
    ]
    step = covered_step(topology.groups, standings, ceiling)
    assert step == max(covered) if covered else isinstance(step, str)


@unhurried
@given(situations())
def test_every_member_has_the_agreed_step_after_the_repair(
    situation: tuple[Topology, dict[int, Standing], int | None],
) -> None:
    """When a repair plan exists, then each rank has the agreed step already, restores its own copy,
    or fetches all its shards from usable copies. When no plan exists, then there is no agreed step.
    """
    topology, standings, ceiling = situation
    plan = plan_repair(topology, standings, topology.nodes, terms(ceiling=ceiling))
    if not isinstance(plan, Repair):
        assert isinstance(covered_step(topology.groups, standings, ceiling), str)
        return
    # None means that the ranks load checkpoints of their own, and here no rank has one
    assert plan.step is not None
    for rank, standing in standings.items():
        shards = {shard for shard, ranks in topology.groups.items() if rank in ranks}
        fetched = [part.shard for part in plan.transfers.get(rank, ())]
        if rank in plan.restore:
            assert good(standing, plan.step, ceiling)
            assert not fetched
        elif fetched:
            assert sorted(fetched) == sorted(shards)
        elif shards:
            assert standing.held == plan.step
            assert good(standing, plan.step, ceiling)
    for receiver, parts in plan.transfers.items():
        for part in parts:
            sources = [source.rank for source in part.sources]
            assert len(set(sources)) == len(sources) > 0
            assert receiver not in sources
            assert set(sources) <= set(topology.groups[part.shard])
            assert all(good(standings[source], plan.step, ceiling) for source in sources)


@unhurried
@given(st.integers(1, 40), st.integers(1, 40))
def test_sources_of_one_shard_are_used_equally_often(givers: int, receivers: int) -> None:
    """When some ranks hold a shard and others fetch it, then all holders are sources equally often,
    with a difference of at most one."""
    world = range(givers + receivers)
    standings = {r: Standing(rank=r, held=4 if r < givers else None) for r in world}
    plan = plan_repair(Topology(groups={"a": tuple(world)}), standings, world, terms())
    assert isinstance(plan, Repair)
    given_by = Counter(s.rank for parts in plan.transfers.values() for s in parts[0].sources)
    counts = [given_by[rank] for rank in range(givers)]
    assert max(counts) - min(counts) <= 1


@unhurried
@given(st.integers(1, 12), st.integers(1, 40))
def test_sources_of_many_shards_are_used_equally_often(givers: int, shards: int) -> None:
    """When one rank fetches many shards that the same ranks hold, then all holders give equally
    many shards, with a difference of at most one."""
    topology = Topology(groups={f"s{n}": tuple(range(givers + 1)) for n in range(shards)})
    standings = {r: Standing(rank=r, held=4 if r < givers else None) for r in range(givers + 1)}
    plan = plan_repair(topology, standings, range(givers + 1), terms())
    assert isinstance(plan, Repair)
    load: Counter[int] = Counter(
        source.rank for part in plan.transfers[givers] for source in part.sources
    )
    counts = [load[rank] for rank in range(givers)]
    assert max(counts) - min(counts) <= 1


@unhurried
@given(situations(), st.booleans())
def test_every_shard_is_saved_once_by_a_sound_holder(
    situation: tuple[Topology, dict[int, Standing], int | None], spread: bool
) -> None:
    """When a last checkpoint is planned, then each shard is written exactly once, by a rank with a
    usable copy."""
    topology, standings, ceiling = situation
    step = covered_step(topology.groups, standings, ceiling)
    if isinstance(step, str):
        return  # a shard has no sound copy, so no checkpoint can be planned
    plan = savers(topology, standings, step, ceiling, spread=spread)
    written = [shard for shards in plan.values() for shard in shards]
    assert sorted(written) == sorted(topology.groups)
    for rank, shards in plan.items():
        assert good(standings[rank], step, ceiling)
        assert all(rank in topology.groups[shard] for shard in shards)


@unhurried
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 30))
def test_savers_are_spread_evenly_when_every_rank_has_every_shard(
    nodes: int, width: int, shards: int
) -> None:
    """When every rank holds every shard, then all nodes write equally many shards, with a
    difference of at most one. The same is true for the ranks of one node."""
    world = range(nodes * width)
    topology = Topology(
        groups={f"s{n}": tuple(world) for n in range(shards)},
        nodes={rank: rank // width for rank in world},
    )
    standings = {rank: Standing(rank=rank, held=4) for rank in world}
    plan = savers(topology, standings, 4, None, spread=True)
    load = {rank: len(plan.get(rank, ())) for rank in world}
    by_node = [sum(load[r] for r in world if r // width == n) for n in range(nodes)]
    assert max(by_node) - min(by_node) <= 1
    for node in range(nodes):
        own = [load[rank] for rank in world if rank // width == node]
        assert max(own) - min(own) <= 1


@unhurried
@given(situations(), st.data())
def test_every_offered_strategy_can_be_carried_out(
    situation: tuple[Topology, dict[int, Standing], int | None], data: st.DataObject
) -> None:
    """When a strategy is offered, then it has a step and a reason, all shards have a usable copy,
    and no rank that stays is lost. When a strategy is ruled out, then a message says why."""
    topology, standings, ceiling = situation
    ranks = st.frozensets(st.sampled_from(sorted(topology.nodes)))
    members = data.draw(ranks) | {data.draw(st.sampled_from(sorted(topology.nodes)))}
    what = terms(ceiling=ceiling, faulty=data.draw(ranks), successors=data.draw(ranks))
    made = {offer.strategy: offer for offer in offers(topology, standings, members, what)}
    lost = {rank for rank in members if not standings[rank].alive}
    for offer in made.values():
        assert offer.why if offer.why_not is None else offer.why_not
        assert set(offer.leaving) | set(offer.replace) <= members
        assert offer.why_not is not None or offer.strategy == "exit" or offer.step is not None
    assert made["exit"].why_not is None
    assert not lost or made["retry"].why_not
    leaving = set(made["scale_in"].leaving)
    assert made["scale_in"].why_not or (lost <= leaving < members)
    assert leaving <= topology.columns_of(lost)
    if made["recover"].why_not is None:
        kept = {r: s for r, s in standings.items() if r not in made["recover"].replace}
        assert covered_step(topology.groups, kept, ceiling) == made["recover"].step
