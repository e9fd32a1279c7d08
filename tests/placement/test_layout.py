"""
The derivation of shard groups from the sizes of a job's parallelism, with possible losses and the
cost of copies.
"""

from collections import Counter
from collections.abc import Collection
from itertools import combinations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.core.placements import everybody, fetched, replaced, terms, without
from tft.core.plan.coverage import covered_step
from tft.core.plan.repair import plan_repair
from tft.core.plan.savers import savers
from tft.core.plan.topology import Topology
from tft.errors import UsageError
from tft.placement.layout import DIMENSIONS, MEGATRON, WORLD, Layout, Scheme, report_lines, topology
from tft.placement.memory_cost import Gradients, bytes_per_rank, cost
from tft.placement.redundancy import (
    Survival,
    of_nodes,
    of_ranks,
    pairs_in_words,
    shortened,
    stretches,
)

MINDSPORE = Scheme(name="MindSpore", cuts_parameters=True, experts_as_dense=True)

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no fault of a layout."""


def groups(layout: Layout, kind: str) -> list[tuple[int, ...]]:
    """
    Return the shard groups of one kind of state: the ranks that hold each shard.
    """
    [found] = [state for state in layout.states() if state.kind == kind]
    return list(found.groups.values())


# ---------------------------------------------------------------- the documented cases of MindIO


def test_eight_ranks_with_optimizer_shards_of_four() -> None:
    """When dp is 8 and the optimizer state is cut into four, then ranks that are four apart hold
    the same shard. Without rank 1, ranks 0, 2, 3 and 5 save."""
    placed = topology(Layout(dp=8, shards=4))
    assert placed.groups == {
        "dense": tuple(range(8)),
        "optimizer.0": (0, 4),
        "optimizer.1": (1, 5),
        "optimizer.2": (2, 6),
        "optimizer.3": (3, 7),
    }
    left = without(everybody(8), [1])
    assert savers(placed, left, 4, None, spread=False).keys() == {0, 2, 3, 5}
    assert "rank:4, report group list: [0, 4]" in report_lines(placed)


def test_two_replicas_of_four_tensor_ranks() -> None:
    """When dp is 2 and tp is 4 without optimizer parallelism, then the replica of a rank is the
    rank four further on."""
    layout = Layout(dp=2, tp=4)
    pairs = [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups(layout, "dense") == groups(layout, "optimizer") == pairs
    assert topology(layout).groups["optimizer.tensor2"] == (2, 6)


def test_four_replicas_of_two_tensor_ranks_with_optimizer_shards_of_two() -> None:
    """When dp is 4, tp is 2 and the optimizer state is cut into two, then each shard has two
    holders with the same tensor rank."""
    layout = Layout(dp=4, tp=2, shards=2)
    assert groups(layout, "dense") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert topology(layout).groups["optimizer.tensor1.0"] == (1, 5)
    assert groups(layout, "optimizer") == [(0, 4), (2, 6), (1, 5), (3, 7)]


def test_experts_have_their_own_groups() -> None:
    """When four experts are on eight ranks and rank 5 is lost, then its optimizer state comes from
    rank 1, which has the same expert."""
    layout = Layout(dp=8, ep=4, shards=4)
    assert groups(layout, "expert") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    plan = fetched(plan_repair(topology(layout), replaced(everybody(8), [5]), range(8), terms()))
    assert plan[5]["optimizer.1"] == plan[5]["expert.1"] == plan[5]["expert_optimizer.1"] == [1]


def test_coordinates_contain_the_expert_index_of_a_rank() -> None:
    """When dp is 4, tp is 2 and ep is 2, then ranks 0, 1, 4 and 5 have expert index 0. Ranks 2, 3,
    6 and 7 have expert index 1."""
    layout = Layout(dp=4, tp=2, ep=2)
    assert layout.coordinates(6) == {"tp": 0, "cp": 0, "ep": 1, "dp": 3, "pp": 0}
    assert [layout.coordinates(rank)["ep"] for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_expert_state_on_four_ranks_has_two_copies() -> None:
    """When an expert is on four ranks and the dense optimizer state has two copies, then the expert
    state has two copies too. Context-parallel ranks count."""
    layout = Layout(dp=4, cp=2, ep=2, shards=4)
    assert groups(layout, "expert") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert topology(layout).groups["expert_optimizer.1.0"] == (1, 5)
    assert Counter(map(len, groups(layout, "expert_optimizer"))) == {2: 4}


def test_replicas_are_farthest_apart_in_order_tp_cp_ep_pp_dp() -> None:
    """When ranks are counted in the order tp-cp-ep-pp-dp, then the replicas are the farthest apart."""
    layout = Layout(dp=2, tp=2, pp=2, order=("tp", "cp", "ep", "pp", "dp"))
    assert topology(layout).groups["dense.stage1.tensor0"] == (2, 6)
    assert layout.coordinates(6) == {"tp": 0, "cp": 0, "ep": 0, "dp": 1, "pp": 1}


def test_mindspore_cuts_parameters_with_their_optimizer_state() -> None:
    """When MindSpore cuts the state, then only parameters below the threshold are whole on a rank."""
    cut = Layout(dp=4, tp=2, shards=2, scheme=MINDSPORE, threshold_kb=64)
    assert groups(cut, "small") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert groups(cut, "optimizer") == groups(Layout(dp=4, tp=2, shards=2), "optimizer")
    assert [state.kind for state in cut.states()] == ["small", "optimizer"]
    everything = Layout(dp=4, shards=2, scheme=MINDSPORE)
    assert [state.kind for state in everything.states()] == ["optimizer"]
    whole = Layout(dp=2, scheme=MINDSPORE, threshold_kb=64)
    assert [state.kind for state in whole.states()] == ["dense", "optimizer"]


def test_mindspore_cuts_experts_into_as_many_shards() -> None:
    """When experts are on four ranks each and the shard size is 2, then each shard of an expert is
    on two ranks, and each dense shard on four."""
    layout = Layout(dp=8, ep=2, shards=2, scheme=MINDSPORE)
    assert groups(layout, "optimizer") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert groups(layout, "expert_optimizer") == [(0, 4), (2, 6), (1, 5), (3, 7)]
    fewer = Layout(dp=12, ep=2, shards=3, scheme=MINDSPORE)
    assert (fewer.dense_copies, fewer.expert_copies) == (4, 2)


# ---------------------------------------------------------------- refused sizes

COUNTED_STAGES_FIRST = ("tp", "cp", "ep", "pp", "dp")


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            {"dp": 2, "shards": 2},
            "no replica: a dense data-parallel group has 2 ranks (dp 2 * cp 1), and each of its "
            "2 optimizer shards is held by one rank only; without optimizer shards each rank "
            "holds all of it",
        ),
        (
            {"dp": 8, "shards": 8},
            "no replica: a dense data-parallel group has 8 ranks (dp 8 * cp 1), and each of its "
            "8 optimizer shards is held by one rank only; possible: 2, 4",
        ),
        (
            {"tp": 8},
            "no replica: a dense data-parallel group has 1 rank (dp 1 * cp 1), and no other rank "
            "holds the same state: choose a larger dp",
        ),
        (
            {"dp": 8, "shards": 3},
            "a dense data-parallel group has 8 ranks (dp 8 * cp 1), which cannot be divided into 3 "
            "optimizer shards of equal size; possible: 2, 4",
        ),
        (
            {"dp": 5040, "shards": 11},
            "a dense data-parallel group has 5040 ranks (dp 5040 * cp 1), which cannot be divided "
            "into 11 optimizer shards of equal size; possible: 2, 3, 4, 5, 6, 7, 8, 2520",
        ),
        (
            {"dp": 1024, "shards": 3},
            "a dense data-parallel group has 1024 ranks (dp 1024 * cp 1), which cannot be divided "
            "into 3 optimizer shards of equal size; possible: 2, 4, 8, 16, 32, 64, 128, 512",
        ),
        (
            {"dp": 48, "shards": 5},
            "a dense data-parallel group has 48 ranks (dp 48 * cp 1), which cannot be divided "
            "into 5 optimizer shards of equal size; possible: 2, 3, 4, 6, 8, 12, 16, 24",
        ),
        (
            {"dp": 8, "ep": 3},
            "experts cannot be spread over ep 3 of the 8 ranks of a dense data-parallel group "
            "(dp 8 * cp 1): ep must divide the number of these ranks",
        ),
        (
            {"dp": 8, "ep": 8},
            "no replica: an expert data-parallel group has 1 rank (8 / ep 8), and no other rank "
            "holds the same state: choose a smaller ep",
        ),
        (
            {"dp": 12, "ep": 4, "shards": 6},
            "an expert data-parallel group has 3 ranks (12 / ep 4), which cannot be divided by "
            "2, the number of copies of the dense part's optimizer state: choose another number "
            "of optimizer shards",
        ),
        (
            {"dp": 12, "ep": 2, "shards": 3},
            "an expert data-parallel group has 6 ranks (12 / ep 2), which cannot be divided by "
            "4, the number of copies of the dense part's optimizer state: choose another number "
            "of optimizer shards",
        ),
        (
            {"dp": 8, "ep": 4, "shards": 4, "scheme": MINDSPORE},
            "an expert data-parallel group has 2 ranks (8 / ep 4), which cannot be divided into 4 "
            "shards; MindSpore then shards over all ranks of the group, and no shard has a replica",
        ),
        (
            {"dp": 8, "ep": 2, "shards": 4, "scheme": MINDSPORE},
            "no replica: an expert data-parallel group has 4 ranks (8 / ep 2), and each of its 4 "
            "optimizer shards is held by one rank only: choose fewer optimizer shards",
        ),
        (
            {"dp": 4, "pp": 2, "ep": 2, "order": COUNTED_STAGES_FIRST},
            "with the order of dimensions tp-cp-ep-pp-dp, the pipeline stages of experts (ep 2) "
            "have other ranks than the stages of the dense part (cp 1): put pp last in the order",
        ),
        ({"dp": 0}, "dp must be at least 1, not 0"),
        ({"dp": 2, "ep": -1}, "ep must be at least 1, not -1"),
        ({"dp": 2, "shards": 0}, "optimizer shards must be at least 1, not 0"),
        ({"dp": 10**9}, "a job has at most 1000000 ranks, not 1000000000"),
        (
            {"dp": 2, "order": ("tp", "dp")},
            "the order of the dimensions must name each of tp, cp, ep, dp, pp once, as in "
            "tp-cp-ep-dp-pp, not tp-dp",
        ),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, object], sentence: str) -> None:
    """When the sizes do not fit together, or some state has no replica, then `Layout` raises
    `UsageError` with the reason."""
    with pytest.raises(UsageError) as refused:
        Layout(**sizes)  # type: ignore[arg-type] # the fields have different types
    assert str(refused.value) == sentence


@pytest.mark.parametrize("ranks", [0, -2, 3, 16])
def test_ranks_that_do_not_fill_the_nodes_are_refused(ranks: int) -> None:
    """When the ranks do not fill nodes of the given size, then `topology` raises `UsageError`."""
    with pytest.raises(UsageError, match=f"8 ranks do not fill nodes of {ranks} ranks each"):
        topology(Layout(dp=8), ranks)


def test_nodes_of_one_rank_and_the_largest_job_are_accepted() -> None:
    """When nodes have one rank each, or a job has the maximum of 1,000,000 ranks, then the layout
    is accepted."""
    assert topology(Layout(dp=2), 1).nodes == {0: 0, 1: 1}
    assert Layout(dp=WORLD).world == 1_000_000


def test_stages_may_be_counted_before_dp_when_ep_equals_cp() -> None:
    """When ep equals cp, or there is only one pipeline stage, then the order tp-cp-ep-pp-dp is
    accepted for a layout with experts."""
    layout = Layout(dp=4, cp=2, pp=2, ep=2, order=COUNTED_STAGES_FIRST)
    assert groups(layout, "expert")[0] == (0, 4, 8, 12)
    one_stage = Layout(dp=4, ep=2, order=COUNTED_STAGES_FIRST)
    assert groups(one_stage, "expert") == [(0, 2), (1, 3)]


# ---------------------------------------------------------------- report lines


def test_report_lists_the_smallest_groups_of_each_rank() -> None:
    """When a rank holds several shards, then the report lists for this rank the groups with the
    fewest holders, each group once."""
    placed = Topology(groups={"a": (9, 1, 8), "b": (8, 1), "c": (1, 8), "d": (1, 3)})
    assert list(report_lines(placed)) == [
        "rank:1, report group list: [1, 8]",
        "rank:1, report group list: [1, 3]",
        "rank:3, report group list: [1, 3]",
        "rank:8, report group list: [1, 8]",
        "rank:9, report group list: [1, 8, 9]",
    ]


def test_pairs_are_listed_by_their_distance() -> None:
    """When many pairs cannot be lost together, then one line lists those with the same distance."""
    pairs = [(0, 4), (1, 5), (2, 6), (8, 12), (1, 3)]
    assert pairs_in_words(pairs, "rank", None) == [
        "ranks 1 and 3",
        "ranks 0-2, 8, each with the rank 4 further on",
    ]
    assert (
        pairs_in_words(pairs, "node", 1)[1]
        == "nodes 0-2, … 1 more, each with the node 4 further on"
    )
    assert stretches([]) == []
    assert shortened(["0-2", "8"], 2) == shortened(["0-2", "8"], None) == "0-2, 8"


# ---------------------------------------------------------------- losses that a layout survives


def test_node_with_both_copies_cannot_be_lost() -> None:
    """When all copies of a shard are on one node, then this node cannot be lost. When they are on
    two nodes, then only this pair cannot be lost together."""
    layout = Layout(dp=4, tp=2)
    assert of_nodes(topology(layout, 4)) == Survival(alone={}, pairs={(0, 1): "dense.tensor0"})
    within = of_nodes(topology(Layout(dp=2, tp=4, order=("dp", "cp", "ep", "tp", "pp")), 2))
    assert within.alone == {node: f"dense.tensor{node}" for node in range(4)}
    assert within.pairs == {}


def test_losses_are_listed_in_order() -> None:
    """When several ranks or pairs of ranks cannot be lost, then they are listed in ascending order,
    each with a shard that would be lost."""
    placed = Topology(groups={"a": (5,), "b": (2,), "c": (4, 3), "d": (1, 0), "e": (5, 0)})
    survival = of_ranks(placed)
    assert list(survival.alone.items()) == [(2, "b"), (5, "a")]
    assert list(survival.pairs.items()) == [((0, 1), "d"), ((3, 4), "c")]


def test_pairs_of_a_hundred_thousand_ranks_are_found() -> None:
    """When a job has a hundred thousand ranks, then the pairs that cannot be lost together are
    found without trying all five thousand million pairs."""
    placed = topology(Layout(dp=200, tp=8, pp=64, shards=100), 8)
    ranks, nodes = of_ranks(placed), of_nodes(placed)
    assert (len(ranks.pairs), len(nodes.pairs)) == (51_200, 6_400)
    assert ranks.alone == nodes.alone == {}
    [line] = pairs_in_words(ranks.pairs, "rank", 2)
    assert line == "ranks 0-799, 1600-2399, … 62 more, each with the rank 800 further on"


def survives(placed: Topology, lost: Collection[int], world: int) -> bool:
    """
    Return whether the planner finds a complete step after the loss of these ranks.
    """
    return isinstance(covered_step(placed.groups, without(everybody(world), lost)), int)


def agrees(survival: Survival, placed: Topology, sets: list[set[int]]) -> bool:
    """
    Return whether the planner confirms `survival` for the loss of each rank set and of each pair of
    sets.
    """
    world = sum(map(len, sets))
    alone = {one for one, ranks in enumerate(sets) if not survives(placed, ranks, world)}
    together = {
        (one, other)
        for one, other in combinations(range(len(sets)), 2)
        if not {one, other} & alone and not survives(placed, sets[one] | sets[other], world)
    }
    return survival.alone.keys() == alone and survival.pairs.keys() == together


@st.composite
def scattered(draw: st.DrawFn) -> tuple[Topology, int, int]:
    """
    Draw a topology with shards on random ranks of a few nodes.

    Return the topology, the number of ranks, and the number of ranks per node.
    """
    width, several = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    world = width * several
    anywhere = st.lists(st.integers(0, world - 1), min_size=1, max_size=4, unique=True)
    held = draw(st.lists(anywhere, min_size=1, max_size=6))
    placed = Topology(
        groups={str(place): tuple(ranks) for place, ranks in enumerate(held)},
        nodes={rank: rank // width for rank in range(world)},
    )
    return placed, world, width


@given(scattered())
@unhurried
def test_listed_losses_agree_with_the_planner(
    drawn: tuple[Topology, int, int],
) -> None:
    """When one or two ranks or nodes of a random placement are lost, then the planner finds a step
    exactly if the loss is not listed."""
    placed, world, width = drawn
    assert agrees(of_ranks(placed), placed, [{rank} for rank in range(world)])
    nodes = [set(range(first, first + width)) for first in range(0, world, width)]
    assert agrees(of_nodes(placed), placed, nodes)


# ---------------------------------------------------------------- random layouts of small jobs


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """
    Draw a valid layout of a small job.
    """
    size = st.sampled_from((1, 2, 3, 4, 6, 8))
    sizes = {name: draw(size) for name in ("dp", "cp", "ep", "shards")}
    few = {name: draw(st.integers(1, 3)) for name in ("tp", "pp")}
    order = draw(st.sampled_from([DIMENSIONS, COUNTED_STAGES_FIRST]) | st.permutations(DIMENSIONS))
    try:
        layout = Layout(
            **sizes,
            **few,
            order=tuple(order),
            scheme=draw(st.sampled_from([MEGATRON, MINDSPORE])),
            threshold_kb=draw(st.sampled_from((0, 64))),
        )
    except UsageError:
        assume(False)
        raise
    return layout


lasting = settings(unhurried, suppress_health_check=list(HealthCheck))
"""Many sizes are refused."""


@given(layouts())
@lasting
def test_every_rank_is_in_one_group_of_each_kind_of_state(layout: Layout) -> None:
    """When a layout has a kind of state, then every rank holds one shard of it, with at least two
    copies. All holders have the same stage, and the same tensor rank or expert."""
    for state in layout.states():
        ranks = [rank for group in state.groups.values() for rank in group]
        assert sorted(ranks) == list(range(layout.world))
        assert {len(group) for group in state.groups.values()} == {state.copies}
        assert state.copies > 1
        expert = state.kind.startswith("expert")
        for group in state.groups.values():
            assert list(group) == sorted(group)
            at = [layout.coordinates(rank) for rank in group]
            assert len({each["pp"] for each in at}) == 1
            if expert:
                assert len({each["ep"] for each in at}) == 1
            else:
                assert len({each["tp"] for each in at}) == 1


@given(layouts())
@lasting
def test_number_of_copies_follows_from_the_number_of_shards(layout: Layout) -> None:
    """When the optimizer state is cut, then the number of copies times the number of shards is dp
    times cp. Every rank has its own coordinates."""
    kinds = {state.kind: state for state in layout.states()}
    assert len(kinds["optimizer"].groups) == layout.shards * layout.tp * layout.pp
    assert kinds["optimizer"].copies * layout.shards == layout.dp * layout.cp
    assert ("expert_optimizer" in kinds) == (layout.ep > 1)
    dense = {
        tuple(at[name] for name in ("tp", "cp", "dp", "pp"))
        for at in map(layout.coordinates, range(layout.world))
    }
    assert len(dense) == layout.world


@given(layouts())
@settings(lasting, max_examples=40)
def test_any_single_rank_of_an_accepted_layout_can_be_lost(layout: Layout) -> None:
    """When a layout is accepted, then any one rank can be lost, and so can any pair that is not
    listed."""
    assume(layout.world <= 24)
    placed = topology(layout)
    assert of_ranks(placed).alone == {}
    assert agrees(of_ranks(placed), placed, [{rank} for rank in range(layout.world)])


# ---------------------------------------------------------------- memory cost of copies


@pytest.mark.parametrize(
    ("copies", "half", "single"),
    [
        (8, 20.0, 18.0),
        (1, 4 + 16 / 8, 6 + 12 / 8),
        (2, 4 + 32 / 8, 6 + 24 / 8),
        (4, 4 + 64 / 8, 6 + 48 / 8),
    ],
)
def test_memory_of_a_parameter_follows_the_formulas(
    copies: int, half: float, single: float
) -> None:
    """When eight ranks hold several copies of Adam's state, then the bytes per parameter on each
    rank match the formula. The cost of the copies is the difference from one copy."""
    for gradients, total in ((Gradients.HALF, half), (Gradients.SINGLE, single)):
        assert cost(gradients, 8, copies).total == total
        assert cost(gradients, 8, copies).added == total - cost(gradients, 8, 1).total


def test_formula_shows_the_whole_and_the_cut_part() -> None:
    """When the state is not cut, then the formula has one number. Otherwise it has the whole part
    and the cut part."""
    assert cost(Gradients.HALF, 8, 8).formula == "20"
    assert cost(Gradients.HALF, 8, 2).formula == "4 + 32/8"
    assert cost(Gradients.SINGLE, 8, 2).formula == "6 + 24/8"


def test_rank_needs_its_share_of_the_model() -> None:
    """When a model has 16 dense and 16 expert parameters, with tp 2, pp 2 and ep 2, then a rank has
    4 dense and 2 expert parameters."""
    layout = Layout(dp=4, tp=2, pp=2, ep=2, shards=2)
    dense, expert = 4 + 32 / 4, 20
    assert bytes_per_rank(layout, Gradients.HALF, 32, 16) == (4 * dense + 2 * expert, 4 * 4 + 2 * 8)
