"""
Chooses the recovery strategy of an incident, and begins to carry out that strategy. The planner
makes an offer for each strategy, which says what the strategy would do or why it is not possible.
Recovery plugins may give advice.
"""

from dataclasses import replace

from tft.core.job.attempts import Attempts
from tft.core.job.commands import Consult
from tft.core.job.comparison import Comparison
from tft.core.job.facts import rank_facts, standings_of, terms_of
from tft.core.job.rank_process import ProcessStage
from tft.core.job.rank_state import RankState
from tft.core.job.shutdown import Shutdown
from tft.core.job.state import Job
from tft.core.job.transitions import State
from tft.core.plan.coverage import agreed_step
from tft.core.plan.offers import Offer, offers
from tft.core.plan.plan import Plan
from tft.core.plan.standing import Terms
from tft.protocol.messages import Advised

S = State

OPPORTUNITIES = ("migrate", "scale_out")
"""The strategies that need no fault: a successor takes a rank over (`migrate`), or ranks that have
left the job come back (`scale_out`). In most incidents there is no opportunity for them. So the
report does not list them among the strategies that were not possible."""


class StrategyChoice:
    """
    Chooses the recovery strategy for each incident of one job.
    """

    def __init__(
        self, job: Job, attempts: Attempts, shutdown: Shutdown, comparison: Comparison
    ) -> None:
        self._job = job
        self._attempts = attempts
        self._shutdown = shutdown
        self._comparison = comparison

    # ---------------------------------------------------------------- offers, questions to plugins

    def consider(self) -> None:
        """
        Begin the choice of a recovery strategy: ask the recovery plugins if there are any,
        otherwise decide at once. If it is not known yet which training state is left, return
        without a choice and let the caller try again later. This is so while a process is being
        ended, or while a node has not reported the rank-local state that it has kept for a lost
        node.
        """
        job, incident = self._job, self._job.incident
        # a plan and advice from an earlier choice in this incident do not hold any more
        incident.decision.plan, incident.decision.advice = None, None
        if job.state is not S.CLEARING:
            # begin a new round, so that advice about the offers of the old round is ignored
            job.new_round()
        if job.unsettled():
            # end the wait for plugins that were asked in the old round: their advice would be
            # ignored
            job.timing.deadline = None
            return
        if job.state is S.CLEARING:
            job.tell("stopped", incident=incident.number, ranks=sorted(incident.faulty()))
        job.move(S.CHOOSING)
        if not job.policy.advised or incident.decision.forced or not incident.is_open:
            self.decide()
        else:
            self.ask()

    def ask(self) -> None:
        """
        Ask the recovery plugins which strategy to follow. The plugins have `policy.advice` seconds
        to answer.
        """
        job = self._job
        job.incident.decision.awaited = False
        job.timing.stay(job.policy.advice)
        job.said.append(
            Consult(
                incident=job.incident.number,
                round=job.incident.round,
                faults=tuple(job.incident.roots()),
                offers=self.offers(),
                ranks=rank_facts(job, self.unplaceable),
                until=job.timing.now + job.policy.advice,
            )
        )

    def offers(self) -> tuple[Offer, ...]:
        """
        Return an offer for each recovery strategy: what the strategy would do, or why it is not
        possible. If only `exit` would be possible, which saves nothing, accept more copies of the
        training state: first copies that were excluded only as a precaution, then copies of ranks
        with numeric faults.
        """
        job, incident = self._job, self._job.incident
        made = self._make_offers()
        while incident.spread.tentative and _hopeless(made):
            incident.spread.yield_to_need()
            made = self._make_offers()
        doubted = [
            s
            for s in job.ranks.member_states()
            if s.ready and not s.holdings.trusted and not s.holdings.damaged
        ]
        if doubted and _hopeless(made):
            # without the copies of ranks with numeric faults, nothing can be saved. Use these
            # copies, which is better than losing everything
            for rank_state in doubted:
                rank_state.holdings.trusted = True
            job.tell("doubt_dropped", ranks=[rank_state.rank for rank_state in doubted])
            self._comparison.judge()
            made = self._make_offers()
        return made

    def _make_offers(self) -> tuple[Offer, ...]:
        job = self._job
        standings = standings_of(job, self.unplaceable)
        for rank in self._without_room():
            why = standings[rank].unplaceable or f"no node has a free place left for rank {rank}"
            standings[rank] = replace(standings[rank], unplaceable=why)
        terms = terms_of(job)
        if job.incident.decision.advice is not None:
            terms = _advised_terms(terms, job.incident.decision.advice)
        returning = job.returning()
        excluded = frozenset(
            rank for rank in returning if not job.ranks.states[rank].declared.derives
        )
        successors = frozenset(successor.rank for successor in job.succession.warm())
        return offers(
            job.ranks.topology(),
            standings,
            job.ranks.members,
            replace(terms, successors=successors, returning=returning, excluded=excluded),
        )

    def unplaceable(self, rank_state: RankState) -> str:
        """
        Return a sentence that says why no other process can be started for a rank, or "" if one can
        be started.
        """
        job = self._job
        if job.incident.decision.forced:
            return job.incident.decision.forced
        if job.state is S.DUMPING:
            return "a last checkpoint is being written"
        if job.home(rank_state) is None:
            node = rank_state.node
            if node in job.nodes.lost:
                return f"node {node} is lost, and no other node has room for its ranks"
            return (
                f"a process of rank {rank_state.rank} may still run on node {node}, since it could "
                "not be ended, and no other node has room for the rank"
            )
        if job.incident.turnover.respawns.get(rank_state.rank, 0) >= job.policy.respawns:
            return (
                f"rank {rank_state.rank} has died {job.policy.respawns + 1} times in this incident"
            )
        return job.flapping(rank_state.rank)

    def _without_room(self) -> list[int]:
        """
        Return the ranks that need another node and for which no other node has room. The free
        places on the nodes are given to ranks that need another node, in the order of the ranks.
        Only ranks that take part in training are looked at.
        """
        job, without = self._job, []
        left = dict(job.nodes.room)
        for rank_state in job.ranks.member_states():
            if rank_state.node in job.nodes.lost | {*rank_state.excluded_nodes.values()}:
                node = job.elsewhere(rank_state, left)
                if node is None:
                    without.append(rank_state.rank)
                else:
                    left[node] -= 1
        return without

    # ---------------------------------------------------------------- advice of recovery plugins

    def advised(self, message: Advised) -> None:
        """
        Handle the advice of the recovery plugins: rule out the strategies against which the plugins
        have a veto. Then choose a strategy, or wait if the plugins have asked for more time. Ignore
        advice about the offers of an earlier round.
        """
        job, incident = self._job, self._job.incident
        if (message.incident, message.round) != (incident.number, incident.round):
            return
        for strategy in message.veto:
            incident.decision.failed[strategy] = (
                f"a recovery plugin has ruled it out: {message.why}"
            )
        left = job.policy.patience - incident.decision.waited
        incident.decision.awaited = message.wait > 0 and left > 0
        if incident.decision.awaited:
            seconds = min(message.wait, left)
            incident.decision.waited += seconds
            job.timing.stay(seconds)
            job.tell("advice_awaited", seconds=seconds, why=message.why)
            return
        incident.decision.advice = message
        self.decide()

    def time_is_up(self) -> None:
        """
        End the wait for the advice of the recovery plugins. If the plugins had asked for more time,
        ask them again. If the plugins have not answered, choose a strategy without advice.
        """
        if self._job.incident.decision.awaited:
            self.ask()
        else:
            self.decide()

    # ---------------------------------------------------------------- choosing a strategy

    def decide(self) -> None:
        """
        Choose a strategy and follow it. If a plugin has advised a strategy that is possible, choose
        that strategy. Otherwise choose the first offered strategy that is possible.
        """
        incident = self._job.incident
        if incident.decision.advice is not None and self._heed(incident.decision.advice):
            return
        incident.decision.advice = None
        made = self.offers()
        chosen = next(offer for offer in made if offer.why_not is None)
        self._follow(made, chosen, chosen.strategy)

    def _heed(self, advice: Advised) -> bool:
        """
        Follow the strategy that the advice of a plugin names, if it is possible. Return True if the
        strategy is followed.
        """
        if not advice.strategy:
            return False
        made = self.offers()
        wanted = advice.base or advice.strategy
        unknown = Offer(strategy=wanted, why_not="there is no strategy with this name")
        offer = next((offer for offer in made if offer.strategy == wanted), unknown)
        why_not = offer.why_not or self._why_not_replace(advice, offer)
        if why_not is None:
            self._follow(made, offer, advice.strategy)
            return True
        self._job.tell("advice_not_followed", strategy=advice.strategy, why_not=why_not)
        return False

    def _why_not_replace(self, advice: Advised, offer: Offer) -> str | None:
        """
        Return a sentence that says why the ranks that the advice of a plugin names cannot be
        replaced by new processes. Return None if they can be replaced. Without the copies that
        these ranks hold, there must still be a step from which training can continue, in the memory
        of other ranks or in a checkpoint. This is not required if the ranks find and load a
        checkpoint themselves.
        """
        if not advice.base or not advice.replace or offer.reload:
            return None
        job, going = self._job, {*advice.replace, *offer.replace}
        staying = {r: s for r, s in standings_of(job, self.unplaceable).items() if r not in going}
        terms = _advised_terms(terms_of(job), advice)
        without_local_state = {
            r: steps for r, steps in terms.without_local_state.items() if r not in offer.leaving
        }
        step = agreed_step(
            job.ranks.topology(), staying, replace(terms, without_local_state=without_local_state)
        )
        return f"with ranks {sorted(going)} replaced, {step}" if isinstance(step, str) else None

    def _follow(self, made: tuple[Offer, ...], offer: Offer, name: str) -> None:
        """
        Follow the strategy of `offer`, which is one of the offers in `made`. `name` is the name of
        this strategy or, if a plugin has advised it under another name, that name.
        """
        job, incident = self._job, self._job.incident
        passed_over = "a recovery plugin has advised another strategy"
        if incident.decision.advice is not None and incident.decision.advice.why:
            passed_over += f": {incident.decision.advice.why}"
        incident.decision.tried = [
            (other.strategy, other.why_not or passed_over)
            for other in made[: made.index(offer)]
            if other.strategy not in OPPORTUNITIES or other.strategy in incident.decision.failed
        ]
        plan = Plan.of(offer, name)
        incident.decision.follow(plan)
        if "regroup" in incident.tasks and offer.strategy != "retry":
            # the ranks form process groups already, for a retry. These groups are of no use for
            # another strategy
            job.new_round()
        job.tell(
            "strategy_chosen",
            incident=incident.number,
            strategy=incident.decision.strategy,
            why=plan.why,
        )
        match offer.strategy:
            case "dump":
                self._shutdown.dump()
            case "exit":
                alike: dict[str, list[str]] = {}
                for strategy, why_not in incident.decision.tried:
                    alike.setdefault(why_not, []).append(strategy)
                reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in alike.items())
                why = f"no strategy is left ({reasons})"
                self._shutdown.exit("failed", 4, why)
            case _:
                self._go_on(plan)

    def _go_on(self, plan: Plan) -> None:
        """
        Begin to carry out a plan after which training continues: set which ranks take part in
        training, and start or end processes as the plan demands. The class `Restart` does the rest
        of the plan when all ranks that take part can carry out orders.
        """
        job, incident = self._job, self._job.incident
        advice = incident.decision.advice
        if advice is not None and advice.base:
            if advice.not_after is not None:
                incident.spread.lower(advice.not_after)
            incident.exactness.skip = max(incident.exactness.skip, advice.skip)
        job.move(S.AWAITING)
        # with more than two allowed attempts, the waits before the second, third and fourth attempt
        # are 0, 1 and 2 times `policy.backoff`. With two, the second attempt waits `policy.backoff`
        waits = incident.decision.attempts - (job.policy.attempts > 2)
        if waits > 0:
            job.timing.stay(job.policy.backoff * waits)
        if plan.strategy == "migrate":
            for rank in plan.replaced:
                self.take_over(rank)
        job.ranks.members = (job.ranks.members - {*plan.leaving}) | {*plan.joining}
        incident.turnover.joining |= {*plan.joining}
        for rank_state in job.ranks.member_states():
            # this rank takes part but has no process. Try again to start a process, because a node
            # may have room for one now
            if rank_state.process.stage is ProcessStage.GONE:
                job.respawn(rank_state)
        own = advice.replace if advice is not None and advice.base else ()
        going = {*plan.replaced, *own} if plan.strategy != "migrate" else set(own)
        for rank in sorted(going & job.ranks.members):
            if job.ranks.states[rank].ready:
                self._attempts.terminate(job.ranks.states[rank], self._why_replaced(), "process")

    def _why_replaced(self) -> str:
        """
        Return the reason why the plan replaces a rank whose process still runs. The agent that must
        end this process is given the reason.
        """
        advice = self._job.incident.decision.advice
        if advice is None:
            return f"no retry: {dict(self._job.incident.decision.tried)['retry']}"
        return advice.why or "a recovery plugin has advised it"

    def take_over(self, rank: int) -> None:
        """
        Give the rank to its successor (the second process that was started for it), and end the
        process that held the rank until now. For the successor, keep what is known about the shards
        and the rank-local state of the rank.
        """
        job = self._job
        old, successor = job.ranks.states[rank], job.succession.successors.pop(rank)
        job.succession.switch -= {rank}
        job.ranks.states[rank] = successor
        job.ranks.placed()
        successor.local_state.reported, successor.local_state.page, successor.local_state.since = (
            old.local_state.reported,
            old.local_state.page,
            old.local_state.since,
        )
        # the successor will hold the same shards as the old process. Copy what is known about them,
        # because a successor reports its shards only when it is ready
        successor.declared.shards, successor.declared.column, successor.declared.derives = (
            old.declared.shards,
            old.declared.column,
            old.declared.derives,
        )
        successor.declared.reloads = old.declared.reloads
        if old.process.stage is not ProcessStage.GONE:
            # keep the old process in the list `retiring`, because the report of its end will
            # contain the rank-local state that it has captured
            job.processes.retiring.append(old)
            why = "another process has taken the rank over"
            old.process.terminating, old.process.terminating_since = why, job.timing.now
            job.kill(old, why, last_words=False)
        elif old.node is not None:  # the lost process does not need its place on the node any more
            job.nodes.room[old.node] += 1


def _hopeless(made: tuple[Offer, ...]) -> bool:
    """
    Return True if no strategy except `exit` is possible.
    """
    return all(offer.why_not is not None for offer in made if offer.strategy != "exit")


def _advised_terms(terms: Terms, advice: Advised) -> Terms:
    return replace(terms, ceiling=_lower(terms.ceiling, advice.not_after if advice.base else None))


def _lower(ceiling: int | None, other: int | None) -> int | None:
    known = [step for step in (ceiling, other) if step is not None]
    return min(known, default=None)
