"""
Collect from the state of a job the facts that the planner (`tft.core.plan`) and the recovery
plugins need. Also record where the rank-local state (generators, data position) of each rank can be
found.
"""

from collections.abc import Callable, Set

from tft.core.job.commands import RankFacts
from tft.core.job.rank_process import ProcessStage
from tft.core.job.rank_state import RankState
from tft.core.job.state import Job
from tft.core.plan.coverage import covered_step
from tft.core.plan.standing import Standing, Terms


def standings_of(job: Job, unplaceable: Callable[[RankState], str]) -> dict[int, Standing]:
    """
    Return what the planner must know about every rank, by rank. The function `unplaceable` is
    called for each rank that has lost its process. It returns a sentence that says why no other
    process can be started for the rank, or "" if one can be started.
    """
    return {
        rank_state.rank: rank_state.standing(
            unplaceable(rank_state) if rank_state.process.stage is ProcessStage.GONE else ""
        )
        for rank_state in job.ranks.states.values()
    }


def rank_facts(job: Job, unplaceable: Callable[[RankState], str]) -> tuple[RankFacts, ...]:
    """
    Return the facts about every rank that are given to recovery plugins, in the order of the ranks.
    The function `unplaceable` returns a sentence that says why no other process can be started for
    a rank, or "" if one can be started.
    """
    topology = job.ranks.topology()
    held: dict[int, list[str]] = {}
    for shard, ranks in sorted(topology.groups.items()):
        for rank in ranks:
            held.setdefault(rank, []).append(shard)
    return tuple(
        RankFacts(
            rank=rank,
            node=topology.nodes.get(rank),
            member=rank in job.ranks.members,
            alive=standing.alive,
            held=standing.held,
            sound=standing.sound,
            backups=tuple(sorted(standing.backups)),
            shards=tuple(held.get(rank, ())),
            column=tuple(topology.columns.get(rank, ())),
            unplaceable=standing.unplaceable,
        )
        for rank, standing in standings_of(job, unplaceable).items()
    )


def terms_of(job: Job) -> Terms:
    """
    Return the conditions that a recovery plan for the present incident must respect.
    """
    incident = job.incident
    kept = {
        step
        for s in job.ranks.states.values()
        for step in (s.holdings.held, *s.holdings.kept)
        if step is not None
    }
    on_page = {s.rank: _on_page(job, s, kept) for s in job.ranks.member_states()}
    fresh = {0: ""} if job.training.untrained and not job.checkpoints.resumed else {}
    return Terms(
        enabled=job.policy.enable,
        ceiling=incident.spread.ceiling,
        checkpoints=job.checkpoints.known or fresh,
        trained=not job.training.untrained,
        faulty=frozenset(incident.faulty()),
        replaced=frozenset(incident.turnover.respawns),
        flapping={rank: why for rank in job.ranks.members if (why := job.flapping(rank))},
        failed=incident.decision.failed,
        forced=incident.decision.forced,
        without_local_state={
            rank_state.rank: on_page[rank_state.rank].union(rank_state.local_state.reported)
            for rank_state in job.ranks.member_states()
            if len(on_page[rank_state.rank]) < len(kept) or lacks_local_state(job, rank_state)
            if not rank_state.declared.derives
        },
        strangers=frozenset(s.rank for s in job.ranks.member_states() if not s.declared.shards),
        reloads=job.ranks.whole and job.ranks.every(lambda s: s.declared.reloads),
    )


def lacks_local_state(job: Job, rank_state: RankState) -> bool:
    """
    Return True if the process of a rank cannot use the rank-local state that the rank captured
    earlier. This is so if the page (shared memory) with that state is lost or on another node, or
    if the state is out of date.
    """
    if rank_state.rank in job.incident.turnover.joining:
        return True  # the rank comes back to the job, so its captures are from before it left
    if rank_state.local_state.page is None:
        # the rank has captured nothing yet. A job that was started from a checkpoint needs the
        # rank-local state in that checkpoint. A new job begins with the initial rank-local state
        return job.checkpoints.resumed
    return (
        rank_state.local_state.page in job.nodes.lost
        or rank_state.local_state.page != rank_state.node
    )


def _on_page(job: Job, rank_state: RankState, steps: Set[int]) -> frozenset[int]:
    """
    Return those of `steps` for which the rank may have captured its rank-local state on the page
    (the shared memory) that its process uses now.
    """
    return frozenset(
        ()
        if lacks_local_state(job, rank_state)
        else (s for s in steps if s >= rank_state.local_state.since)
    )


def note_capture(job: Job, rank_state: RankState) -> None:
    """
    Record that a rank has its rank-local state of the agreed step (the step to which all ranks
    return) on the page that its process uses. A page is shared memory on the node of the rank. If
    the rank used another page before, its earlier captures are not on the present page. So keep the
    content of these earlier captures, as far as it was reported, in the attribute `reported`.
    """
    step = job.incident.progress.agreed
    rank_state.local_state.since = (
        step if lacks_local_state(job, rank_state) else min(rank_state.local_state.since, step)
    )
    told = (
        {} if rank_state.rank in job.incident.turnover.joining else rank_state.local_state.reported
    )
    rank_state.local_state.reported = {
        earlier: told[earlier] for earlier in told if earlier < rank_state.local_state.since
    }
    rank_state.local_state.page, rank_state.local_state.until = rank_state.node, None


def note_lost_step(job: Job, step: int | None) -> None:
    """
    Add a sentence to the incident report if the job must return to `step` although every shard has
    a copy of a later step. The reason is that rank-local state of that later step was lost with a
    node. If `step` is None, the step is not known yet, and nothing is added.
    """
    standings = {s.rank: s.standing() for s in job.ranks.states.values()}
    latest = covered_step(job.ranks.topology().groups, standings, job.incident.spread.ceiling)
    if step is None or isinstance(latest, str) or latest <= step:
        return
    lost = [r for r, steps in terms_of(job).without_local_state.items() if latest not in steps]
    if lost:
        job.incident.turnover.unprotected.append(
            f"the state of step {latest} is not used: no other node had the RNG and data position "
            f"of ranks {lost} of this step when their node was lost"
        )


def note_early(job: Job, step: int) -> None:
    """
    Add a reservation (a reason why training may not continue exactly) to the incident for each rank
    whose rank-local state of `step` may be out of date. The last known state of such a rank was
    captured before the end of the step, and the rank was seen to change its state late in a step.
    """
    early = [
        s.rank
        for s in job.ranks.states.values()
        if step in s.local_state.early and step in s.local_state.reported
    ]
    if early:
        why = f"RNG and data position of ranks {early} are those from before the end of step {step}"
        job.incident.exactness.reservations.append((step, why))
