"""
Find the step from which all members of a job can continue, and the ranks that hold each shard as it
was at the end of that step. The members are the ranks that take part in the job.
"""

from collections.abc import Iterable, Mapping, Sequence

from tft.core.plan.standing import NOTHING, Standing, Standings, Terms
from tft.core.plan.topology import Topology


def covered_step(
    groups: Mapping[str, Sequence[int]], standings: Standings, ceiling: int | None = None
) -> int | str:
    """
    Return the highest step for which a sound copy of every shard exists. If there is no such step,
    return a sentence that says why.

    A copy is the state with which a rank trains, or an earlier copy that a rank keeps in memory. It
    is sound if no fault has touched it. Copies of steps later than `ceiling` do not count. A single
    rank that is ahead of the other ranks does not set the step, because every shard must have a
    copy of the step.
    """
    steps = covered_steps(groups, standings, ceiling)
    return steps if isinstance(steps, str) else max(steps)


def covered_steps(
    groups: Mapping[str, Sequence[int]], standings: Standings, ceiling: int | None
) -> frozenset[int] | str:
    """
    Return all steps for which a sound copy (one that no fault has touched) of every shard exists.
    If there is no such step, return a sentence that says why.
    """
    copies = {rank: standing.copies(ceiling) for rank, standing in standings.items()}
    common: frozenset[int] | None = None
    for shard, ranks in groups.items():
        steps = NOTHING.union(*{copies.get(rank, NOTHING) for rank in ranks})
        if any(standings[r].outrun or standings[r].passed_over for r in ranks if r in standings):
            steps = frozenset(s for s in steps if sound(shard, ranks, standings, s, ceiling))
        if not steps:
            before = "" if ceiling is None else f", of step {ceiling} or earlier,"
            return f"no sound copy of shard {shard!r}{before} is left on ranks {listed(ranks)}"
        common = steps if common is None else common & steps
    if common is None:
        return "no rank has reported which shards it holds"
    if not common:
        return "no step is complete: the copies that are left are of different steps"
    return common


def agreed_step(topology: Topology, standings: Standings, terms: Terms) -> int | str:
    """
    Return the step from which all members can continue: the highest step for which a sound copy of
    every shard exists in memory, or the step of a checkpoint if that step is later. If there is no
    such step, return a sentence that says why.
    """
    return agreed(covered_steps(topology.groups, standings, terms.ceiling), terms)


def agreed(steps: frozenset[int] | str, terms: Terms) -> int | str:
    step, from_disk = held_step(steps, terms), newest_checkpoint(terms)
    if from_disk is None:
        return step
    return max(step, from_disk) if isinstance(step, int) else from_disk


def held_step(steps: frozenset[int] | str, terms: Terms) -> int | str:
    """
    Return the highest of `steps` for which every rank has its rank-local state (generators, data
    position), or can get it. If there is no such step, return a sentence that says why. `steps` is
    the result of `covered_steps`: steps, or a sentence that says why there are none.
    """
    if isinstance(steps, str):
        return steps
    for rank in sorted(terms.without_local_state):
        left = steps & terms.without_local_state[rank]
        if not left:
            return (
                f"the RNG and data position of rank {rank} at the end of step {max(steps)} were "
                "lost with its node"
            )
        steps = left
    return max(steps)


def newest_checkpoint(terms: Terms) -> int | None:
    """
    Return the step of the newest checkpoint that is not later than `terms.ceiling`, the last step
    whose state can be sound. Return None if there is no such checkpoint.
    """
    early = [s for s in terms.checkpoints if terms.ceiling is None or s <= terms.ceiling]
    return max(early, default=None)


UNFIT = "no step was trained yet, and ranks {} no longer have the state they began with"


def unfit(standings: Standings, members: Iterable[int], step: int, terms: Terms) -> tuple[int, ...]:
    """
    Return the living members that no longer have their initial state, so that they cannot restart
    from it. Return an empty tuple if there is a checkpoint of `step` on disk, because then no rank
    needs its initial state.
    """
    if terms.checkpoints[step]:
        return ()
    there = [standings[rank] for rank in sorted(members) if rank in standings]
    return tuple(s.rank for s in there if s.alive and not s.uses(step, terms.ceiling))


def sound(
    shard: str, ranks: Sequence[int], standings: Standings, step: int, ceiling: int | None
) -> list[Standing]:
    """
    Return the holders that can send this shard as it was at the end of `step`, in the order of
    `ranks`. Leave out holders that were interrupted in the tail of the step (the code between the
    update and the end of the step). But if no holder has ended the step, return the interrupted
    holders.
    """
    holders = [standings[rank] for rank in ranks if rank in standings]
    found = [holder for holder in holders if holder.has(shard, step, ceiling)]
    return [holder for holder in found if not (holder.tail and holder.held == step)] or found


def listed(ranks: Iterable[int]) -> str:
    """
    Return a list of ranks as text for a message. Name only the first 16 and count the rest, because
    a job may have a hundred thousand ranks.
    """
    named = list(ranks)
    if len(named) <= 16:
        return str(named)
    return f"[{', '.join(map(str, named[:16]))}, … {len(named) - 16} more]"
