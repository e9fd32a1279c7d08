"""
Those that are left: the room that several share, the last to finish, what the others left behind.
"""

import pytest

from tests.core.lives import strategies, trained, tried
from tft.core.job.policy import STRATEGIES, Policy
from tft.protocol.messages import (
    End,
    Fetch,
    Finished,
    Freeze,
    Kill,
    Ready,
    Rollback,
    ShardCopies,
    Spawn,
)
from tft.testing.scripted import ScriptedJob

PAIRS = {"a": (0, 2, 4), "b": (1, 3, 5)}


def test_the_room_of_a_node_is_there_once() -> None:
    """
    When two ranks have lost their node, and there is room for one of them, then the job does not
    wait for a place that the other one will never have: it goes on without that one.
    """
    job = trained(
        placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 1}, groups={"a": (0, 2), "b": (1, 3)}
    )
    job.lose_node(1)
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in"]
    assert tried(job)["recover"] == "node 1 is gone, and its ranks have no other place"
    assert job.machine.members == {0, 1, 2}
    assert [(s.rank, s.node) for s in job.orders(Spawn)] == [(2, 2)]


def test_all_who_do_not_answer_are_ended_and_asked_nothing_more() -> None:
    """
    When two of four ranks do not answer in time, then both are ended at once, and only the others
    are asked again.
    """
    job = trained()
    job.script.muted = {(1, "freeze"), (2, "freeze")}
    job.pause()
    job.settle()
    job.wait()
    assert job.orders(Freeze)[-1].to == (0, 3)
    assert [kill.rank for kill in job.orders(Kill)] == [1, 2]


def test_the_last_ones_have_the_time_of_what_is_called_after_the_last_step() -> None:
    """
    When one rank calls something after its steps, and another has finished, then the others have that time besides the
    usual limit.
    """
    job = ScriptedJob(3, Policy(tail=50.0), strategies=STRATEGIES)
    job.script.slow = {0}
    job.start()
    job.join(job.ranks[0])
    job.ranks[0].state.shards = ("dense",)
    dense = ShardCopies(shard="dense", ranks=(0, 1, 2))
    job.report(Ready(rank=0, incarnation=0, shards=(dense,), after=60.0, at=job.now))
    job.settle()
    job.train(2)
    job.finish(1)
    deadline = job.machine.next_deadline()
    assert deadline is not None
    assert deadline - job.now == pytest.approx(110.0, abs=0.1)


def test_who_has_left_the_loop_and_is_never_heard_is_noticed_at_last() -> None:
    """
    When a rank has finished, and hangs before that was heard, then the others do not wait for it
    for ever: after the limit they are asked where they stand, and it does not answer.
    """
    job = trained(tail=50.0)
    job.ranks[1].training, job.ranks[1].loop.done, job.ranks[1].hung = False, True, True
    job.finish()
    assert job.doing == "healthy"
    assert job.machine.next_deadline() is not None
    job.wait()
    assert job.orders(Freeze)[0].cause == (
        "ranks [1] have not finished, 50 s after other ranks have"
    )
    job.settle()
    job.wait()
    job.settle()
    assert [(s.rank, s.incarnation) for s in job.orders(Spawn)] == [(1, 1)]
    job.train()
    assert strategies(job) == ["recover"]


def test_the_first_step_after_an_incident_may_be_the_last_one() -> None:
    """
    When a rank has done the last step after an incident, and hangs before it was heard, then that
    is noticed, too.
    """
    job = trained(tail=50.0)
    job.kill(2)
    job.settle()
    job.ranks[1].training, job.ranks[1].hung = False, True
    for rank in (0, 2, 3):
        job.ranks[rank].training = False
        job.report(Finished(rank=rank, incarnation=job.ranks[rank].incarnation, step=4, at=job.now))
    assert job.doing == "resuming"
    job.wait()
    assert job.doing == "freezing"


def test_what_was_left_behind_is_a_source_as_long_as_nobody_has_gone_back() -> None:
    """
    When a rank has left with another one, and of a shard nobody else has a sound copy before the
    others have trained on, then it is copied from the one that has left.
    """
    columns = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    job = trained(
        placement={0: (0, 1), 1: (2,), 2: (3,)}, columns=columns, groups={"a": (0, 2), "b": (1, 3)}
    )
    job.lose_node(2)
    job.settle()
    assert job.machine.members == {0, 1}
    job.fault(0, "memory")
    job.settle()
    job.train()
    (fetch,) = job.orders(Fetch)
    assert [(t.shard, [s.rank for s in t.sources]) for t in fetch.transfers] == [("a", [2])]
    assert job.doing == "healthy"


def test_what_was_left_behind_is_no_source_when_the_others_have_gone_back() -> None:
    """
    When some ranks have left, and the others went back and trained the same steps again without
    them, then nobody copies from those who left: what they hold is of a past that was given up.
    """
    columns = {rank: ((0, 1), (2, 3), (4, 5))[rank // 2] for rank in range(6)}
    enable = frozenset({"retry", "scale_in", "dump"})
    job = trained(6, 3, groups=PAIRS, columns=columns, keeps=3, enable=enable)
    job.kill(5)
    job.settle()
    assert job.machine.members == {0, 1, 2, 3}
    job.fault(0, "numeric", polluted=True)  # before anyone has trained on: back to step 2
    job.settle()
    job.train()
    assert job.orders(Rollback)[-1].step == 2
    assert job.doing == "healthy"
    assert (job.ranks[4].step, job.ranks[0].step) == (3, 3)
    job.fault(0, "memory")
    job.settle()
    (fetch,) = job.orders(Fetch)
    assert fetch.step == 3
    assert {s.rank for transfer in fetch.transfers for s in transfer.sources} == {2}


def test_no_copy_that_was_left_behind_is_a_source_when_the_others_have_gone_back_twice() -> None:
    """
    When those who are left go back behind a step of which one that has left keeps an earlier copy,
    and train it anew, then that copy is of the past that was given up, like what it has in use.
    """
    columns = {rank: ((0, 1), (2, 3), (4, 5))[rank // 2] for rank in range(6)}
    enable = frozenset({"retry", "scale_in", "dump"})
    job = trained(6, 4, groups=PAIRS, columns=columns, keeps=3, enable=enable)
    job.kill(5)
    job.settle()
    for _ in range(2):
        job.fault(0, "numeric", polluted=True)
        job.settle()
    job.train()
    assert [r.step for r in job.orders(Rollback)] == [4, 3, 2]
    assert 3 in job.ranks[4].state.backups
    job.fault(0, "memory")
    job.settle()
    (fetch,) = job.orders(Fetch)
    assert fetch.step == 3
    assert {s.rank for transfer in fetch.transfers for s in transfer.sources} == {2}


def test_who_had_finished_before_an_incident_has_to_finish_again() -> None:
    """
    When a rank has finished, and everyone is brought back for another one that was lost, then the
    job is complete only when the first has finished once more.
    """
    job = trained()
    job.finish(1)
    job.kill(2)
    job.settle()
    job.train()
    job.finish(0, 2, 3)
    assert job.doing == "healthy"
    job.finish(1)
    assert job.over is not None
    assert job.over.result == "completed"


def test_who_had_finished_before_an_incident_is_awaited_after_a_pause() -> None:
    """
    When a rank that had finished trains again after an incident, then a pause after that is over
    only when it has done a step, as for everyone.
    """
    job = trained()
    job.finish(1)
    job.kill(2)
    job.settle()
    job.train()
    job.pause()
    job.settle()
    job.go_on()
    job.settle()
    for rank in (0, 2, 3):
        job.window(rank)
        job.close(rank)
    assert job.doing == "resuming"
    job.window(1)
    job.close(1)
    assert job.doing == "healthy"


def test_a_process_that_joins_after_the_end_was_decided_is_told_so() -> None:
    """
    When a process joins after the last checkpoint was written, then it gets the order to end, as
    the others did: it does not wait until its node ends it.
    """
    job = trained()
    job.script.slow = {3}
    job.kill(3)
    job.settle()
    job.script.muted = {(0, "end")}  # somebody still has to leave
    job.stop()
    job.settle()
    assert job.doing == "exiting"
    before = job.orders(End)
    job.arrive(3)
    late = job.orders(End)[len(before) :]
    assert [order.to for order in late] == [(0, 3)]
    assert {(order.code, order.why) for order in late} == {(before[0].code, before[0].why)}
    job.settle()
    owed = [order.to for order in job.machine.outstanding() if isinstance(order, End)]
    assert owed == [(0,)]
