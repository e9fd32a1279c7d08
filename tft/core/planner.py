"""
Which step can be agreed on, who copies what from whom, who saves what. Pure functions of who
holds which shard at which step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tft.protocol.messages import Source, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """
    A live rank, and what it says it holds.
    """

    rank: int
    address: str
    """Where its shards can be fetched."""
    held: int | None
    """The step whose whole state it has; None while it is torn or new."""
    trusted: bool
    """No fault has touched its memory."""


Groups = Mapping[str, Sequence[int]]
"""Shard to the ranks that hold a copy of it: the shard groups."""


def agreed_step(groups: Groups, holders: Mapping[int, Holder]) -> int | str:
    """
    The highest step at which every shard has a trusted holder, or the sentence why there is none.

    By coverage, not by maximum: a rank that is ahead alone does not set the step, and a faulty
    one never does.
    """
    common: set[int] | None = None
    for shard, ranks in groups.items():
        steps = {
            held
            for rank in ranks
            if (holder := holders.get(rank)) is not None
            and holder.trusted
            and (held := holder.held) is not None
        }
        if not steps:
            return f"no sound copy of shard {shard!r} is left on ranks {list(ranks)}"
        common = steps if common is None else common & steps
    if common is None:
        return "no rank has said what it holds"
    if not common:
        return "no step is held whole: the copies that are left are of different steps"
    return max(common)


def sound(shard_ranks: Sequence[int], holders: Mapping[int, Holder], step: int) -> list[Holder]:
    """
    The trusted holders of a shard at `step`, by rank.
    """
    return [
        holders[rank]
        for rank in sorted(shard_ranks)
        if rank in holders and holders[rank].trusted and holders[rank].held == step
    ]


def transfers(
    groups: Groups, holders: Mapping[int, Holder], step: int
) -> dict[int, tuple[Transfer, ...]]:
    """
    For each rank that is not a trusted holder at `step`: what it has to fetch, and from whom.

    Every source can serve every byte; the first source differs from one receiver to the next, so
    that several receivers do not all begin with the same one.
    """
    plan: dict[int, list[Transfer]] = {}
    for shard, ranks in groups.items():
        sources = sound(ranks, holders, step)
        good = {holder.rank for holder in sources}
        needy = [rank for rank in sorted(ranks) if rank in holders and rank not in good]
        for turn, rank in enumerate(needy):
            first = turn % len(sources)
            rotated = sources[first:] + sources[:first]
            plan.setdefault(rank, []).append(
                Transfer(
                    shard=shard,
                    sources=tuple(Source(rank=s.rank, address=s.address) for s in rotated),
                )
            )
    return {rank: tuple(parts) for rank, parts in plan.items()}


def savers(groups: Groups, holders: Mapping[int, Holder], step: int) -> dict[int, tuple[str, ...]]:
    """
    Each shard to exactly one rank: the lowest-placed trusted holder at `step`.
    """
    plan: dict[int, list[str]] = {}
    for shard, ranks in groups.items():
        plan.setdefault(sound(ranks, holders, step)[0].rank, []).append(shard)
    return {rank: tuple(shards) for rank, shards in plan.items()}
