"""
Find the single ranks or nodes whose loss would lose state, and the pairs of ranks or nodes that
must not be lost together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tft.core.plan.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """
    The ranks or nodes whose loss would lose state, each with the name of a shard that would be
    lost. Every rank or node that is not in `alone` can be lost by itself without loss of state.
    Every pair of such ranks or nodes that is not in `pairs` can be lost together.
    """

    alone: Mapping[int, str]
    """The ranks or nodes that hold the only copies of a shard."""
    pairs: Mapping[tuple[int, int], str]
    """Pairs of ranks or nodes that together hold the only copies of a shard. Either of the two can
    be lost alone."""


def of_ranks(topology: Topology) -> Survival:
    """
    Return which losses of one rank or of two ranks would lose state.
    """
    return _survival((shard, set(ranks)) for shard, ranks in topology.groups.items())


def of_nodes(topology: Topology) -> Survival:
    """
    Return which losses of one node or of two nodes, with all their ranks, would lose state.
    `topology` must have the node of every rank.
    """
    nodes = topology.nodes
    return _survival(
        (shard, {nodes[rank] for rank in ranks}) for shard, ranks in topology.groups.items()
    )


def _survival(held: Iterable[tuple[str, set[int]]]) -> Survival:
    """
    Return which holders of shards must not be lost, alone or as a pair. `held` lists each shard
    with its holders (ranks or nodes). Ignore shards with more than two holders, because such a
    shard survives the loss of any two holders.
    """
    alone: dict[int, str] = {}
    pairs: dict[tuple[int, int], str] = {}
    for shard, holders in held:
        if len(holders) == 1:
            alone.setdefault(min(holders), shard)
        elif len(holders) == 2:
            pairs.setdefault((min(holders), max(holders)), shard)
    return Survival(
        alone=dict(sorted(alone.items())),
        pairs={
            pair: shard
            for pair, shard in sorted(pairs.items())
            if pair[0] not in alone and pair[1] not in alone
        },
    )


def stretches(numbers: Sequence[int]) -> list[str]:
    """
    Return sorted numbers as a list of ranges: `["0-3", "7"]` for 0, 1, 2, 3 and 7.
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in found]


def pairs_in_words(pairs: Iterable[tuple[int, int]], what: str, most: int | None) -> list[str]:
    """
    Return texts that describe pairs of ranks or nodes. Pairs whose two numbers have the same
    difference share one text, such as `ranks 0-3, each with the rank 4 further on`. `what` is
    `rank` or `node`. A text names at most `most` ranges of numbers; None means all.
    """
    firsts: dict[int, list[int]] = {}
    for first, second in pairs:
        firsts.setdefault(second - first, []).append(first)
    return [
        f"{what}s {begin[0]} and {begin[0] + apart}"
        if len(begin) == 1
        else f"{what}s {shortened(stretches(begin), most)}, each with the {what} {apart} further on"
        for apart, begin in sorted(firsts.items())
    ]


def shortened(words: Sequence[str], most: int | None) -> str:
    """
    Return the list `words` as text for a message. The text names at most `most` items and gives the
    number of the remaining items. If `most` is None, the text names all items.
    """
    if most is None or len(words) <= most:
        return ", ".join(words)
    return f"{', '.join(words[:most])}, … {len(words) - most} more"
