"""
Recovery plugins: when they are asked, how their advice is followed, and which ranks they may replace.
"""

from dataclasses import (
    asdict,
)
from types import (
    SimpleNamespace,
)
from typing import (
    Any,
)

import pytest

from tests.core.lives import (
    names,
    strategies,
    trained,
    tried,
)
from tft.core.job.commands import (
    Consult,
)
from tft.core.job.incident import (
    Fault,
)
from tft.core.job.policy import (
    Policy,
)
from tft.errors import (
    UsageError,
)
from tft.protocol.messages import (
    Kill,
    Regroup,
    Restore,
    Rollback,
    Save,
    Spawn,
)
from tft.spi import (
    Advice,
    IncidentView,
    hookimpl,
)
from tft.testing.scripted import (
    ScriptedJob,
)

WITH_ROOM = {0: (0, 1), 1: (2, 3), 2: ()}
COLUMNS = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}


def asked(*, rank: int = 2, **facts: Any) -> ScriptedJob:  # Any: as in `trained`
    """
    Return a job in which the memory of `rank` has failed and the recovery plugins have been asked.
    """
    job = trained(advised=True, **facts)
    job.fault(rank, "memory")
    job.settle()
    assert job.doing == "choosing"
    return job


def followed(job: ScriptedJob) -> str:
    """
    Return the strategy that the open incident follows.
    """
    return job.machine.incident.decision.strategy


# ---------------------------------------------------------------- requests for advice


def test_plugins_are_asked_when_all_ranks_have_stopped() -> None:
    """When a fault has stopped all ranks, then the recovery plugins see the faults and all
    strategies in their order of preference. Each strategy comes with its effect or with the reason
    against it. The ranks get no further order before the plugins answer."""
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


def test_first_strategy_is_followed_when_no_plugin_advises() -> None:
    """When no recovery plugin gives advice, then no plugin is asked, and the job follows the first
    strategy that can work."""
    job = trained()
    job.fault(2, "memory")
    job.settle()
    job.train()
    assert job.consulted == []
    assert strategies(job) == ["retry"]


def test_plugins_are_not_asked_at_a_start_without_a_fault() -> None:
    """When the job starts without a fault, then the plugins are not asked."""
    assert trained(advised=True).consulted == []


def test_plugins_are_not_asked_when_the_job_must_end() -> None:
    """When a software fault of the script or a stop request ends the job, then the plugins are not
    asked. The job writes a last checkpoint and ends."""
    stopped, broken = trained(advised=True), trained(advised=True)
    stopped.stop(0)
    broken.fault(1, "software")
    for job in (stopped, broken):
        job.settle()
        assert job.consulted == []
        assert job.over is not None
        assert job.over.result == "dumped"


def test_scale_in_offer_names_the_ranks_that_leave() -> None:
    """When a node is lost and its ranks have no other place, then the `scale_in` offer names the
    ranks that leave."""
    job = trained(advised=True, placement={0: (0, 1), 1: (2, 3)}, columns=COLUMNS)
    job.lose_node(1)
    job.settle()
    (offer,) = (o for o in job.consulted[-1].offers if o.strategy == "scale_in")
    assert (offer.why_not, offer.leaving, offer.step) == (None, (2, 3), 3)


def test_plugins_see_the_node_step_and_shards_of_every_rank() -> None:
    """When a node is lost, then the plugins see the node, process, step, shards and model replica
    of each rank. For each lost rank they see why no node has a place for it."""
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


def test_plugins_see_kept_copies_in_step_order() -> None:
    """When a rank reports its kept copies in any order, then the plugins see the steps of these
    copies in ascending order."""
    job = trained(advised=True, keeps=2)
    job.ranks[1].state.backups = (2, 1)
    job.fault(2, "memory")
    job.settle()
    assert [rank.backups for rank in job.consulted[-1].ranks] == [(1, 2), (1, 2), (), (1, 2)]


def test_plugin_is_asked_by_a_test_without_a_controller() -> None:
    """When a test asks a plugin, then the plugin sees the incident as in a real job, and its advice
    is followed. An unknown hook is refused, and an exception of the plugin is raised."""
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


# --------------------------------------------------------------- advice that is followed or ignored


def test_first_strategy_is_followed_when_plugins_answer_without_advice() -> None:
    """When the plugins answer without advice, then the job follows the first strategy that can
    work."""
    job = asked()
    job.advise()
    assert followed(job) == "retry"
    job.settle()
    job.train()
    assert job.doing == "healthy"


def test_strategy_named_by_a_plugin_is_followed() -> None:
    """When a plugin names a strategy that is not the first, then the job follows that strategy. The
    report says why each earlier strategy was not followed."""
    job = asked()
    job.advise(strategy="recover")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["strategy"] == "recover"
    assert tried(job) == {
        "retry": "a recovery plugin has advised another strategy: the scheduler says so"
    }
    assert [k.rank for k in job.orders(Kill)] == [2]
    assert job.doing == "healthy"


def test_job_is_dumped_when_a_plugin_advises_dump() -> None:
    """When a plugin advises `dump`, then the job writes a last checkpoint and ends."""
    job = asked()
    job.advise(strategy="dump")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    why = "a recovery plugin has advised another strategy: the scheduler says so"
    assert tried(job)["retry"] == tried(job)["recover"] == why


def test_job_ends_without_a_checkpoint_when_a_plugin_advises_exit() -> None:
    """When a plugin advises `exit`, then the job ends and saves no checkpoint."""
    job = asked()
    job.advise(strategy="exit")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.orders(Save) == []
    assert (
        "dump: a recovery plugin has advised another strategy: the scheduler says so"
        in job.over.why
    )


def test_veto_rules_out_a_strategy_for_the_whole_incident() -> None:
    """When a plugin rules out a strategy, then the job follows the next strategy. The first
    strategy stays ruled out when another fault joins the incident."""
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


def test_job_exits_when_a_plugin_rules_out_every_strategy() -> None:
    """When a plugin rules out every strategy, including `dump` and `exit`, then the job still ends.
    Its result is `failed`, with exit code 4."""
    job = asked()
    job.advise(veto=("retry", "recover", "scale_in", "dump", "exit"))
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)


def test_veto_does_not_apply_to_the_next_incident() -> None:
    """When the next incident begins, then a strategy that was ruled out in the last incident is
    offered again."""
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
        ({"strategy": "pray"}, "there is no strategy with this name"),
        ({"strategy": "mine", "base": "pray"}, "there is no strategy with this name"),
        (
            {"strategy": "mine", "base": "retry", "not_after": 1},
            "no sound copy of shard 'dense', of step 1 or earlier, is left on ranks [0, 1, 2, 3]",
        ),
        ({"strategy": "retry", "veto": ("retry",)}, None),
    ],
)
def test_first_strategy_is_followed_when_the_advice_cannot_be_followed(
    said: dict[str, Any],  # Any: the fields of Advised
    why_not: str | None,
) -> None:
    """When the advised strategy cannot work or is unknown, then the job follows the first strategy
    that can work. The log says why the advice was not followed."""
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


# ---------------------------------------------------------------- strategies of plugins


def test_strategy_of_a_plugin_runs_its_base_and_is_reported_under_its_own_name() -> None:
    """When a plugin advises its own variant of `retry`, with an earlier step and skipped batches,
    then all ranks go back to that step and skip the batches. The report shows the plugin's name for
    the strategy."""
    job = asked(keeps=2)
    job.advise(strategy="cool_down", base="retry", not_after=2, skip=3)
    job.settle()
    job.train()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((0, 1, 3), 2)]
    assert [(r.step, r.skip) for r in job.orders(Rollback)] == [(2, 3)]
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("cool_down", 3, 1)
    assert job.facts("strategy_chosen")[-1]["strategy"] == "cool_down"


def test_strategy_of_a_plugin_replaces_live_processes() -> None:
    """When a plugin's own strategy names an additional rank to replace, then the live process of
    that rank is ended and a new one is started. The orders to end processes give the plugin's
    reason as their cause."""
    job = asked(groups={"dense": (0, 1, 2, 3)})
    job.advise(strategy="fresh", base="recover", replace=(0,), why="their driver is old")
    job.settle()
    job.train()
    assert sorted(k.rank for k in job.orders(Kill)) == [0, 2]
    assert {k.cause for k in job.orders(Kill)} == {"their driver is old"}
    assert sorted(s.rank for s in job.orders(Spawn)) == [0, 2]
    assert strategies(job) == ["fresh"]


def test_step_in_the_advice_is_ignored_without_a_base_strategy() -> None:
    """When a plugin names a built-in strategy and an earlier step, but no base, then the step and
    the skipped batches are ignored."""
    job = asked(keeps=2)
    job.advise(strategy="retry", not_after=1, skip=2)
    job.settle()
    assert job.orders(Restore) == []
    assert [(r.step, r.skip) for r in job.orders(Rollback)] == [(3, 0)]


def test_strategy_of_a_plugin_cannot_keep_a_polluted_step() -> None:
    """When a numeric fault has polluted step 3 and a plugin advises to keep that step, then all
    ranks still go back to step 2."""
    job = trained(advised=True, keeps=2)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.advise(strategy="mine", base="retry", not_after=3)
    job.settle()
    assert {r.step for r in job.orders(Restore)} == {2}


def test_failed_strategy_of_a_plugin_counts_as_a_failure_of_its_base() -> None:
    """When the same fault occurs again after a plugin's own strategy, then the base of this
    strategy counts as failed. The job does not follow the same advice again."""
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


# ---------------------------------------------------------------- time limits for plugins


def test_first_strategy_is_followed_when_plugins_do_not_answer_in_time() -> None:
    """When the plugins do not answer within the limit, then the job follows the first strategy that
    can work."""
    job = asked(advice=12.0)
    began = job.now
    job.wait()
    assert job.now == pytest.approx(began + 12.0, abs=0.1)
    assert followed(job) == "retry"
    assert len(job.consulted) == 1


def test_plugin_that_asks_for_time_is_asked_again_after_that_time() -> None:
    """When a plugin asks for time, then the job waits that long and asks again. A node has joined
    meanwhile, so `recover`, which was ruled out before, is now offered."""
    job = trained(advised=True, placement={0: (0, 1), 1: (2, 3)})
    job.lose_node(1)
    job.settle()
    recover = next(o for o in job.consulted[-1].offers if o.strategy == "recover")
    assert recover.why_not == "node 1 is lost, and no other node has room for its ranks"
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


def test_plugin_can_ask_for_half_a_second() -> None:
    """When a plugin asks for half a second, then the job still waits for advice, and its next
    deadline is half a second later."""
    job = asked()
    job.advise(wait=0.5)
    assert job.doing == "choosing"
    assert job.machine.next_deadline() == job.now + 0.5


def test_report_says_another_was_advised_when_the_plugin_gives_no_reason() -> None:
    """When a plugin advises a strategy without a reason, then the report says why the other
    strategies were not followed: another one was advised."""
    job = asked()
    job.advise(strategy="dump", why="")
    job.settle()
    assert tried(job)["retry"] == "a recovery plugin has advised another strategy"


def test_total_time_for_plugins_is_limited_per_incident() -> None:
    """When plugins ask for time repeatedly in one incident, then they get at most the limit in
    total. After that the job chooses a strategy at their next answer, even if they ask for more
    time."""
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


def test_time_for_plugins_is_counted_anew_in_the_next_incident() -> None:
    """When the plugins have used up the waiting time of one incident, then the next incident has
    its own waiting time."""
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


def test_strategy_named_with_a_wait_is_not_followed_before_the_wait_ends() -> None:
    """When a plugin names a strategy and asks for time, then the job waits first. A veto in the
    same advice applies at once."""
    job = asked()
    job.advise(strategy="dump", wait=20.0, veto=("retry",))
    assert job.doing == "choosing"
    job.wait()
    assert next(o for o in job.consulted[-1].offers if o.strategy == "retry").why_not
    job.advise()
    assert followed(job) == "recover"


# ----------------------------------------------------------- advice that is late or no longer valid


def test_advice_to_an_earlier_round_is_ignored() -> None:
    """When another fault joins before the plugins answer, then the plugins are asked again, and an
    answer to the first question is ignored."""
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


def test_unrequested_advice_is_ignored() -> None:
    """When advice arrives during training or after a strategy was chosen, then the job ignores it."""
    job = asked()
    job.advise()
    before = len(job.said)
    job.advise(strategy="dump")
    assert len(job.said) == before
    job.settle()
    job.train()
    job.advise(strategy="dump")
    assert job.doing == "healthy"


def test_next_controller_asks_the_plugins_again() -> None:
    """When the controller is lost while the plugins are asked, then the next controller asks again.
    The plugins get the whole time limit again."""
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


def test_next_controller_asks_again_when_plugins_had_asked_for_time() -> None:
    """When the controller is lost while the plugins have asked for time, then the next controller
    asks the plugins again at once."""
    job = asked()
    job.advise(wait=100.0)
    job.lead(2)
    assert len(job.consulted) == 2
    job.advise(strategy="recover")
    assert followed(job) == "recover"


def test_plugins_are_asked_again_when_a_strategy_has_failed() -> None:
    """When the same fault occurs again after a strategy was followed, then the plugins are asked in
    the next round. The offer of that strategy says why it has failed."""
    job = asked()
    job.advise()
    job.settle()
    job.fault(2, "memory")
    job.settle()
    assert [(c.incident, c.round) for c in job.consulted] == [(1, 1), (1, 2)]
    retry = next(o for o in job.consulted[-1].offers if o.strategy == "retry")
    assert retry.why_not == "the memory fault at step 4 occurred again"


def test_earlier_advice_is_not_used_in_a_later_round() -> None:
    """When another fault joins after advice was followed and the plugins do not answer in time,
    then the job follows the default strategy, not the earlier advice."""
    job = asked()
    job.script.slow = {2}
    job.advise(strategy="mine", base="recover")
    job.settle()
    assert (job.doing, followed(job)) == ("awaiting", "mine")
    job.fault(0, "memory")
    assert job.doing == "choosing"
    job.wait()
    assert followed(job) == "recover"


def test_report_says_exit_when_a_stop_comes_while_plugins_are_asked_again() -> None:
    """When most ranks are lost after a strategy was chosen, and a stop request comes while the
    plugins are asked again, then the report names `exit` as the strategy."""
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


def test_plugins_are_not_asked_when_a_node_is_excluded_during_the_start() -> None:
    """When a node is excluded because it is faulty, before any rank is ready, and its processes
    end, then no plugin is asked. The ranks of that node are started on another node."""
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


def test_pause_requested_while_plugins_are_asked_begins_after_recovery() -> None:
    """When a pause is requested while the plugins are asked, then the pause begins when the job is
    healthy."""
    job = asked()
    job.pause()
    job.advise()
    job.settle()
    job.train()
    assert job.doing == "paused"


def test_stop_request_while_plugins_are_asked_ends_the_job_at_once() -> None:
    """When a stop request comes while the plugins are asked, then the job ends as cancelled, and
    the plugins are not asked again."""
    job = asked()
    job.stop()
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("cancelled", 143)
    assert len(job.consulted) == 1


def test_decision_waits_for_the_end_of_a_rank_ended_while_plugins_are_asked() -> None:
    """When a rank is told to end while the plugins are asked, then the job waits for the end of its
    process before it asks the plugins again."""
    job = asked()
    job.notice(0, "process", "its container is gone")
    assert [k.rank for k in job.orders(Kill)] == [0]
    assert len(job.consulted) == 1
    # only the deadline for the end of the killed process is left
    assert job.machine.next_deadline() == pytest.approx(job.now + 10.0)
    job.settle()
    assert len(job.consulted) == 2
    assert {f.rank for f in job.consulted[-1].faults} == {0, 2}


def test_plugin_can_veto_a_migration_to_a_successor() -> None:
    """When the successor of a straggler is ready, then the plugins are asked and can veto
    `migrate`. The straggler then keeps its rank."""
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


# ---------------------------------------------------------------- ranks that a plugin replaces


HALVES = {"a": (0, 2), "b": (1, 3)}
NINE = {"a": (1, 8), "b": (0, 2, 3, 4, 5, 6, 7)}


def test_advice_to_replace_both_holders_of_a_shard_is_not_followed() -> None:
    """When only two ranks hold a shard and a plugin advises to replace both of them, then the
    advice is not followed, because no sound copy would be left."""
    job = trained(9, advised=True, groups=NINE)
    job.fault(8, "network")
    job.settle()
    job.advise(strategy="fresh", base="recover", replace=(1,))
    assert job.facts("advice_not_followed")[0]["why_not"] == (
        "with ranks [1, 8] replaced, no sound copy of shard 'a' is left on ranks [1, 8]"
    )
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert job.orders(Kill) == []


def test_replaced_ranks_are_ended_in_rank_order_for_the_reason_of_the_plugin() -> None:
    """When a plugin advises to replace another rank in addition, then both processes are ended in
    rank order, with the plugin's reason."""
    job = trained(9, advised=True)
    job.fault(8, "network")
    job.settle()
    job.advise(strategy="fresh", base="recover", replace=(1,), why="their driver is old")
    assert [(kill.rank, kill.cause) for kill in job.orders(Kill)] == [
        (1, "their driver is old"), (8, "their driver is old"),
    ]  # fmt: skip


def test_reason_of_the_plugin_is_the_cause_of_an_advised_replacement() -> None:
    """When a plugin advises `recover` before `retry` was tried, then the plugin's reason is the
    cause of the replacement. Without a reason, the cause is that a plugin advised it."""
    for why, cause in (("cards fail", "cards fail"), ("", "a recovery plugin has advised it")):
        job = trained(advised=True)
        job.fault(2, "memory")
        job.settle()
        job.advise(strategy="recover", why=why)
        assert [(kill.rank, kill.cause) for kill in job.orders(Kill)] == [(2, cause)]


def test_veto_of_retry_is_the_cause_of_a_replacement() -> None:
    """When a plugin rules out `retry` and names no strategy, then the live process of the faulty
    rank is ended, and the veto is the cause."""
    job = trained(advised=True)
    job.fault(2, "memory")
    job.settle()
    job.advise(veto=("retry",), why="cards fail")
    assert [(kill.rank, kill.cause) for kill in job.orders(Kill)] == [
        (2, "no retry: a recovery plugin has ruled it out: cards fail")
    ]


def test_lost_rank_that_is_replaced_again_on_advice_is_one_fault() -> None:
    """When a plugin advises to replace a rank that is already lost, then the report has one fault
    for that rank, with both reasons."""
    job = trained(advised=True)
    job.kill(2)
    job.settle()
    job.advise(strategy="fresh", base="recover", replace=(2,), why="it has the wrong card")
    job.settle()
    if job.doing == "choosing":
        job.advise()
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"], f["evidence"]) for f in incident["faults"]] == [
        ("process", 2, "was ended by signal 9\nit has the wrong card")
    ]


def test_advice_to_replace_a_rank_that_leaves_is_ignored() -> None:
    """When a plugin names a rank that leaves the job, or a rank that does not exist, then no
    process is replaced for that advice."""
    job = trained(advised=True, placement={0: (0, 1), 1: (2,), 2: (3,)}, columns=COLUMNS)
    job.lose_node(2)
    job.settle()
    job.advise(strategy="smaller", base="scale_in", replace=(2, 77))
    job.settle()
    job.train()
    assert strategies(job) == ["smaller"]
    assert [kill.rank for kill in job.orders(Kill)] == [3]
    assert job.ranks[2].alive


def test_ranks_that_leave_do_not_prevent_an_advised_replacement() -> None:
    """When the ranks of a lost node leave the job, then the loss of their own state does not
    prevent an advised replacement of another rank."""
    job = trained(6, advised=True, derives=False, placement={0: (0, 1, 2, 3), 1: (4, 5)})
    job.lose_node(1)
    job.settle()
    job.advise(strategy="fresh", base="scale_in", replace=(0,))
    job.settle()
    job.train()
    assert job.facts("advice_not_followed") == []
    assert strategies(job) == ["fresh"]
    assert [kill.rank for kill in job.orders(Kill) if kill.node == 0] == [0]


def test_ranks_to_replace_are_ignored_without_a_base_strategy() -> None:
    """When a plugin names a built-in strategy and ranks to replace, but no base, then no rank is
    replaced. The advice is followed although these ranks are the only holders of a shard."""
    job = trained(advised=True, groups=HALVES)
    job.fault(2, "network")
    job.settle()
    job.advise(strategy="retry", replace=(0, 2))
    job.settle()
    job.train()
    assert job.facts("advice_not_followed") == []
    assert strategies(job) == ["retry"]
    assert job.orders(Kill) == []


def test_dump_of_a_plugin_is_followed_when_the_ranks_cannot_train_on() -> None:
    """When a plugin advises its own strategy with base `dump` and the ranks cannot train on, then
    the advice is followed. The job ends with a last checkpoint."""
    job = trained(advised=True, derives=False, placement={0: (0, 1), 1: (2, 3)})
    job.lose_node(1)
    job.settle()
    job.advise(strategy="save_it", base="dump")
    job.settle()
    assert job.facts("advice_not_followed") == []
    assert strategies(job) == ["save_it"]
    assert job.over is not None
    assert job.over.result == "dumped"


def test_report_says_exit_for_a_plugin_strategy_with_base_exit() -> None:
    """When a plugin ends the job with its own strategy of base `exit`, then the report names the
    strategy `exit`, not the plugin's name."""
    job = trained(advised=True)
    job.fault(2, "network")
    job.settle()
    job.advise(strategy="give_up", base="exit")
    job.settle()
    assert strategies(job) == ["exit"]
