"""
Find out how every member gets the state of one step: which ranks restore their own copy, and which
ranks fetch which shards from which other ranks. Or all members load a checkpoint.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tft.core.plan.coverage import (
    UNFIT,
    covered_steps,
    held_step,
    listed,
    newest_checkpoint,
    sound,
    unfit,
)
from tft.core.plan.offers import is_saved
from tft.core.plan.standing import Standings, Terms
from tft.core.plan.topology import Topology
from tft.protocol.messages import Source, Transfer

SOURCES = 8
"""The maximum number of ranks from which one rank fetches a shard. More sources do not make the
transfer faster, and each source makes the message with the order longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """
    The way in which every member (rank that takes part in the job) gets the state of one step: by
    restoring a copy, by fetching shards from other ranks, or from a checkpoint.
    """

    step: int | None
    """The step from whose end all members continue. None: the step of the checkpoint that all
    members find and load themselves."""
    restore: tuple[int, ...] = ()
    """The ranks that restore an earlier copy from their own memory."""
    transfers: Mapping[int, tuple[Transfer, ...]] = field(default_factory=dict)
    """By rank: the shards that this rank fetches. Each shard comes with the ranks from which it can
    be fetched."""
    load: str = ""
    """The directory of the checkpoint that all members load. Empty: no checkpoint is loaded."""


def plan_repair(
    topology: Topology, standings: Standings, members: Collection[int], terms: Terms
) -> Repair | str:
    """
    Choose the step that all members continue from, and return how every member gets the state of
    that step. If this is not possible, return a sentence that says why.
    """
    covered = covered_steps(topology.groups, standings, terms.ceiling)
    held = held_step(covered, terms)
    from_disk = newest_checkpoint(terms)
    if from_disk is not None and (isinstance(held, str) or held < from_disk):
        changed = unfit(standings, members, from_disk, terms)
        if changed:
            return f"{UNFIT.format(listed(changed))}; {held}"
        return Repair(step=from_disk, load=terms.checkpoints[from_disk])
    if isinstance(held, str):
        searched = terms.reloads and not is_saved(covered, standings, members, terms)
        return Repair(step=None) if searched else held
    step = held
    restore = tuple(
        rank
        for rank in sorted(members)
        if (standing := standings.get(rank)) is not None
        and not standing.uses(step, terms.ceiling)
        and step in standing.copies(terms.ceiling)
    )
    transfers = _transfers(topology, standings, members, step, terms)
    return Repair(step=step, restore=restore, transfers=transfers)


def _transfers(
    topology: Topology, standings: Standings, members: Collection[int], step: int, terms: Terms
) -> dict[int, tuple[Transfer, ...]]:
    """
    Return which member fetches which shards, and from which ranks. A member fetches each of its
    shards of which it has no usable copy. The copy of a rank that was interrupted in the tail of
    `step` is not usable if another holder of the shard has ended the step. The tail is the code
    between the update and the end of the step.

    A receiver fetches a shard from up to `SOURCES` ranks at once, a part of the bytes from each.
    The load of the senders is balanced. The receivers of one shard take turns over its holders. For
    the next shard, the holders that send the least so far come first.
    """
    plan: dict[int, list[Transfer]] = {}
    load: dict[int, float] = {}
    for shard, ranks in topology.groups.items():
        found = sound(shard, ranks, standings, step, terms.ceiling)
        givers = {holder.rank for holder in found}
        receivers = [rank for rank in ranks if rank in members and rank not in givers]
        if not receivers:
            continue
        holders = sorted(found, key=lambda holder: (load.get(holder.rank, 0.0), holder.rank))
        several = min(SOURCES, len(holders))
        for turn, rank in enumerate(receivers):
            first = turn * several if several < len(holders) else turn
            chosen = [holders[(first + place) % len(holders)] for place in range(several)]
            for holder in chosen:
                load[holder.rank] = load.get(holder.rank, 0.0) + 1 / several
            sources = tuple(Source(rank=h.rank, address=h.address) for h in chosen)
            plan.setdefault(rank, []).append(Transfer(shard=shard, sources=sources))
    return {rank: tuple(plan[rank]) for rank in sorted(plan)}
