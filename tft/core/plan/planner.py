"""
Find what can be done about an incident: the step that all members can be brought to, which rank
copies which shards from which ranks, which rank saves which shards, and for each strategy why it
can or cannot work. Pure functions of a topology, of the state of every rank, and of the terms of
the incident.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tft.core.plan.topology import Topology
from tft.protocol.messages import Source, Transfer

SOURCES = 8
"""The maximum number of ranks that one shard is fetched from. More sources do not make the fetch
faster, and each of them is named in a message."""
NOTHING: frozenset[int] = frozenset()
RELOADING = ("retry", "recover")
"""Strategies after which all members can go on from a checkpoint that the ranks find themselves:
with these strategies the ranks of the whole world take part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """
    A rank and the copies that it reports to hold, as the planner sees them.
    """

    rank: int
    address: str = ""
    """The address from which the shards of the rank can be fetched."""
    alive: bool = True
    """True if the rank takes orders. A rank that takes no orders holds nothing."""
    coming: bool = False
    """True if the rank takes no orders yet because its process is starting."""
    held: int | None = None
    """The step whose whole state the rank has in use. None while the state is torn or new."""
    sound: bool = True
    """True if no fault has touched the state in use."""
    outrun: frozenset[str] = frozenset()
    """The shards of which the copy in use does not count: other ranks have come further in the tail
    of that step."""
    tail: bool = False
    """True if the rank has left the loop in the tail of step `held`: a part of that tail may not be
    done."""
    backups: tuple[int, ...] = ()
    """Earlier steps of which the rank keeps a sound copy."""
    unplaceable: str = ""
    """Why no other process can be started for the rank. Empty: one can."""
    strategies: frozenset[str] = frozenset()
    """The strategies that the adaptor of the rank can take part in."""

    def copies(self, ceiling: int | None) -> frozenset[int]:
        """
        Return the steps of which this rank can give its whole state, none later than `ceiling`.
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
        Return whether the rank can give this shard as it was at the end of `step`.
        """
        outrun = shard in self.outrun and step == self.held and step not in self.backups
        return not outrun and step in self.copies(ceiling)

    def uses(self, step: int, ceiling: int | None) -> bool:
        """
        Return whether the rank has the state of this step in use and that state is sound.
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
    """No copy of a later step is sound. None: no such limit."""
    checkpoints: Mapping[int, str] = field(default_factory=dict)
    """Step to directory: the checkpoints of all ranks. The directory is empty if nothing was
    trained yet: then the initial state of each rank is enough."""
    trained: bool = True
    """True if some step may have been trained, so that there is something to save."""
    faulty: frozenset[int] = frozenset()
    """The ranks that are the cause of the incident."""
    replaced: frozenset[int] = frozenset()
    """The ranks that have lost their process in this incident, including those that have another
    process now."""
    flapping: Mapping[int, str] = field(default_factory=dict)
    """Ranks that have failed too often, with the sentence that says so."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Strategies that were followed and did not help, or were ruled out, and why."""
    forced: str = ""
    """Why only `dump` or `exit` is possible. Empty: every strategy may be."""
    without_local_state: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Ranks whose rank-local state (RNG, data position) is lost with their node. For each of them:
    the steps of which that state is known nevertheless."""
    excluded: frozenset[int] = frozenset()
    """Of the ranks that are ready to come back, those that could not go on from the step of the
    other ranks."""
    strangers: frozenset[int] = frozenset()
    """Ranks that have never reported what they hold."""
    successors: frozenset[int] = frozenset()
    """The ranks for which another process is ready to take over."""
    returning: frozenset[int] = frozenset()
    """The non-members that are ready to come back."""
    reloads: bool = False
    """True if all ranks of the world take part and each can find the newest checkpoint that it
    keeps itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """
    How every member gets the state of one step.
    """

    step: int | None
    """The step. None: the step of the checkpoint that all members find and load themselves."""
    restore: tuple[int, ...] = ()
    """The ranks that restore a copy that they keep themselves."""
    transfers: Mapping[int, tuple[Transfer, ...]] = field(default_factory=dict)
    """By rank: the shards that it fetches, and the ranks that it fetches them from."""
    load: str = ""
    """The directory of the checkpoint that all members load. Empty: no checkpoint is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """
    A strategy, with the reasons for and against it.
    """

    strategy: str
    why_not: str | None
    """The sentence that rules the strategy out. None: the strategy can be followed."""
    why: str = ""
    """What the strategy would do."""
    step: int | None = None
    """The step to whose end all members would be brought."""
    leaving: tuple[int, ...] = ()
    """For `scale_in`: the ranks that would leave."""
    joining: tuple[int, ...] = ()
    """For `scale_out`: the ranks that would come back."""
    replace: tuple[int, ...] = ()
    """The living ranks that would get another process nevertheless: for `recover` and `migrate`."""
    reload: bool = False
    """True if all members would load the newest checkpoint that the ranks keep themselves. The step
    of that checkpoint is not known in advance."""


# ---------------------------------------------------------------- the step


def covered_step(
    groups: Mapping[str, Sequence[int]], standings: Standings, ceiling: int | None = None
) -> int | str:
    """
    Return the highest step of which every shard has a sound copy, in use or kept. If there is no
    such step, return the sentence that says why.

    The step is found by coverage, not by maximum: a single rank that is ahead does not set the
    step, and a faulty rank never does.
    """
    steps = _covered(groups, standings, ceiling)
    return steps if isinstance(steps, str) else max(steps)


def _covered(
    groups: Mapping[str, Sequence[int]], standings: Standings, ceiling: int | None
) -> frozenset[int] | str:
    """
    Return all steps of which every shard has a sound copy, or the sentence that says why there is
    none.
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
    Return the step that all members can be brought to: the highest covered step, or the step of a
    checkpoint if that is later. If there is none, return the sentence that says why.
    """
    return _agreed(_covered(topology.groups, standings, terms.ceiling), terms)


def _agreed(steps: frozenset[int] | str, terms: Terms) -> int | str:
    step, from_disk = _held_step(steps, terms), _checkpoint(terms)
    if from_disk is None:
        return step
    return max(step, from_disk) if isinstance(step, int) else from_disk


def _held_step(steps: frozenset[int] | str, terms: Terms) -> int | str:
    """
    Return the highest covered step for which every rank has, or can be given, its own RNG and data
    position. If there is none, return the sentence that says why.
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
    Return the step of the newest checkpoint that is not later than the ceiling. None: there is no
    such checkpoint.
    """
    early = [s for s in terms.checkpoints if terms.ceiling is None or s <= terms.ceiling]
    return max(early, default=None)


# ---------------------------------------------------------------- repair and savers


def repair(
    topology: Topology, standings: Standings, members: Collection[int], terms: Terms
) -> Repair | str:
    """
    Return how every member gets the state of the agreed step, or the sentence that says why this is
    not possible.
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
    Return the living members that do not have their initial state any more, if each rank would go
    on from its own initial state. Empty if the checkpoint of `step` is on disk.
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
    Return, for each rank that needs shards, the shards and the sources to fetch them from. Every
    source can serve every byte of a shard, and each named source serves a part of the bytes. The
    load is balanced: within a shard the receivers take turns over the holders, and across shards
    the holders with the least load come first.
    """
    plan: dict[int, list[Transfer]] = {}
    load: dict[int, float] = {}
    for shard, ranks in topology.groups.items():
        found = sound(shard, ranks, standings, step, terms.ceiling)
        givers = {holder.rank for holder in found}
        # a rank that was left in the tail fetches from the ranks that have ended the step
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
    Return whether the rank takes orders and stands in the tail of this step.
    """
    return standing.alive and standing.held == step and standing.tail


def sound(
    shard: str, ranks: Sequence[int], standings: Standings, step: int, ceiling: int | None
) -> list[Standing]:
    """
    Return the holders of a shard that can give it at `step`, in the order of `ranks`. If some of
    them have ended the step, the holders that were left in its tail do not count.
    """
    holders = [standings[rank] for rank in ranks if rank in standings]
    found = [holder for holder in holders if holder.has(shard, step, ceiling)]
    return [holder for holder in found if not _is_late(holder, step)] or found


def savers(
    topology: Topology, standings: Standings, step: int, ceiling: int | None, *, spread: bool
) -> dict[int, tuple[str, ...]]:
    """
    Assign each shard to exactly one rank that has it at `step`. Without `spread` this is the first
    such rank in the order of placement; with `spread` it is a rank on the node with the fewest
    shards to write so far.
    """
    plan: dict[int, list[str]] = {}
    by_node: dict[int, int] = {}
    for shard, ranks in topology.groups.items():
        holders = sound(shard, ranks, standings, step, ceiling)
        # copies in use were compared just now; kept copies, maybe of ranks that have left, were not
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
    Return which ranks can write further copies of which shards, in addition to the saver of each
    shard: all ranks that have the shard in use.
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
    Return the strategies for an incident in the order in which they are tried, each with its
    reasons. `exit` is the last one and always possible.
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
    Return what rules out a strategy independently of the copies that ranks hold. None: nothing
    does.
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
    Return whether some step is held whole and a last checkpoint of it can be written. This may be
    true even if training cannot go on from that step.
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
    """The steps of which every shard has a sound copy, counting all ranks that take orders. A
    sentence says why there is none."""
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
        Return the offer for a strategy. The reasons of `_why_not` come first; only if there is
        none, `judge` is called.
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
        Return an offer that rules the strategy out while some member is lost or flapping: the set
        of ranks or their processes is changed later. None: no member is.
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
        # a rank that starts with the job is only late; a lost rank that starts again may leave
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
        Return the offer for a strategy after which training goes on. The strategy can work if there
        is a step to go on from, without the copies of the ranks in `going`, whose processes are
        replaced.
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
        if isinstance(covered, str):  # then it is the step of a checkpoint
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
        Return whether all members would go on from a checkpoint that the ranks find themselves.
        This is ruled out if some step is still held whole and can be saved, even if a member that
        needs it cannot get it: nobody knows which checkpoint the ranks would find.
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
    Return ranks as text for a sentence. Only the first 16 are named: a hundred thousand ranks do
    not fit into a sentence.
    """
    named = list(ranks)
    if len(named) <= 16:
        return str(named)
    return f"[{', '.join(map(str, named[:16]))}, … {len(named) - 16} more]"
