"""
Find out which strategies (`retry`, `recover`, `dump`, …) are possible in the present incident, and
the reasons why others are not.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from tft.core.plan.coverage import UNFIT, agreed, covered_steps, listed, unfit
from tft.core.plan.standing import Standing, Standings, Terms
from tft.core.plan.topology import Topology

RELOADING = ("retry", "recover")
"""The strategies that may continue from a checkpoint that the ranks write without tft and find
themselves. All ranks of the world must find and load such a checkpoint together, and neither of
these strategies takes a rank out of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """
    The planner's answer about one strategy: what the strategy would do, or why it is not possible.
    """

    strategy: str
    why_not: str | None
    """A sentence that says why the strategy is not possible. None: the strategy is possible."""
    why: str = ""
    """A sentence that says what the strategy would do. Empty: the strategy is not possible."""
    step: int | None = None
    """The step from whose end all members would continue or, for `dump`, whose state would be
    saved. None: there is no such step, or the step is not known in advance."""
    leaving: tuple[int, ...] = ()
    """For `scale_in` (the job continues with fewer ranks): the ranks that would leave the job."""
    joining: tuple[int, ...] = ()
    """For `scale_out` (the job continues with more ranks): the ranks that would come back to the
    job."""
    replace: tuple[int, ...] = ()
    """For `recover` and `migrate`: the ranks whose process is alive, but would be replaced by
    another process."""
    reload: bool = False
    """True if all members would find and load the newest checkpoint that the ranks write without
    tft. The step of that checkpoint is not known in advance."""


def offers(
    topology: Topology, standings: Standings, members: frozenset[int], terms: Terms
) -> tuple[Offer, ...]:
    """
    Return an offer for each strategy, in the order in which the strategies are tried. An offer says
    what the strategy would do, or why the strategy is not possible. The strategy `exit` comes last
    and is always possible.
    """
    covered = covered_steps(topology.groups, standings, terms.ceiling)
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
    Return a reason against a strategy, for example that the strategy is not enabled. Only reasons
    are examined that do not depend on which copies of the state are left in memory. Return None if
    there is no such reason.
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
        return f"the adaptor of ranks {listed(unable)} does not support the strategy {strategy}"
    return (terms.forced or None) if strategy != "dump" else None


def is_saved(
    covered: frozenset[int] | str, standings: Standings, members: Collection[int], terms: Terms
) -> bool:
    """
    Return True if a last checkpoint can be written. For that, the shards of some step must be
    complete in memory, and the strategy `dump` (save and end) must not be ruled out. Training may
    still be unable to continue from that step, because rank-local state may be lost.
    """
    possible = _why_not("dump", standings, members, terms) is None
    return possible and not isinstance(covered, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """
    The facts about one incident. For each strategy there is a method that returns the offer for
    this strategy.
    """

    topology: Topology
    standings: Standings
    members: frozenset[int]
    terms: Terms
    covered: frozenset[int] | str
    """The steps for which every shard has a sound copy on a rank that can receive orders. If there
    are no such steps: a sentence that says why."""
    lost: frozenset[int]
    """The members (ranks that take part in the job) that cannot receive orders."""

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
        Return the offer for a strategy. If the function `_why_not` returns a reason against the
        strategy, the offer carries that reason. Otherwise the function `judge`, which is the method
        for this strategy, makes the offer.
        """
        why_not = _why_not(strategy, self.standings, self.members, self.terms)
        return judge() if why_not is None else Offer(strategy=strategy, why_not=why_not)

    def migrate(self) -> Offer:
        successors = sorted(self.terms.successors & self.members)
        if not successors:
            return Offer(strategy="migrate", why_not="no process is ready to take over")
        why = f"ranks {listed(successors)} are taken over by processes that are ready"
        return self._whole("migrate") or self._in_place("migrate", why, going=tuple(successors))

    def scale_out(self) -> Offer:
        joining = sorted(self.terms.returning)
        if not joining:
            return Offer(strategy="scale_out", why_not="no rank is ready to come back")
        for rank in sorted(self.terms.excluded):
            why_not = f"the adaptor of rank {rank} cannot make its RNG and data position anew"
            return Offer(strategy="scale_out", why_not=why_not)
        why = f"ranks {listed(joining)} come back"
        return self._whole("scale_out") or self._in_place("scale_out", why, joining=tuple(joining))

    def _whole(self, strategy: str) -> Offer | None:
        """
        Return an offer that rules the strategy out if some member has lost its process or has
        failed too often. Return None if there is no such member. Only `migrate` and `scale_out`
        call this method: they are not urgent, so they wait until all members are well.
        """
        lost = sorted(self.lost)
        if lost:
            return Offer(strategy=strategy, why_not=f"ranks {listed(lost)} have lost their process")
        return self._after_flapping(strategy)

    def retry(self) -> Offer:
        gone = sorted(self.terms.replaced | self.lost)
        if gone:
            return Offer(strategy="retry", why_not=f"ranks {listed(gone)} have lost their process")
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
            why = f"ranks {listed(sorted(going))} get another process"
            return self._in_place("recover", why)
        faulty = sorted(self.terms.faulty & self.members)
        if not faulty:
            why_not = "no rank is known to be at fault, so no process can be replaced"
            return Offer(strategy="recover", why_not=why_not)
        why = f"ranks {listed(faulty)} get another process, although their processes are alive"
        return self._in_place("recover", why, going=tuple(faulty))

    def scale_in(self) -> Offer:
        # a rank whose process is still starting need not leave the job, unless this process takes
        # the place of one that the rank has lost in this incident
        late = {rank for rank in self.lost if self._standing(rank).coming}
        lost = self.lost - (late - self.terms.replaced)
        leaving = self.topology.columns_of(lost | self.terms.flapping.keys())
        leaving &= self.members
        if not leaving:
            return Offer(strategy="scale_in", why_not="no rank has to leave")
        staying = self.members - leaving
        if not staying:
            return Offer(strategy="scale_in", why_not="no rank would be left")
        for shard, ranks in self.topology.groups.items():
            if staying.isdisjoint(ranks):
                why_not = f"shard {shard!r} is held only by ranks that leave"
                return Offer(strategy="scale_in", why_not=why_not)
        for rank in sorted(self.terms.strangers):
            why_not = f"rank {rank} has never reported which shards it holds"
            return Offer(strategy="scale_in", why_not=why_not)
        why = f"ranks {listed(sorted(leaving))} leave, {len(staying)} go on"
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
        Return the offer for a strategy after which training continues. The strategy is possible if
        there is a step from which all members can continue. The processes of the ranks in `going`
        are replaced, so the copies of the state in these processes do not count.
        """
        covered = self.covered
        if going:
            staying = {r: s for r, s in self.standings.items() if r not in going}
            covered = covered_steps(self.topology.groups, staying, self.terms.ceiling)
        without_local_state = {
            r: s for r, s in self.terms.without_local_state.items() if r not in leaving
        }
        step = agreed(covered, replace(self.terms, without_local_state=without_local_state))
        if isinstance(step, str) and self._is_searched(strategy):
            why = f"{why}; training goes on from a checkpoint that the ranks find themselves"
            return Offer(strategy=strategy, why_not=None, why=why, replace=going, reload=True)
        if isinstance(step, str):
            without = f"with ranks {listed(going)} replaced, " if going else ""
            return Offer(strategy=strategy, why_not=without + step)
        # no step is complete in memory, so `step` is that of a checkpoint, or 0 for the initial
        # states. If `step` is 0, a member that no longer has its initial state needs another
        # process
        if isinstance(covered, str):
            staying_on = self.members - {*leaving, *going}
            changed = unfit(self.standings, staying_on, step, self.terms)
            if changed and strategy != "recover":
                return Offer(strategy=strategy, why_not=UNFIT.format(listed(changed)))
            going = (*going, *changed)
        why = f"{why}; training goes on after step {step}"
        return Offer(
            strategy=strategy, why_not=None, why=why, step=step, leaving=leaving, joining=joining,
            replace=going,
        )  # fmt: skip

    def _is_searched(self, strategy: str) -> bool:
        """
        Return True if all members would continue from a checkpoint that the ranks write without tft
        and find themselves. Return False if a last checkpoint can be written from memory. Writing
        it is better, because it is unknown how old the checkpoint is that the ranks would find.
        """
        if not self.terms.reloads or strategy not in RELOADING:
            return False
        return not is_saved(self.covered, self.standings, self.members, self.terms)

    def _after_flapping(self, strategy: str) -> Offer | None:
        for rank in sorted(self.terms.flapping):
            return Offer(strategy=strategy, why_not=self.terms.flapping[rank])
        return None

    def _standing(self, rank: int) -> Standing:
        return self.standings.get(rank) or Standing(rank=rank, alive=False)
