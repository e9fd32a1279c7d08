"""
Tests of the simulation's promises: the judgement is broken on purpose in one way at a time, and the
simulation finds each breach within a few dozen schedules.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import pytest

from tft.core.job import comparison
from tft.core.job.acknowledgements import Acknowledgements
from tft.core.job.attempts import Attempts
from tft.core.job.comparison import Comparison, Copy
from tft.core.job.dispatch import Dispatch
from tft.core.job.faults import Faults
from tft.core.job.incident import Progress, Spread
from tft.core.job.pause import Pausing
from tft.core.job.recovery import Recovery
from tft.core.job.restart import Restart
from tft.core.job.state import Job
from tft.core.job.strategy import StrategyChoice
from tft.core.job.transitions import State
from tft.core.plan import coverage, repair
from tft.core.plan.offers import Offer, offers
from tft.core.plan.repair import Repair, plan_repair
from tft.core.plan.savers import savers
from tft.core.plan.standing import Standing, Standings, Terms
from tft.core.plan.topology import Topology
from tft.core.rank.machine import RankMachine
from tft.core.rank.protocol import Located, Ordered, RankCommand, RankEvent
from tft.protocol.messages import Answered, Commit, RankOrder, Source, Transfer
from tft.simulation.run import run
from tft.simulation.schedule import QUICK, Mishap, Schedule, Trouble, draw

SEEDS = 48
"""In so many schedules a breach has to be noticed."""

Patch = pytest.MonkeyPatch


def drawn(wanted: Callable[[Schedule], bool] = lambda _: True) -> Iterable[Schedule]:
    """
    Return the first schedules that satisfy `wanted`, in which the broken code is likely to run.
    """
    return islice((s for seed in range(4000) if wanted(s := draw(seed))), SEEDS)


def where(wanted: Callable[[Schedule], bool]) -> Callable[[], Iterable[Schedule]]:
    """
    Return a function that draws such schedules later.
    """
    return lambda: drawn(wanted)


def somebody_dies_while_all_save() -> Iterable[Schedule]:
    """
    Return a schedule with slow messages and a last checkpoint that has to be planned twice.
    """
    dies = Mishap(what="kill", target=5, when="order", name="save", delay=0.2)
    for seed in range(SEEDS):
        yield Schedule(
            seed=seed,
            world=24,
            nodes=4,
            trouble=Trouble(delay=0.1),
            mishaps=(Mishap(what="request", delay=1.5), dies),
        )


def a_leader_that_hears_nothing_more() -> Iterable[Schedule]:
    """
    Return a schedule in which a leader hears nothing in the middle of an incident while another one
    takes over.
    """
    dies = Mishap(what="kill", target=1, when="phase", name="all-reduce", number=3)
    for seed in range(SEEDS):
        state = ("freezing", "clearing", "repairing", "rebuilding")[seed % 4]
        deaf = Mishap(what="deposed", kind="deaf", when="state", name=state, number=seed % 4 // 2)
        yield Schedule(seed=seed, world=8, nodes=2, standbys=1, mishaps=(dies, deaf))


def plugins_are_asked_again_and_again() -> Iterable[Schedule]:
    """
    Return a schedule with one broken connection after another.
    """
    policy = replace(QUICK, advised=True)
    for seed in range(SEEDS):
        breaks = (
            Mishap(what="network", target=step, when="phase", name="all-reduce", number=step)
            for step in range(2, 16)
        )
        yield Schedule(seed=seed, world=16, steps=16, policy=policy, mishaps=tuple(breaks))


def happens(*what: str) -> Callable[[Schedule], bool]:
    """
    Return a condition: the schedule has one of these mishaps.
    """
    return lambda schedule: any(mishap.what in what for mishap in schedule.mishaps)


def is_seen(*kinds: str) -> Callable[[Schedule], bool]:
    """
    Return a condition: a fault of one of these kinds is noticed from outside or found by a check.
    """
    return lambda schedule: any(mishap.kind in kinds for mishap in schedule.mishaps)


def keeps_its_own(schedule: Schedule) -> bool:
    """
    Return True for a job that keeps its own checkpoints and has one copy of most of its state.
    """
    return schedule.own > 0 and schedule.copies == 1


def everywhere(patch: Patch, name: str, function: object) -> None:
    """
    Replace a function of the judgement in all modules that use it.
    """
    users = [
        module
        for path, module in list(sys.modules.items())
        if path.startswith("tft.core.") and name in vars(module)
    ]
    assert users
    for module in users:
        patch.setattr(module, name, function)


# ---------------------------------------------------------------- breaches of the promises


def a_file_left_out_of_the_manifest(patch: Patch) -> None:
    issue = Job.issue

    def issues(self: Job, *orders: RankOrder, longer: float = 0.0) -> None:
        short = [replace(o, files=o.files[1:]) if isinstance(o, Commit) else o for o in orders]
        issue(self, *short, longer=longer)

    patch.setattr(Job, "issue", issues)


def a_healthy_rank_ended_in_every_incident(patch: Patch) -> None:
    after_freeze = Recovery._after_freeze

    def ends_one(self: Recovery) -> bool:
        job, going_on = self._job, after_freeze(self)
        if going_on and job.incident.number and job.incident.round == 1:
            well = [
                s
                for s in job.ranks.member_states()
                if s.ready and s.rank not in job.incident.faulty()
            ]
            if well and not job.ranks.only_on([well[-1].rank]):
                self.attempts.terminate(well[-1], "bad luck", "process")
        return going_on

    patch.setattr(Recovery, "_after_freeze", ends_one)


def a_check_without_consequences(patch: Patch) -> None:
    def goes_on(self: Pausing) -> None:
        self.release()

    patch.setattr(Pausing, "_checked", goes_on)


def the_oldest_step_instead_of_the_newest(patch: Patch) -> None:
    patch.setattr(coverage, "max", min, raising=False)


def the_oldest_checkpoint_instead_of_the_newest(patch: Patch) -> None:
    def oldest(terms: Terms) -> int | None:
        early = [s for s in terms.checkpoints if terms.ceiling is None or s <= terms.ceiling]
        return min(early, default=None)

    everywhere(patch, "newest_checkpoint", oldest)


def whoever_hears_an_order_obeys(patch: Patch) -> None:
    handle = RankMachine.handle

    def obeys(self: RankMachine, event: RankEvent) -> list[RankCommand]:
        if isinstance(event, Ordered):
            rank_states = event.order.incarnations | {self.rank: self.incarnation}
            event = replace(event, order=replace(event.order, incarnations=rank_states))
        return handle(self, event)

    patch.setattr(RankMachine, "handle", obeys)


def a_source_that_does_not_have_it(patch: Patch) -> None:
    transfers = repair._transfers

    def from_each_other(
        topology: Topology, standings: Standings, members: Collection[int], step: int, terms: Terms
    ) -> dict[int, tuple[Transfer, ...]]:
        planned = transfers(topology, standings, members, step, terms)
        wrong: dict[int, tuple[Transfer, ...]] = {}
        for rank, fetched in planned.items():
            other = next((r for r in planned if r != rank and standings[r].alive), None)
            sources = (
                () if other is None else (Source(rank=other, address=standings[other].address),)
            )
            wrong[rank] = tuple(replace(each, sources=sources or each.sources) for each in fetched)
        return wrong

    patch.setattr(repair, "_transfers", from_each_other)


def an_answer_to_an_older_round_counts(patch: Patch) -> None:
    answered = Acknowledgements.answered

    def counts(self: Acknowledgements, rank_state: object, message: Answered) -> None:
        now = replace(message, incident=self._job.incident.number, round=self._job.incident.round)
        answered(self, rank_state, now)  # type: ignore[arg-type] # it is a RankState

    patch.setattr(Acknowledgements, "answered", counts)


def a_fault_that_joins_is_forgotten(patch: Patch) -> None:
    fault = Attempts.fault

    def forgets(self: Attempts, *what: object) -> None:
        if self._job.state not in (State.FREEZING, State.CLEARING):
            fault(self, *what)  # type: ignore[arg-type] # passes its arguments on

    patch.setattr(Attempts, "fault", forgets)


def success_before_one_more_step(patch: Patch) -> None:
    advance = Recovery.advance

    def announces(self: Recovery) -> bool:
        job = self._job
        if job.state is State.RESUMING and job.answered_all("resume", "release"):
            return self._close()
        return advance(self)

    patch.setattr(Recovery, "advance", announces)


def a_shard_saved_twice(patch: Patch) -> None:

    def doubled(*what: object, **how: bool) -> dict[int, tuple[str, ...]]:
        plan = savers(*what, **how)  # type: ignore[arg-type] # passes its arguments on
        standings: Standings = what[1]  # type: ignore[assignment] # the second argument of `savers`
        shards = next(iter(plan.values()))
        return plan | {rank: shards for rank, s in standings.items() if s.alive}

    everywhere(patch, "savers", doubled)


def a_rank_that_fetches_nothing(patch: Patch) -> None:

    def forgets(*what: object) -> Repair | str:
        plan = plan_repair(*what)  # type: ignore[arg-type] # passes its arguments on
        if isinstance(plan, str):
            return plan
        return replace(plan, transfers=dict(list(plan.transfers.items())[1:]))

    everywhere(patch, "plan_repair", forgets)


def an_older_copy_taken_back(patch: Patch) -> None:

    def forgets(*what: object) -> Repair | str:
        plan = plan_repair(*what)  # type: ignore[arg-type] # passes its arguments on
        if isinstance(plan, str) or plan.step is None:
            return plan
        return replace(plan, step=max(0, plan.step - 1))

    everywhere(patch, "plan_repair", forgets)


def nothing_is_held_for_polluted(patch: Patch) -> None:
    patch.setattr(Spread, "lower", lambda _self, _ceiling: None)


def a_damaged_rank_gives_its_state_away(patch: Patch) -> None:
    patch.setattr(Faults, "_distrust", lambda *_, **__: None)


def an_old_leader_is_obeyed(patch: Patch) -> None:
    handle = RankMachine.handle

    def obeys(self: RankMachine, event: RankEvent) -> list[RankCommand]:
        self.epoch = 0
        return handle(self, event)

    patch.setattr(RankMachine, "handle", obeys)


def advice_is_ignored(patch: Patch) -> None:
    patch.setattr(StrategyChoice, "_heed", lambda _self, _advice: False)


def what_was_ruled_out_is_done(patch: Patch) -> None:
    advised = StrategyChoice.advised
    patch.setattr(
        StrategyChoice, "advised", lambda self, message: advised(self, replace(message, veto=()))
    )


def a_rank_that_moves_says_it_stands(patch: Patch) -> None:
    stands = RankMachine._stands

    def says(self: RankMachine, event: Located) -> list[RankCommand]:
        return stands(self, replace(event, still=True))

    patch.setattr(RankMachine, "_stands", says)


def paused_before_everyone_stands(patch: Patch) -> None:
    advance = Pausing.advance

    def hurries(self: Pausing) -> None:
        tasks = self._job.incident.tasks
        if self._job.state is State.PAUSING and "hold" in tasks:
            self._paused()
        else:
            advance(self)

    patch.setattr(Pausing, "advance", hurries)


def an_order_before_all_have_answered(patch: Patch) -> None:
    answered_all = Job.answered_all

    def hurries(self: Job, *orders: str) -> bool:
        if "rebuild" in orders:
            return True
        return answered_all(self, *orders)  # type: ignore[arg-type] # they are names of orders

    patch.setattr(Job, "answered_all", hurries)


def a_comparison_before_the_stop(patch: Patch) -> None:
    patch.setattr(RankMachine, "_must_wait", lambda *_: False)


def a_request_to_end_is_forgotten(patch: Patch) -> None:
    patch.setattr(Dispatch, "_stop_requested", lambda *_: None)


def the_end_at_the_first_chance(patch: Patch) -> None:

    def few(*what: object) -> tuple[Offer, ...]:
        made = offers(*what)  # type: ignore[arg-type] # passes its arguments on
        return tuple(o for o in made if o.strategy in ("dump", "exit"))

    everywhere(patch, "offers", few)


def an_incident_for_nothing(patch: Patch) -> None:
    trained = Dispatch._from_rank

    def frightened(self: Dispatch, rank_state: object, message: object) -> None:
        trained(self, rank_state, message)  # type: ignore[arg-type] # passes its arguments on
        if type(message).__name__ == "Checkpointed" and self._job.state is State.HEALTHY:
            self._recovery.attempts.freeze("who knows")
            self._recovery.attempts.open()

    patch.setattr(Dispatch, "_from_rank", frightened)


def a_second_process_for_a_rank(patch: Patch) -> None:
    close = Recovery._close

    def doubles(self: Recovery) -> bool:
        job, closed = self._job, close(self)
        rank_state = job.ranks.states[0]
        if job.incident.number and rank_state.node is not None:
            job.spawn(rank_state, rank_state.node, "to be sure")
        return closed

    patch.setattr(Recovery, "_close", doubles)


def a_bad_node_is_used_again(patch: Patch) -> None:
    isolate = Attempts.isolate

    def forgives(self: Attempts, *what: object) -> None:
        isolate(self, *what)  # type: ignore[arg-type] # passes its arguments on
        self._job.nodes.lost.clear()

    patch.setattr(Attempts, "isolate", forgives)


def whatever_is_found_instead_of_what_is_held(patch: Patch) -> None:

    def searches(*what: object) -> Repair | str:
        plan = plan_repair(*what)  # type: ignore[arg-type] # passes its arguments on
        there = isinstance(plan, Repair) and plan.step
        return Repair(step=None) if there else plan

    everywhere(patch, "plan_repair", searches)


def a_search_before_the_groups_are_formed(patch: Patch) -> None:
    repair = Restart._repair

    def hurries(self: Restart, plan: Repair, host: str, port: int) -> None:
        repair(self, plan, host, port)
        if plan.step is None:
            self._reload()

    patch.setattr(Restart, "_repair", hurries)


def another_step_than_the_one_that_is_found(patch: Patch) -> None:
    found = Restart._found

    def errs(self: Restart) -> str:
        why = found(self)
        incident = self._job.incident
        if not why and incident.progress.step is not None:
            incident.progress.step += 1
        return why

    patch.setattr(Restart, "_found", errs)


def what_it_costs_to_search_is_not_told(patch: Patch) -> None:
    patch.setattr(Progress, "steps_lost", property(lambda _: 0))


def copies_are_not_compared(patch: Patch) -> None:
    patch.setattr(Comparison, "_differences", lambda *_, **__: [])


def the_fewest_count(patch: Patch) -> None:
    chosen = comparison._chosen

    def errs(
        copies: Iterable[Copy], alike: Mapping[int, frozenset[tuple[str, str]]]
    ) -> frozenset[tuple[str, str]] | None:
        best = chosen(copies, alike)
        return next((each for each in alike.values() if each != best), None)

    patch.setattr(comparison, "_chosen", errs)


def the_first_is_right_where_nobody_knows(patch: Patch) -> None:
    chosen = comparison._chosen

    def guesses(
        copies: Iterable[Copy], alike: Mapping[int, frozenset[tuple[str, str]]]
    ) -> frozenset[tuple[str, str]] | None:
        return chosen(copies, alike) or next(iter(alike.values()))

    patch.setattr(comparison, "_chosen", guesses)


def a_step_ends_with_its_window(patch: Patch) -> None:
    def everyone(
        shard: str, ranks: Iterable[int], standings: Standings, step: int,
        ceiling: int | None,
    ) -> list[Standing]:  # fmt: skip
        there = [standings[rank] for rank in ranks if rank in standings]
        return [each for each in there if each.has(shard, step, ceiling)]

    everywhere(patch, "sound", everyone)


def what_was_cut_off_is_not_told(patch: Patch) -> None:
    everywhere(patch, "note_tails", lambda *_: None)


def has_tails(schedule: Schedule) -> bool:
    """
    Return True for a job in whose tails one rank does not wait for the others.
    """
    return schedule.averages and schedule.broadcasts


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """
    One way in which the judgement could be wrong.
    """

    breaks: Callable[[Patch], None]
    promise: str
    """That is noticed not to be kept."""
    schedules: Callable[[], Iterable[Schedule]] = drawn


BREACHES = (
    Breach(breaks=a_file_left_out_of_the_manifest, promise="checkpoints must be complete"),
    Breach(
        breaks=a_healthy_rank_ended_in_every_incident,
        promise="a process may be ended only for a reported reason",
    ),
    Breach(
        breaks=a_check_without_consequences,
        promise="an isolated node must get no process",
        schedules=where(is_seen("isolate", "end")),
    ),
    Breach(
        breaks=a_bad_node_is_used_again,
        promise="an isolated node must get no process",
        schedules=where(is_seen("isolate")),
    ),
    Breach(
        breaks=the_oldest_step_instead_of_the_newest,
        promise="the newest step with sound copies must be chosen",
        schedules=where(lambda schedule: schedule.backups > 0),
    ),
    Breach(
        breaks=the_oldest_checkpoint_instead_of_the_newest,
        promise="the newest step with sound copies must be chosen",
        schedules=where(
            lambda s: s.checkpoints > 0 and not s.backups and s.copies == 1 and s.steps > 6
        ),
    ),
    Breach(
        breaks=whoever_hears_an_order_obeys,
        promise="only the current process of a rank may carry out orders",
        schedules=where(lambda s: bool(s.spares or s.room) and is_seen("straggler")(s)),
    ),
    Breach(
        breaks=a_source_that_does_not_have_it,
        promise="shards may be fetched only from sound copies",
    ),
    Breach(
        breaks=an_answer_to_an_older_round_counts,
        promise="an order must wait for the answers to earlier orders",
        schedules=somebody_dies_while_all_save,
    ),
    Breach(
        breaks=a_comparison_before_the_stop,
        promise="a rank must stop before it compares copies and forms groups",
    ),
    Breach(breaks=a_fault_that_joins_is_forgotten, promise="each fault must belong to an incident"),
    Breach(
        breaks=success_before_one_more_step,
        promise="a recovery may count as a success only after one more step",
    ),
    Breach(breaks=a_shard_saved_twice, promise="each shard must be saved by only one rank"),
    Breach(breaks=a_rank_that_fetches_nothing, promise="a rank must resume with the right state"),
    Breach(
        breaks=an_older_copy_taken_back, promise="the newest step with sound copies must be chosen"
    ),
    Breach(
        breaks=nothing_is_held_for_polluted,
        promise="a rank must resume with the right state",
        schedules=where(happens("pollute")),
    ),
    Breach(
        breaks=a_damaged_rank_gives_its_state_away,
        promise="a rank must resume with the right state",
    ),
    Breach(
        breaks=whatever_is_found_instead_of_what_is_held,
        promise="the newest step with sound copies must be chosen",
        schedules=where(keeps_its_own),
    ),
    Breach(
        breaks=a_search_before_the_groups_are_formed,
        promise="an order must wait for the answers to earlier orders",
        schedules=where(keeps_its_own),
    ),
    Breach(
        breaks=another_step_than_the_one_that_is_found,
        promise="all ranks must find the same step",
        schedules=where(keeps_its_own),
    ),
    Breach(
        breaks=what_it_costs_to_search_is_not_told,
        promise="lost steps must be reported",
        schedules=where(lambda s: keeps_its_own(s) and s.own == 3),
    ),
    Breach(
        breaks=an_old_leader_is_obeyed,
        promise="orders of an older epoch or round must be ignored",
        schedules=a_leader_that_hears_nothing_more,
    ),
    Breach(
        breaks=advice_is_ignored,
        promise="advice must be followed",
        schedules=where(lambda schedule: schedule.policy.advised),
    ),
    Breach(
        breaks=what_was_ruled_out_is_done,
        promise="advice must be followed",
        schedules=plugins_are_asked_again_and_again,
    ),
    Breach(
        breaks=a_rank_that_moves_says_it_stands,
        promise="no rank may train in a pause",
        schedules=where(happens("pause")),
    ),
    Breach(
        breaks=paused_before_everyone_stands,
        promise="no rank may train in a pause",
        schedules=where(happens("pause")),
    ),
    Breach(
        breaks=an_order_before_all_have_answered,
        promise="an order must wait for the answers to earlier orders",
    ),
    Breach(
        breaks=a_request_to_end_is_forgotten,
        promise="the job must end if its end was requested",
        schedules=where(happens("request")),
    ),
    Breach(
        breaks=the_end_at_the_first_chance, promise="the job may end only if no strategy can work"
    ),
    Breach(
        breaks=an_incident_for_nothing,
        promise="an incident must begin with a fault",
        schedules=where(lambda schedule: schedule.checkpoints > 0),
    ),
    Breach(breaks=a_second_process_for_a_rank, promise="a rank must have only one process"),
    Breach(
        breaks=copies_are_not_compared,
        promise="copies must be equal when training resumes",
        schedules=where(happens("flip")),
    ),
    Breach(
        breaks=the_fewest_count,
        promise="the content that most ranks hold must count as right",
        schedules=where(happens("flip")),
    ),
    Breach(
        breaks=the_first_is_right_where_nobody_knows,
        promise="a copy of unknown correctness must not be used",
        schedules=where(
            lambda s: happens("flip")(s) and s.copies == 2 and s.topology != "replicated"
        ),
    ),
    Breach(
        breaks=a_step_ends_with_its_window,
        promise="state from the end of a step must not be replaced by state from its tail",
        schedules=where(has_tails),
    ),
    Breach(
        breaks=what_was_cut_off_is_not_told,
        promise="an inexact recovery must be reported",
        schedules=where(has_tails),
    ),
)


@pytest.mark.parametrize(
    "breach",
    [
        # a third in `make test`, and all of them in `make soak`
        pytest.param(breach, marks=pytest.mark.soak if number % 3 else ())
        for number, breach in enumerate(BREACHES)
    ],
    ids=lambda breach: breach.breaks.__name__,
)
def test_simulation_finds_each_broken_promise(breach: Breach, monkeypatch: Patch) -> None:
    """When the core is deliberately broken in one way, then the simulation reports the promise that
    this breaks within 48 schedules."""
    schedules = list(breach.schedules())
    breach.breaks(monkeypatch)
    found = (run(schedule).broken for schedule in schedules)
    assert any(broken == breach.promise for broken in found)
