"""
What can be done about an incident: which step everyone can be brought to, who copies what from
whom, who saves what, and for each strategy why it can or cannot work. Pure functions of a
topology, of where every rank stands, and of the terms of the incident.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tft.core.topology import Topology
from tft.protocol.messages import Source, Transfer

SOURCES = 8
"""From how many ranks one shard is fetched at most: more do not make it faster, and every one
stands in a message."""
NOTHING: frozenset[int] = frozenset()
RELOADING = ("retry", "recover")
"""Strategies after which everyone can go on from a checkpoint that the ranks find themselves: they
keep those of the whole world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """
    A rank, and what it says it holds.
    """

    rank: int
    address: str = ""
    """Where its shards can be fetched."""
    alive: bool = True
    """It takes orders. A rank that does not holds nothing."""
    coming: bool = False
    """It takes none yet: its process is starting."""
    held: int | None = None
    """The step whose whole state it has in use; None while it is torn or new."""
    sound: bool = True
    """No fault has touched what it has in use."""
    outrun: frozenset[str] = frozenset()
    """The shards of which its copy in use does not count: others have come further in the tail of that step."""
    tail: bool = False
    """It has left the loop in the tail of step `held`: of what stands there some may not be done."""
    backups: tuple[int, ...] = ()
    """Earlier steps of which it keeps a sound copy."""
    unplaceable: str = ""
    """Why no other process can be started for it; empty: one can."""
    strategies: frozenset[str] = frozenset()
    """What its adaptor can take part in."""

    def copies(self, ceiling: int | None) -> frozenset[int]:
        """
        The steps of which this rank can give its whole state, none later than `ceiling`.
        """
        if not self.alive:
            return NOTHING
        steps = self.backups
        if self.held is not None and self.sound:
            steps = (*steps, self.held)
        if ceiling is None:
            return frozenset(steps)
        return frozenset([step for step in steps if step <= ceiling])

    def has(self, shard: str, step: int, ceiling: int | None) -> bool:
        """
        It can give this shard as it was at the end of `step`.
        """
        outrun = shard in self.outrun and step == self.held and step not in self.backups
        return not outrun and step in self.copies(ceiling)

    def uses(self, step: int, ceiling: int | None) -> bool:
        """
        It has this step in use, and nothing is wrong with it.
        """
        sound = self.alive and self.sound and (ceiling is None or step <= ceiling)
        return sound and self.held == step


Standings = Mapping[int, Standing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """
    What a plan has to respect.
    """

    enabled: frozenset[str]
    ceiling: int | None = None
    """No copy of a later step is sound; None: no such limit."""
    checkpoints: Mapping[int, str] = field(default_factory=dict)
    """Step to directory: the checkpoints of all ranks. The directory is empty where nothing was
    trained yet: then each rank's own initial state will do."""
    trained: bool = True
    """Some step has been trained: there is something to save."""
    faulty: frozenset[int] = frozenset()
    """The ranks that are the cause of the incident."""
    replaced: frozenset[int] = frozenset()
    """The ranks that have lost their process in this incident, even if they have another now."""
    flapping: Mapping[int, str] = field(default_factory=dict)
    """Ranks that have failed too often, and the sentence that says so."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Strategies that were followed and did not help, or were ruled out, and why."""
    forced: str = ""
    """Why nothing but `dump` or `exit` comes into question."""
    without_local_state: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Ranks whose private state (RNG, data position) went with their node: the steps of which it
    is known all the same."""
    excluded: frozenset[int] = frozenset()
    """Of those that are ready to come back, the ones that could not go on where the others are."""
    strangers: frozenset[int] = frozenset()
    """Ranks that have never said what they hold."""
    successors: frozenset[int] = frozenset()
    """The ranks for which another process is ready to take over."""
    returning: frozenset[int] = frozenset()
    """The ranks outside that are ready to come back."""
    reloads: bool = False
    """All ranks of the world take part, and find the newest checkpoint that they keep themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """
    How every member gets the state of one step.
    """

    step: int | None
    """None: that of the checkpoint that all members find themselves, and load."""
    restore: tuple[int, ...] = ()
    """Who takes back a copy of its own."""
    transfers: Mapping[int, tuple[Transfer, ...]] = field(default_factory=dict)
    """Who fetches what, from whom."""
    load: str = ""
    """The directory of the checkpoint that all members load; empty: none is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """
    A strategy, with the reasons for and against it.
    """

    strategy: str
    why_not: str | None
    """The sentence that rules it out; None: it can be followed."""
    why: str = ""
    """What it would do."""
    step: int | None = None
    """The step whose end everyone would be brought to."""
    leaving: tuple[int, ...] = ()
    """For `scale_in`: the ranks that would leave."""
    joining: tuple[int, ...] = ()
    """For `scale_out`: the ranks that would come back."""
    replace: tuple[int, ...] = ()
    """For `recover` and `migrate`: the ranks that live, and would get another process all the
    same."""
    reload: bool = False
    """Everyone would load the newest checkpoint that the ranks keep themselves: its step is not known
    before."""


# ---------------------------------------------------------------- the step


def covered_step(
    groups: Mapping[str, Sequence[int]], standings: Standings, ceiling: int | None = None
) -> int | str:
    """
    The highest step of which every shard has a sound copy, in use or kept, or the sentence why
    there is none.

    By coverage, not by maximum: a rank that is ahead alone does not set the step, and a faulty
    one never does.
    """
    steps = _covered(groups, standings, ceiling)
    return steps if isinstance(steps, str) else max(steps)


def _covered(
    groups: Mapping[str, Sequence[int]], standings: Standings, ceiling: int | None
) -> frozenset[int] | str:
    """
    All such steps.
    """
    copies = {rank: standing.copies(ceiling) for rank, standing in standings.items()}
    common: frozenset[int] | None = None
    for shard, ranks in groups.items():
        steps = NOTHING.union(*{copies.get(rank, NOTHING) for rank in ranks})
        if any(standings[rank].outrun for rank in ranks if rank in standings):
            steps = frozenset(s for s in steps if sound(shard, ranks, standings, s, ceiling))
        if not steps:
            before = "" if ceiling is None else f", of step {ceiling} or earlier,"
            return f"no sound copy of shard {shard!r}{before} is left on ranks {_list(ranks)}"
        common = steps if common is None else common & steps
    if common is None:
        return "no rank has said what it holds"
    if not common:
        return "no step is held whole: the copies that are left are of different steps"
    return common


def agreed_step(topology: Topology, standings: Standings, terms: Terms) -> int | str:
    """
    The step everyone can be brought to: the highest that is covered, or that of a checkpoint where
    it is a later one.
    """
    return _agreed(_covered(topology.groups, standings, terms.ceiling), terms)


def _agreed(steps: frozenset[int] | str, terms: Terms) -> int | str:
    step, from_disk = _held_step(steps, terms), _checkpoint(terms)
    if from_disk is None:
        return step
    return max(step, from_disk) if isinstance(step, int) else from_disk


def _held_step(steps: frozenset[int] | str, terms: Terms) -> int | str:
    """
    The highest of the covered steps of which everyone has, or can be given, its own RNG and data
    position.
    """
    if isinstance(steps, str):
        return steps
    for rank in sorted(terms.without_local_state):
        left = steps & terms.without_local_state[rank]
        if not left:
            return (
                f"the RNG and data position of rank {rank} at the end of step {max(steps)} have "
                "gone with its node"
            )
        steps = left
    return max(steps)


def _checkpoint(terms: Terms) -> int | None:
    """
    The step of the newest checkpoint that is early enough.
    """
    early = [s for s in terms.checkpoints if terms.ceiling is None or s <= terms.ceiling]
    return max(early, default=None)


# ---------------------------------------------------------------- repair and savers


def repair(
    topology: Topology, standings: Standings, members: Collection[int], terms: Terms
) -> Repair | str:
    """
    How every member gets the state of the agreed step, or the sentence why that cannot be.
    """
    covered = _covered(topology.groups, standings, terms.ceiling)
    held = _held_step(covered, terms)
    from_disk = _checkpoint(terms)
    if from_disk is not None and (isinstance(held, str) or held < from_disk):
        unfit = _unfit(standings, members, from_disk, terms)
        if unfit:
            return f"{_UNFIT.format(_list(unfit))}; {held}"
        return Repair(step=from_disk, load=terms.checkpoints[from_disk])
    if isinstance(held, str):
        searched = terms.reloads and not _is_saved(covered, standings, members, terms)
        return Repair(step=None) if searched else held
    step = held
    needy = {r for r in members if r not in standings or not _uses(standings[r], step, terms)}
    restore = tuple(
        rank
        for rank in sorted(needy)
        if rank in standings and step in standings[rank].copies(terms.ceiling)
    )
    needy.difference_update(restore)
    return Repair(
        step=step,
        restore=restore,
        transfers=_transfers(topology, standings, members, needy, step, terms),
    )


_UNFIT = "nothing was trained yet, and ranks {} are not as they began any more"


def _unfit(
    standings: Standings, members: Iterable[int], step: int, terms: Terms
) -> tuple[int, ...]:
    """
    Where each rank goes on with its own initial state: those that live, and have it no more.
    """
    if terms.checkpoints[step]:
        return ()
    there = [standings[rank] for rank in sorted(members) if rank in standings]
    return tuple(s.rank for s in there if s.alive and not s.uses(step, terms.ceiling))


def _uses(standing: Standing, step: int, terms: Terms) -> bool:
    return standing.uses(step, terms.ceiling)


def _transfers(
    topology: Topology, standings: Standings, members: Collection[int], needy: set[int], step: int,
    terms: Terms,
) -> dict[int, tuple[Transfer, ...]]:  # fmt: skip
    """
    Every source can serve every byte of a shard, and each of those named serves a part of it. Who
    is named is balanced: within a shard by turns, over the shards by who has least to give so far.
    """
    plan: dict[int, list[Transfer]] = {}
    load: dict[int, float] = {}
    for shard, ranks in topology.groups.items():
        found = sound(shard, ranks, standings, step, terms.ceiling)
        givers = {holder.rank for holder in found}
        # who was left in the tail takes what others have that have ended the step
        there = [r for r in ranks if r in members and r in standings]
        late = {r for r in there if _is_late(standings[r], step)} - givers
        receivers = [rank for rank in ranks if rank in needy | late]
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


def _is_late(standing: Standing, step: int) -> bool:
    """
    It takes part, and stands in the tail of this step.
    """
    return standing.alive and standing.held == step and standing.tail


def sound(
    shard: str, ranks: Sequence[int], standings: Standings, step: int, ceiling: int | None
) -> list[Standing]:
    """
    Return those holders of a shard that can give it at `step`, in the order of `ranks`. If some of them have ended the
    step, those that were left in its tail do not count.
    """
    holders = [standings[rank] for rank in ranks if rank in standings]
    found = [holder for holder in holders if holder.has(shard, step, ceiling)]
    return [holder for holder in found if not _is_late(holder, step)] or found


def savers(
    topology: Topology, standings: Standings, step: int, ceiling: int | None, *, spread: bool
) -> dict[int, tuple[str, ...]]:
    """
    Each shard to exactly one rank that has it at `step`: the lowest-placed one, or with `spread`
    one on the node that has least to write so far.
    """
    plan: dict[int, list[str]] = {}
    by_node: dict[int, int] = {}
    for shard, ranks in topology.groups.items():
        holders = sound(shard, ranks, standings, step, ceiling)
        # what is in use was compared just now; a copy that is kept, maybe by a rank that has left, was not
        holders = [holder for holder in holders if holder.uses(step, ceiling)] or holders
        chosen = holders[0].rank
        if spread:
            chosen = min(
                (holder.rank for holder in holders),
                key=lambda rank: (by_node.get(_node(topology, rank), 0), len(plan.get(rank, ()))),
            )
            by_node[_node(topology, chosen)] = by_node.get(_node(topology, chosen), 0) + 1
        plan.setdefault(chosen, []).append(shard)
    return {rank: tuple(shards) for rank, shards in plan.items()}


def copiers(
    topology: Topology, standings: Standings, step: int, ceiling: int | None,
    savers: Mapping[int, Sequence[str]],
) -> dict[int, tuple[str, ...]]:  # fmt: skip
    """
    Who can write which shards once more, beside the one that has to: all who have them in use.
    """
    return {
        rank: tuple(
            shard
            for shard, ranks in topology.groups.items()
            if rank in ranks and shard not in savers.get(rank, ())
            if standing in sound(shard, ranks, standings, step, ceiling)
        )
        for rank, standing in standings.items()
        if standing.uses(step, ceiling)
    }


def _node(topology: Topology, rank: int) -> int:
    return topology.nodes.get(rank, 0)


# ---------------------------------------------------------------- the strategies


def offers(
    topology: Topology, standings: Standings, members: frozenset[int], terms: Terms
) -> tuple[Offer, ...]:
    """
    The strategies for an incident, in the order in which they are tried, each with its reasons.
    `exit` is the last, and always possible.
    """
    covered = _covered(topology.groups, standings, terms.ceiling)
    there = {rank for rank, standing in standings.items() if standing.alive}
    case = _Case(
        topology=topology, standings=standings, members=members, terms=terms, covered=covered,
        lost=members - there,
    )  # fmt: skip
    return tuple(case.offer(strategy, judge) for strategy, judge in case.judges().items())


def _why_not(
    strategy: str, standings: Standings, members: Collection[int], terms: Terms
) -> str | None:
    """
    What rules out a strategy, whatever is held.
    """
    if strategy == "exit":
        return None
    if strategy in terms.failed:
        return terms.failed[strategy]
    if strategy not in terms.enabled:
        return f"{strategy} is not enabled"
    unable = [
        rank
        for rank, standing in standings.items()
        if standing.alive and rank in members and strategy not in standing.strategies
    ]
    if unable:
        return f"the adaptor of ranks {_list(unable)} cannot take part"
    return (terms.forced or None) if strategy != "dump" else None


def _is_saved(
    covered: frozenset[int] | str, standings: Standings, members: Collection[int], terms: Terms
) -> bool:
    """
    All of some step is there, and a last checkpoint of it can be written, where it cannot be gone on from.
    """
    possible = _why_not("dump", standings, members, terms) is None
    return possible and not isinstance(covered, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """
    One incident, judged strategy by strategy.
    """

    topology: Topology
    standings: Standings
    members: frozenset[int]
    terms: Terms
    covered: frozenset[int] | str
    """The steps of which every shard has a sound copy, with everyone who is there."""
    lost: frozenset[int]
    """The members that take no orders."""

    def judges(self) -> dict[str, Callable[[], Offer]]:
        return {
            "migrate": self.migrate,
            "scale_out": self.scale_out,
            "retry": self.retry,
            "recover": self.recover,
            "scale_in": self.scale_in,
            "dump": self.dump,
            "exit": self.exit,
        }

    def offer(self, strategy: str, judge: Callable[[], Offer]) -> Offer:
        """
        What rules out any strategy comes before what rules out this one.
        """
        why_not = _why_not(strategy, self.standings, self.members, self.terms)
        return judge() if why_not is None else Offer(strategy=strategy, why_not=why_not)

    def migrate(self) -> Offer:
        successors = sorted(self.terms.successors & self.members)
        if not successors:
            return Offer(strategy="migrate", why_not="nobody is ready to take over")
        why = f"ranks {_list(successors)} are taken over by processes that are ready"
        return self._whole("migrate") or self._in_place("migrate", why, going=tuple(successors))

    def scale_out(self) -> Offer:
        joining = sorted(self.terms.returning)
        if not joining:
            return Offer(strategy="scale_out", why_not="nobody is ready to come back")
        for rank in sorted(self.terms.excluded):
            why_not = f"the adaptor of rank {rank} cannot make its RNG and data position anew"
            return Offer(strategy="scale_out", why_not=why_not)
        why = f"ranks {_list(joining)} come back"
        return self._whole("scale_out") or self._in_place("scale_out", why, joining=tuple(joining))

    def _whole(self, strategy: str) -> Offer | None:
        """
        A change of who takes part is left for later while somebody is lost.
        """
        lost = sorted(self.lost)
        if lost:
            return Offer(strategy=strategy, why_not=f"ranks {_list(lost)} have lost their process")
        return self._after_flapping(strategy)

    def retry(self) -> Offer:
        gone = sorted(self.terms.replaced | self.lost)
        if gone:
            return Offer(strategy="retry", why_not=f"ranks {_list(gone)} have lost their process")
        return self._after_flapping("retry") or self._in_place("retry", "every process is kept")

    def recover(self) -> Offer:
        for rank in sorted(self.lost):
            if self._standing(rank).unplaceable:
                return Offer(strategy="recover", why_not=self._standing(rank).unplaceable)
        flapping = self._after_flapping("recover")
        if flapping is not None:
            return flapping
        going = self.lost | self.terms.replaced
        if going:
            why = f"ranks {_list(sorted(going))} get another process"
            return self._in_place("recover", why)
        faulty = sorted(self.terms.faulty & self.members)
        if not faulty:
            why_not = "no rank can be named whose process should be replaced"
            return Offer(strategy="recover", why_not=why_not)
        why = f"ranks {_list(faulty)} get another process, though theirs live"
        return self._in_place("recover", why, going=tuple(faulty))

    def scale_in(self) -> Offer:
        # who starts with the job is only late; who was lost, and starts again, can be done without
        late = {rank for rank in self.lost if self._standing(rank).coming}
        lost = self.lost - (late - self.terms.replaced)
        leaving = self.topology.columns_of(lost | self.terms.flapping.keys())
        leaving &= self.members
        if not leaving:
            return Offer(strategy="scale_in", why_not="no rank has to leave")
        staying = self.members - leaving
        if not staying:
            return Offer(strategy="scale_in", why_not="nobody would be left")
        for shard, ranks in self.topology.groups.items():
            if staying.isdisjoint(ranks):
                why_not = f"shard {shard!r} has its place on ranks that leave, and nowhere else"
                return Offer(strategy="scale_in", why_not=why_not)
        for rank in sorted(self.terms.strangers):
            why_not = f"rank {rank} has never said what it holds"
            return Offer(strategy="scale_in", why_not=why_not)
        why = f"ranks {_list(sorted(leaving))} leave, {len(staying)} go on"
        left = tuple(sorted(leaving))
        return self._in_place("scale_in", why, leaving=left)

    def dump(self) -> Offer:
        if not self.terms.trained:
            return Offer(strategy="dump", why_not="no step has been trained yet")
        if isinstance(self.covered, str):
            return Offer(strategy="dump", why_not=self.covered)
        step = max(self.covered)
        why = f"a last checkpoint of step {step} is written"
        return Offer(strategy="dump", why_not=None, why=why, step=step)

    def exit(self) -> Offer:
        return Offer(strategy="exit", why_not=None, why="nothing is saved")

    def _in_place(
        self,
        strategy: str,
        why: str,
        *,
        leaving: tuple[int, ...] = (),
        joining: tuple[int, ...] = (),
        going: tuple[int, ...] = (),
    ) -> Offer:
        """
        A strategy after which training goes on: it can work when there is a step to go on from,
        without those whose processes are `going`.
        """
        covered = self.covered
        if going:
            staying = {r: s for r, s in self.standings.items() if r not in going}
            covered = _covered(self.topology.groups, staying, self.terms.ceiling)
        without_local_state = {
            r: s for r, s in self.terms.without_local_state.items() if r not in leaving
        }
        step = _agreed(covered, replace(self.terms, without_local_state=without_local_state))
        if isinstance(step, str) and self._is_searched(strategy):
            why = f"{why}; training goes on from a checkpoint that the ranks find themselves"
            return Offer(strategy=strategy, why_not=None, why=why, replace=going, reload=True)
        if isinstance(step, str):
            without = f"with ranks {_list(going)} replaced, " if going else ""
            return Offer(strategy=strategy, why_not=without + step)
        if isinstance(covered, str):  # then it is that of a checkpoint
            staying_on = self.members - {*leaving, *going}
            unfit = _unfit(self.standings, staying_on, step, self.terms)
            if unfit and strategy != "recover":
                return Offer(strategy=strategy, why_not=_UNFIT.format(_list(unfit)))
            going = (*going, *unfit)
        why = f"{why}; training goes on after step {step}"
        return Offer(
            strategy=strategy, why_not=None, why=why, step=step, leaving=leaving, joining=joining,
            replace=going,
        )  # fmt: skip

    def _is_searched(self, strategy: str) -> bool:
        """
        Everyone would go on from what the ranks find. Not where all is still there, even if it is not
        where it is needed, and can be saved: what will be found nobody knows.
        """
        if not self.terms.reloads or strategy not in RELOADING:
            return False
        return not _is_saved(self.covered, self.standings, self.members, self.terms)

    def _after_flapping(self, strategy: str) -> Offer | None:
        for rank in sorted(self.terms.flapping):
            return Offer(strategy=strategy, why_not=self.terms.flapping[rank])
        return None

    def _standing(self, rank: int) -> Standing:
        return self.standings.get(rank) or Standing(rank=rank, alive=False)


def _list(ranks: Iterable[int]) -> str:
    """
    Ranks for a sentence: a hundred thousand of them are no sentence.
    """
    named = list(ranks)
    if len(named) <= 16:
        return str(named)
    return f"[{', '.join(map(str, named[:16]))}, … {len(named) - 16} more]"
