"""
What is waited for, for how long, and who is held to be at fault when it does not come.
"""

import pytest

from tests.core.lives import trained, tried
from tft.core.job.attempts import ALONE
from tft.core.job.policy import Policy
from tft.core.job.transitions import State
from tft.protocol.messages import EndNode, Freeze, Kill, OrderName, Resume
from tft.testing.scripted import ScriptedJob


@pytest.mark.parametrize(
    "order", ["freeze", "stop", "regroup", "fetch", "rebuild", "rollback", "resume"]
)
def test_a_limit_that_is_not_over_changes_nothing(order: OrderName) -> None:
    """
    When the machine is told that time has passed, and what it waits for has time left, then nothing
    is done, and it goes on waiting until the same moment.
    """
    job = trained()
    job.script.muted = {(1, order)}
    job.fault(1, "memory")
    job.settle()
    state, orders, deadline = job.state, len(job.said), job.machine.next_deadline()
    job.let_pass(1.0)
    assert (job.state, len(job.said)) == (state, orders)
    assert job.machine.next_deadline() == deadline


@pytest.mark.parametrize(
    ("promises", "repair", "limit"),
    [(False, 300.0, 120.0), (True, 300.0, 300.0), (True, 30.0, 120.0)],
)
def test_state_that_comes_in_a_rebuild_has_the_time_of_a_repair(
    promises: bool, repair: float, limit: float
) -> None:
    """
    When a rank holds nothing after its fetch, because its state comes when all rebuild, then the rebuild may take as
    long as a repair may; else, or if a repair may take less, it may take as long as building wrappers may.
    """
    job = trained(promises=promises, repair=repair)
    job.script.muted = {(1, "rebuild")}
    job.fault(1, "memory")
    job.settle()
    assert job.state is State.REBUILDING
    deadline = job.machine.next_deadline()
    assert deadline is not None
    assert deadline - job.now == pytest.approx(limit, abs=0.1)  # each message takes a moment


def test_a_pause_that_is_not_over_goes_on() -> None:
    """
    When the machine is told that time has passed in a pause that has some left, then it goes on.
    """
    job = trained()
    job.pause()
    job.settle()
    deadline = job.machine.next_deadline()
    job.let_pass(3500.0)
    assert (job.state, job.machine.next_deadline()) == (State.PAUSED, deadline)


def test_those_who_are_late_are_named_in_order() -> None:
    """
    When several ranks do not answer an order, then they are named, and ended, in the order of their
    numbers: a story reads the same each time.
    """
    job = trained(10)
    job.script.muted = {(1, "fetch"), (8, "fetch")}
    job.fault(8, "memory")
    job.fault(1, "memory")
    job.settle()
    job.wait()
    assert job.facts("order_overdue") == [{"order": "fetch", "ranks": [1, 8]}]
    assert [kill.rank for kill in job.orders(Kill)] == [1, 8]


def test_those_who_do_not_finish_are_named_in_an_incident_of_their_own() -> None:
    """
    When all but two ranks have finished, and these are not heard of in time, then an incident opens
    and everyone is asked where they stand, because of these two.
    """
    job = trained(10, max_incidents=1)
    job.finish(*(rank for rank in range(10) if rank not in (1, 8)))
    job.wait()
    (freeze,) = job.orders(Freeze)
    assert freeze.incident == 1
    assert freeze.cause == "ranks [1, 8] have not finished, 3600 s after other ranks have"


def test_what_is_given_up_is_held_against_nobody() -> None:
    """
    When the limits of two orders are over at the same moment, and the first of them has everyone
    begin anew, then nobody is ended for not having answered the second.
    """
    job = trained(repair=60.0)
    job.script.muted = {(1, "regroup"), (1, "fetch")}
    job.fault(1, "memory")
    job.settle()
    job.wait()
    assert job.state is State.FREEZING
    assert job.facts("order_overdue") == [{"order": "regroup", "ranks": [1]}]
    assert job.orders(Kill) == []


def test_groups_that_are_never_formed_are_told_with_who_did_not_come() -> None:
    """
    When the same rank does not come to form groups three times, then retry is over, for a reason
    that names it.
    """
    job = trained()
    job.script.muted = {(2, "regroup")}
    job.fault(1, "memory")
    job.settle()
    for _ in range(2):
        job.wait()
        job.settle()
    job.wait()  # two seconds, before the third attempt
    job.settle()
    job.wait()
    job.script.muted = set()
    job.settle()
    job.train()
    assert tried(job)["retry"] == "ranks [2]: no answer to regroup in time"


def test_a_rank_that_computes_is_not_suspected_because_another_is_not_heard() -> None:
    """
    When one rank does not answer the order to resume, and another one computes, as it should, when
    all are asked where they stand, then nobody is ended.
    """
    job = trained()
    job.script.muted = {(3, "resume")}
    job.ranks[0].loop.waiting = False
    job.fault(1, "network")
    job.settle()
    job.wait()
    job.script.muted = set()
    job.settle()
    assert len(job.orders(Resume)) == 2
    assert job.orders(Kill) == []


@pytest.mark.parametrize("order", ["load", "restore"])
def test_a_rank_that_is_not_done_with_its_state_in_time_is_ended(order: OrderName) -> None:
    """
    When a rank does not come to an end with loading a checkpoint, or with taking back a copy of its
    own, then it hangs: it is ended for that, and replaced.
    """
    if order == "load":
        job = ScriptedJob(4, Policy(), resume=("/old/step-7", 7))
        job.script.muted = {(1, order)}
        job.start()
    else:
        job = trained(steps=6, keeps=2)
        job.script.muted = {(1, order)}
        job.fault(2, "numeric", polluted=True)
        job.settle()
    job.wait()
    job.script.muted = set()
    job.settle()
    job.train()
    (incident,) = job.reports()
    hang = incident["faults"][-1]
    assert (hang["kind"], hang["rank"]) == ("hang", 1)
    assert f"no answer to {order} in time" in hang["evidence"]
    assert incident["strategy"] == "recover"


def test_the_end_of_a_process_is_waited_for_before_advice() -> None:
    """
    When the time for advice is over before the end of a process that was told to end, then its end
    is waited for, for as long as that may take, and the advice is done without then.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)}, advised=True)
    job.fault(1, "network")
    job.settle()
    job.script.deaf = {1}
    job.now += 25.0
    job.notice(3, "process", "its card is gone")
    assert job.machine.next_deadline() == pytest.approx(job.now + 10.0)
    job.let_pass(6.0)
    assert job.state is State.CHOOSING
    assert job.machine.next_deadline() == pytest.approx(job.now + 4.0)
    job.wait()
    assert [facts["rank"] for facts in job.facts("rank_not_ended")] == [3]


def test_a_job_that_ends_waits_for_the_leaving_and_for_nothing_else() -> None:
    """
    When a job ends while processes start, and others cannot be ended, then nobody is ended or given
    up for being late any more: the nodes end them all, and the job is over in time.
    """
    groups = {"a": (0, 1), "b": (2, 3)}
    job = trained(placement={0: (0, 1), 1: (2, 3)}, groups=groups, join=8.0, leave=5.0)
    job.script.slow, job.script.deaf = {1}, {1}
    job.kill(1)
    job.script.muted = {(rank, order) for rank in range(4) for order in ("save", "end")}
    job.settle()
    job.stop(0)
    job.settle()
    job.notice(2, "process", "its card is gone")
    job.notice(3, "process", "its card is gone")
    assert job.state is State.EXITING
    ends = job.now + 15.0
    killed = len(job.orders(Kill))
    while job.over is None:
        assert job.machine.next_deadline() in (pytest.approx(ends - 10.0), pytest.approx(ends))
        job.let_pass(1.0)
    assert job.now == pytest.approx(ends, abs=1.0)
    assert (len(job.orders(Kill)), job.facts("rank_not_ended")) == (killed, [])
    assert [type(order) for order in job.said][-1] is EndNode
    assert job.over.result == "failed"


def test_a_script_may_take_its_time_before_the_first_rank_joins() -> None:
    """
    When no rank has called `tft.init`, then nobody is late: it may be a script that never will. As
    soon as one has, the others have to come.
    """
    job = ScriptedJob(2, Policy(join=300.0))
    job.script.slow = {0, 1}
    job.start()
    assert job.machine.next_deadline() is None
    job.let_pass(1000.0)
    assert job.orders(Kill) == []
    job.arrive(0)
    job.wait()
    assert [kill.rank for kill in job.orders(Kill)] == [1]


def test_the_last_holder_of_a_shard_is_not_ended_for_a_late_stop() -> None:
    """
    When the only rank that still has a shard does not leave its loop in time, then it is waited for as long as a repair
    may take: ended it would take the shard along.
    """
    job = trained(2, steps=3, strategies=("retry", "recover", "dump"))
    job.script.muted = {(1, "stop")}
    job.fault(0, "memory")
    job.settle()
    job.let_pass(10.5)
    assert job.orders(Kill) == []
    assert job.facts("stop_waits") == [{"ranks": [1], "shards": ["dense"]}]
    job.let_pass(299.0)
    assert job.orders(Kill) == []
    job.let_pass(1.5)
    assert [kill.rank for kill in job.orders(Kill)] == [1]


def test_a_late_stop_ends_a_rank_whose_shards_others_have() -> None:
    """
    When a rank does not leave its loop in time and others have all that it has, then it is ended at once.
    """
    job = trained(3, steps=3, strategies=("retry", "recover", "dump"))
    job.script.muted = {(1, "stop")}
    job.fault(0, "memory")
    job.settle()
    job.let_pass(10.5)
    assert [kill.rank for kill in job.orders(Kill)] == [1]
    assert job.machine.incident.faults[-1].evidence == f"no answer to stop in time. {ALONE}"


def test_a_checkpoint_is_enough_to_end_the_last_holder_of_a_shard_for_a_late_stop() -> None:
    """
    When the only rank that still has a shard does not leave its loop in time, and there is a checkpoint to go back
    to, then the rank is ended at once.
    """
    job = trained(2, steps=3, strategies=("retry", "recover", "dump"))
    job.checkpointed(2)
    job.script.muted = {(1, "stop")}
    job.fault(0, "memory")
    job.settle()
    job.let_pass(10.5)
    assert [kill.rank for kill in job.orders(Kill)] == [1]


def test_a_replacement_that_is_not_ready_in_time_is_no_fault_of_its_own() -> None:
    """
    When the process that replaces a lost one is not ready in time, then it is ended and replaced in turn. That adds to
    the evidence of the fault that is known already.
    """
    job = trained(join=8.0)
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    job.wait()
    job.script.slow = set()
    job.settle()
    job.train()
    (incident,) = job.reports()
    (fault,) = incident["faults"]
    assert (fault["kind"], fault["rank"]) == ("process", 1)
    assert "was ended by signal 9\nnot ready 8 s after its start" in fault["evidence"]
