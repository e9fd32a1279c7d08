"""
Recovery plugins: asked before a strategy is followed, and how far they are followed.
"""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from tests.core.lives import names, strategies, trained, tried
from tft.core.job.commands import Consult
from tft.core.job.incident import Fault
from tft.core.job.policy import Policy
from tft.errors import UsageError
from tft.protocol.messages import Kill, Regroup, Restore, Rollback, Save, Spawn
from tft.spi import Advice, IncidentView, hookimpl
from tft.testing.scripted import ScriptedJob

WITH_ROOM = {0: (0, 1), 1: (2, 3), 2: ()}
COLUMNS = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}


def asked(*, rank: int = 2, **facts: Any) -> ScriptedJob:  # Any: as in `trained`
    """
    A job in which a rank's memory has failed and plugins are asked what to do.
    """
    job = trained(advised=True, **facts)
    job.fault(rank, "memory")
    job.settle()
    assert job.doing == "choosing"
    return job


def followed(job: ScriptedJob) -> str:
    """
    What is followed in the open incident.
    """
    return job.machine.incident.decision.strategy


# ---------------------------------------------------------------- asking


def test_plugins_are_asked_when_everyone_stands_still() -> None:
    """
    When everyone has stopped, then the plugins see the faults and every strategy in the order in
    which they would be tried, with what it would do or why it cannot be; nothing else is ordered
    until they answer.
    """
    job = asked()
    assert names(job.said) == ["Freeze", "Stop", "Compare"]
    (consult,) = job.consulted
    assert (consult.incident, consult.round) == (1, 1)
    assert [(f.kind, f.rank, f.step) for f in consult.faults] == [("memory", 2, 4)]
    assert isinstance(consult.faults[0], Fault)
    assert [(o.strategy, o.why_not, o.step) for o in consult.offers] == [
        ("migrate", "no process is ready to take over", None),
        ("scale_out", "no rank is ready to come back", None),
        ("retry", None, 3),
        ("recover", None, 3),
        ("scale_in", "no rank has to leave", None),
        ("dump", None, 3),
        ("exit", None, None),
    ]
    assert consult.until == pytest.approx(job.now + 30.0, abs=1.0)
    assert job.machine.next_deadline() == consult.until
    assert {o.strategy: o.why for o in consult.offers if o.why} == {
        "retry": "every process is kept; training goes on after step 3",
        "recover": "ranks [2] get another process, although their processes are alive; training "
        "goes on after step 3",
        "dump": "a last checkpoint of step 3 is written",
        "exit": "nothing is saved",
    }


def test_nobody_is_asked_where_nobody_wants_to_be() -> None:
    """
    When no plugin wants a say, then the first strategy that can work is followed at once.
    """
    job = trained()
    job.fault(2, "memory")
    job.settle()
    job.train()
    assert job.consulted == []
    assert strategies(job) == ["retry"]


def test_nobody_is_asked_how_to_start() -> None:
    """
    When the job starts without a fault, then there is nothing to choose.
    """
    assert trained(advised=True).consulted == []


def test_nobody_is_asked_where_nothing_but_the_end_comes_into_question() -> None:
    """
    When a user's own bug ends the job, or somebody asks for its end, then that is no question.
    """
    stopped, broken = trained(advised=True), trained(advised=True)
    stopped.stop(0)
    broken.fault(1, "software")
    for job in (stopped, broken):
        job.settle()
        assert job.consulted == []
        assert job.over is not None
        assert job.over.result == "dumped"


def test_what_a_shrinking_would_cost_stands_in_the_offer() -> None:
    """
    When a node is lost that has no other place, then the plugins read who would leave.
    """
    job = trained(advised=True, placement={0: (0, 1), 1: (2, 3)}, columns=COLUMNS)
    job.lose_node(1)
    job.settle()
    (offer,) = (o for o in job.consulted[-1].offers if o.strategy == "scale_in")
    assert (offer.why_not, offer.leaving, offer.step) == (None, (2, 3), 3)


def test_plugins_see_every_rank_with_its_place_and_its_copies() -> None:
    """
    When a node is lost, then the plugins see of each rank its node, its process, its step, its
    shards and the ranks that leave with it; of the lost ranks, why there is no place for them.
    """
    job = trained(advised=True, placement={0: (0, 1), 1: (2, 3)}, columns=COLUMNS)
    job.lose_node(1)
    job.settle()
    ranks = job.consulted[-1].ranks
    assert [(r.rank, r.node, r.member, r.alive, r.held, r.sound) for r in ranks] == [
        (0, 0, True, True, 3, True),
        (1, 0, True, True, 3, True),
        (2, 1, True, False, None, True),
        (3, 1, True, False, None, True),
    ]
    assert [(r.shards, r.column) for r in ranks] == [
        (("dense",), COLUMNS[0]),
        (("dense",), COLUMNS[1]),
        (("dense",), COLUMNS[2]),
        (("dense",), COLUMNS[3]),
    ]
    assert [bool(r.unplaceable) for r in ranks] == [False, False, True, True]
    seen: list[IncidentView] = []
    job.ask(SimpleNamespace(tft_advise=hookimpl(lambda incident: seen.append(incident))))
    assert [asdict(rank) for rank in seen[0].ranks] == [asdict(rank) for rank in ranks]


def test_plugins_see_what_a_rank_keeps_in_the_order_of_the_steps() -> None:
    """
    When a rank reports the copies that it keeps in some order, then the plugins see their steps in order.
    """
    job = trained(advised=True, keeps=2)
    job.ranks[1].state.backups = (2, 1)
    job.fault(2, "memory")
    job.settle()
    assert [rank.backups for rank in job.consulted[-1].ranks] == [(1, 2), (1, 2), (), (1, 2)]


def test_a_plugin_can_be_asked_without_a_controller() -> None:
    """
    When a test of a plugin asks it, then it sees the incident as in a real job, and its answer is
    followed; what fits no hook is refused, and what it raises is raised.
    """
    job = asked()
    with pytest.raises(UsageError, match="tft_advice"):
        job.ask(SimpleNamespace(tft_advice=hookimpl(lambda incident: None)))
    with pytest.raises(ZeroDivisionError):
        job.ask(SimpleNamespace(tft_advise=hookimpl(lambda: 1 / 0)))
    advice = job.ask(
        SimpleNamespace(
            tft_advise=hookimpl(
                lambda incident: Advice(strategy=incident.offers[3].strategy, why="so it goes")
            )
        )
    )
    assert advice == Advice(strategy="recover", why="so it goes")
    assert followed(job) == "recover"


# ---------------------------------------------------------------- answers


def test_no_advice_means_the_default() -> None:
    """
    When the plugins have nothing to say, then the first strategy that can work is followed.
    """
    job = asked()
    job.advise()
    assert followed(job) == "retry"
    job.settle()
    job.train()
    assert job.doing == "healthy"


def test_the_strategy_that_is_named_is_followed() -> None:
    """
    When a plugin names a strategy that is not the first, then it is followed, and for those that
    were passed over the report says why.
    """
    job = asked()
    job.advise(strategy="recover")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["strategy"] == "recover"
    assert tried(job) == {"retry": "another was advised: the scheduler says so"}
    assert [k.rank for k in job.orders(Kill)] == [2]
    assert job.doing == "healthy"


def test_a_dump_can_be_advised() -> None:
    """
    When a plugin would rather have the job end, then it is saved and ends.
    """
    job = asked()
    job.advise(strategy="dump")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    why = "another was advised: the scheduler says so"
    assert tried(job)["retry"] == tried(job)["recover"] == why


def test_an_end_without_a_checkpoint_can_be_advised() -> None:
    """
    When a plugin says that the job is to exit, then nothing is saved.
    """
    job = asked()
    job.advise(strategy="exit")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.orders(Save) == []
    assert "dump: another was advised: the scheduler says so" in job.over.why


def test_a_veto_rules_out_for_the_whole_incident() -> None:
    """
    When a plugin rules a strategy out, then the next one is followed, and the first is not taken
    up again when another fault joins.
    """
    job = asked()
    job.advise(veto=("retry",))
    assert followed(job) == "recover"
    job.fault(0, "memory")
    job.settle()
    why = "a recovery plugin has ruled it out: the scheduler says so"
    retry = next(o for o in job.consulted[-1].offers if o.strategy == "retry")
    assert retry.why_not == why
    job.advise()
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert tried(job) == {"retry": why}


def test_a_veto_of_everything_still_leaves_the_end() -> None:
    """
    When everything is ruled out, the end too, then the job ends: nobody can be kept for ever.
    """
    job = asked()
    job.advise(veto=("retry", "recover", "scale_in", "dump", "exit"))
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)


def test_a_veto_does_not_outlive_its_incident() -> None:
    """
    When the next incident comes, then what was ruled out in the last one is offered again.
    """
    job = asked()
    job.advise(veto=("retry",))
    job.settle()
    job.train()
    job.fault(1, "memory")
    job.settle()
    job.advise()
    assert followed(job) == "retry"


@pytest.mark.parametrize(
    ("said", "why_not"),
    [
        ({"strategy": "scale_in"}, "no rank has to leave"),
        ({"strategy": "pray"}, "nobody offered it"),
        ({"strategy": "mine", "base": "pray"}, "nobody offered it"),
        (
            {"strategy": "mine", "base": "retry", "not_after": 1},
            "no sound copy of shard 'dense', of step 1 or earlier, is left on ranks [0, 1, 2, 3]",
        ),
        ({"strategy": "retry", "veto": ("retry",)}, None),
    ],
)
def test_advice_that_cannot_be_followed_changes_nothing(
    said: dict[str, Any],  # Any: the fields of Advised
    why_not: str | None,
) -> None:
    """
    When what is advised cannot work, or nobody knows it, then the first strategy that can is
    followed, and the operator reads why the advice was not.
    """
    job = asked()
    job.advise(**said)
    assert followed(job) == ("retry" if "veto" not in said else "recover")
    (told,) = job.facts("advice_not_followed")
    assert told["strategy"] == said["strategy"]
    if why_not is not None:
        assert told["why_not"] == why_not
    job.settle()
    job.train()
    assert job.doing == "healthy"


# ---------------------------------------------------------------- strategies of their own


def test_a_strategy_of_its_own_is_one_of_ours_under_another_name() -> None:
    """
    When a plugin brings a variant of `retry` that goes back further and leaves batches out, then
    that is done and reported under its name.
    """
    job = asked(keeps=2)
    job.advise(strategy="cool_down", base="retry", not_after=2, skip=3)
    job.settle()
    job.train()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((0, 1, 3), 2)]
    assert [(r.step, r.skip) for r in job.orders(Rollback)] == [(2, 3)]
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("cool_down", 3, 1)
    assert job.facts("strategy_chosen")[-1]["strategy"] == "cool_down"


def test_a_strategy_of_its_own_may_replace_processes_that_live() -> None:
    """
    When a plugin has the processes of more ranks replaced, then they are ended and started again
    with the reason it gives.
    """
    job = asked(groups={"dense": (0, 1, 2, 3)})
    job.advise(strategy="fresh", base="recover", replace=(0,), why="their driver is old")
    job.settle()
    job.train()
    assert sorted(k.rank for k in job.orders(Kill)) == [0, 2]
    assert {k.cause for k in job.orders(Kill)} == {"their driver is old"}
    assert sorted(s.rank for s in job.orders(Spawn)) == [0, 2]
    assert strategies(job) == ["fresh"]


def test_only_a_strategy_of_its_own_goes_back_further() -> None:
    """
    When a plugin names one of ours and a step, but no base, then the step is not heeded.
    """
    job = asked(keeps=2)
    job.advise(strategy="retry", not_after=1, skip=2)
    job.settle()
    assert job.orders(Restore) == []
    assert [(r.step, r.skip) for r in job.orders(Rollback)] == [(3, 0)]


def test_a_strategy_of_its_own_does_not_undo_what_is_known() -> None:
    """
    When numbers are polluted and a plugin would not go back that far, then the pollution counts.
    """
    job = trained(advised=True, keeps=2)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.advise(strategy="mine", base="retry", not_after=3)
    job.settle()
    assert {r.step for r in job.orders(Restore)} == {2}


def test_a_strategy_of_its_own_that_does_not_help_counts_as_its_base() -> None:
    """
    When the same fault comes back after it, then its base has failed, and it is not followed
    again.
    """
    job = asked()
    job.advise(strategy="mine", base="retry")
    job.settle()
    job.fault(2, "memory")
    job.settle()
    job.advise(strategy="mine", base="retry")
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert job.facts("advice_not_followed")[-1]["why_not"] == (
        "the memory fault at step 4 occurred again"
    )


# ---------------------------------------------------------------- time


def test_no_answer_in_time_means_the_default() -> None:
    """
    When the plugins have not answered after the limit, then the job goes on without them.
    """
    job = asked(advice=12.0)
    began = job.now
    job.wait()
    assert job.now == pytest.approx(began + 12.0, abs=0.1)
    assert followed(job) == "retry"
    assert len(job.consulted) == 1


def test_whoever_wants_time_is_asked_again() -> None:
    """
    When a plugin asks for time, then everyone waits that long, and it is asked once more, about
    what can be done by then.
    """
    job = trained(advised=True, placement={0: (0, 1), 1: (2, 3)})
    job.lose_node(1)
    job.settle()
    recover = next(o for o in job.consulted[-1].offers if o.strategy == "recover")
    assert recover.why_not == "node 1 is gone, and its ranks have no other place"
    job.advise(wait=45.0, why="a node is on its way")
    assert job.facts("advice_awaited") == [{"seconds": 45.0, "why": "a node is on its way"}]
    assert job.machine.next_deadline() == job.now + 45.0
    job.spare[5] = 2
    job.come(5)
    job.settle()
    assert job.doing == "choosing"
    job.wait()
    assert len(job.consulted) == 2
    assert job.consulted[-1].round == job.consulted[0].round
    recover = next(o for o in job.consulted[-1].offers if o.strategy == "recover")
    assert recover.why_not is None
    job.advise(strategy="recover")
    job.settle()
    job.train()
    assert [(s.rank, s.node) for s in job.orders(Spawn)] == [(2, 5), (3, 5)]
    assert strategies(job) == ["recover"]
    assert job.doing == "healthy"


def test_half_a_second_is_time_too() -> None:
    """
    When a plugin asks for half a second, then the decision is made after that time and not before.
    """
    job = asked()
    job.advise(wait=0.5)
    assert job.doing == "choosing"
    assert job.machine.next_deadline() == job.now + 0.5


def test_a_strategy_that_was_passed_over_without_a_reason_has_a_plain_sentence() -> None:
    """
    When a plugin advises a strategy and gives no reason, then the report says of the others only
    that another one was advised.
    """
    job = asked()
    job.advise(strategy="dump", why="")
    job.settle()
    assert tried(job)["retry"] == "another was advised"


def test_patience_is_limited() -> None:
    """
    When plugins ask for time again and again, then in one incident they get no more than the
    limit in all; after that their answer is taken as it is.
    """
    job = asked(patience=40.5)
    job.advise(wait=40.0)
    job.wait()
    job.advise(wait=40.0)
    assert job.machine.next_deadline() == job.now + 0.5
    job.wait()
    assert job.doing == "choosing"
    job.advise(wait=40.0)
    assert followed(job) == "retry"
    assert [f["seconds"] for f in job.facts("advice_awaited")] == [40.0, 0.5]


def test_time_is_counted_anew_in_another_incident() -> None:
    """
    When the patience of one incident is used up, then the next one has its own.
    """
    job = asked(patience=50.0)
    job.advise(wait=50.0)
    job.wait()
    job.advise()
    job.settle()
    job.train()
    job.fault(1, "memory")
    job.settle()
    job.advise(wait=20.0)
    assert job.machine.next_deadline() == job.now + 20.0


def test_what_is_named_while_time_is_asked_for_is_not_followed_yet() -> None:
    """
    When a plugin names a strategy and asks for time, then the time comes first; and a veto counts
    at once.
    """
    job = asked()
    job.advise(strategy="dump", wait=20.0, veto=("retry",))
    assert job.doing == "choosing"
    job.wait()
    assert next(o for o in job.consulted[-1].offers if o.strategy == "retry").why_not
    job.advise()
    assert followed(job) == "recover"


# ---------------------------------------------------------------- what is late


def test_advice_to_what_is_no_longer_offered_is_absorbed() -> None:
    """
    When another fault joins before the plugins answer, then they are asked anew, and the answer
    to the first question counts for nothing.
    """
    job = asked()
    first = job.consulted[-1]
    job.kill(0)
    job.settle()
    second = job.consulted[-1]
    assert (second.incident, second.round) == (1, first.round + 1)
    assert {(f.kind, f.rank) for f in second.faults} == {("memory", 2), ("process", 0)}
    job.advise(round=first.round, strategy="dump")
    assert job.doing == "choosing"
    job.advise(incident=7, strategy="dump")
    assert job.doing == "choosing"
    job.advise()
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]


def test_advice_that_nobody_asked_for_is_absorbed() -> None:
    """
    When advice comes while everyone trains, or after a strategy is followed, then nothing follows.
    """
    job = asked()
    job.advise()
    before = len(job.said)
    job.advise(strategy="dump")
    assert len(job.said) == before
    job.settle()
    job.train()
    job.advise(strategy="dump")
    assert job.doing == "healthy"


def test_whoever_waits_for_advice_is_asked_again_by_the_next_leader() -> None:
    """
    When the controller is lost while it asks, then the next one asks again, and gives as much
    time as the first did.
    """
    job = asked()
    job.now += 25.0
    job.lead(2)
    assert len(job.consulted) == 2
    assert job.consulted[1].round == job.consulted[0].round
    assert job.machine.next_deadline() == job.now + 30.0
    job.advise(strategy="recover")
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]


def test_a_leader_lost_while_time_was_given_asks_again() -> None:
    """
    When the controller is lost while plugins wanted time, then the next one asks whether they
    still do.
    """
    job = asked()
    job.advise(wait=100.0)
    job.lead(2)
    assert len(job.consulted) == 2
    job.advise(strategy="recover")
    assert followed(job) == "recover"


def test_plugins_are_asked_again_when_a_strategy_did_not_help() -> None:
    """
    When what was followed did not help, then the plugins are asked in the next round, and read
    what has failed.
    """
    job = asked()
    job.advise()
    job.settle()
    job.fault(2, "memory")
    job.settle()
    assert [(c.incident, c.round) for c in job.consulted] == [(1, 1), (1, 2)]
    retry = next(o for o in job.consulted[-1].offers if o.strategy == "retry")
    assert retry.why_not == "the memory fault at step 4 occurred again"


def test_what_was_followed_before_says_nothing_to_what_comes_then() -> None:
    """
    When another fault joins after advice was followed, and nobody answers this time, then the
    default is followed, not what was advised before.
    """
    job = asked()
    job.script.slow = {2}
    job.advise(strategy="mine", base="recover")
    job.settle()
    assert (job.doing, followed(job)) == ("awaiting", "mine")
    job.fault(0, "memory")
    assert job.doing == "choosing"
    job.wait()
    assert followed(job) == "recover"


def test_an_incident_that_ends_while_plugins_are_asked_has_followed_nothing() -> None:
    """
    When everybody is lost after a strategy was chosen, and the end is asked for while plugins are
    asked again, then the report does not say that it was that strategy which ended the incident.
    """
    job = asked()
    job.script.slow = {0, 1, 2, 3}
    job.advise(strategy="recover")
    assert followed(job) == "recover"
    for rank in (0, 1, 3):
        job.kill(rank)
        job.settle()
    assert job.doing == "choosing"
    job.stop(15)
    assert strategies(job) == ["exit"]


def test_nobody_is_asked_about_a_start_that_is_no_incident() -> None:
    """
    When a node is given up before any rank has come so far that something could be lost, and the
    processes there end by themselves, then there is no incident that plugins could be asked about:
    the ranks are started elsewhere.
    """
    job = ScriptedJob(4, Policy(advised=True), placement=WITH_ROOM, spare={2: 2})
    job.script.slow = {0, 1, 2, 3}
    job.start()
    job.notice(3, "node", "its fan has failed")
    job.kill(2, 0)
    job.kill(3, 0)
    job.settle()
    assert job.consulted == []
    assert job.doing == "awaiting"
    assert [(s.rank, s.node) for s in job.orders(Spawn)][-2:] == [(2, 2), (3, 2)]


def test_a_pause_is_kept_while_advice_is_awaited() -> None:
    """
    When a pause is asked for while plugins are asked, then it begins when the job is healthy.
    """
    job = asked()
    job.pause()
    job.advise()
    job.settle()
    job.train()
    assert job.doing == "paused"


def test_an_end_asked_for_while_advice_is_awaited_is_not_discussed() -> None:
    """
    When somebody asks for the end while plugins are asked, then the job is saved at once.
    """
    job = asked()
    job.stop()
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("cancelled", 143)
    assert len(job.consulted) == 1


def test_a_rank_that_is_ended_while_advice_is_awaited_is_awaited_first() -> None:
    """
    When a rank is told to end while plugins are asked, then nothing is decided before its end has
    come in: what it leaves behind is not known before.
    """
    job = asked()
    job.notice(0, "process", "its container is gone")
    assert [k.rank for k in job.orders(Kill)] == [0]
    assert len(job.consulted) == 1
    assert job.machine.next_deadline() == pytest.approx(job.now + 10.0)  # for its end alone
    job.settle()
    assert len(job.consulted) == 2
    assert {f.rank for f in job.consulted[-1].faults} == {0, 2}


def test_advice_is_asked_for_a_chance_as_well() -> None:
    """
    When a straggler's successor is ready, then the plugins may keep the job from changing over.
    """
    job = trained(advised=True, placement=WITH_ROOM, spare={2: 1})
    job.notice(3, "straggler", "its clock is throttled")
    job.settle()
    consult: Consult = job.consulted[-1]
    assert consult.offers[0].strategy == "migrate"
    assert consult.offers[0].why_not is None
    job.advise(veto=("migrate",))
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert tried(job) == {"migrate": "a recovery plugin has ruled it out: the scheduler says so"}
    assert job.ranks[3].incarnation == 0
    assert [r.incarnations for r in job.orders(Regroup)] == [{}]
