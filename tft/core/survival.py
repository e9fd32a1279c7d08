"""
What can be lost at once without losing state: which ranks or nodes cannot be lost alone, and which
two cannot be lost together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tft.core.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """
    The ranks, or the nodes, that hold all there is of something; each with a shard that is lost
    with them. Whatever is not named here can be lost, alone or as one of two.
    """

    alone: Mapping[int, str]
    pairs: Mapping[tuple[int, int], str]
    """Of those that can be lost alone: the two that hold all copies of a shard between them."""


def of_ranks(topology: Topology) -> Survival:
    """
    What becomes of the state when one rank is lost, or two.
    """
    return _survival((shard, set(ranks)) for shard, ranks in topology.groups.items())


def of_nodes(topology: Topology) -> Survival:
    """
    What becomes of the state when one node is lost with all its ranks, or two. The topology has to
    know the node of every rank.
    """
    nodes = topology.nodes
    return _survival(
        (shard, {nodes[rank] for rank in ranks}) for shard, ranks in topology.groups.items()
    )


def _survival(held: Iterable[tuple[str, set[int]]]) -> Survival:
    """
    Only a shard with one holder, or with two, makes a difference: so this takes as long as it takes
    to read the groups, and no longer.
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
    Sorted numbers in short: `0-3`, `7`.
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
    Pairs by how far apart they are, which is mostly the same for all of them: `ranks 0-3, each with
    the rank 4 further on`. What is paired is a `rank` or a `node`.
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
    A list for a sentence, of which the rest is counted.
    """
    if most is None or len(words) <= most:
        return ", ".join(words)
    return f"{', '.join(words[:most])}, … {len(words) - most} more"
