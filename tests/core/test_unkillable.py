"""
What has no end by itself is given one: a process that cannot be ended, a limit that is over when
what it was for has been done, a place that nobody comes to.
"""

import pytest

from tests.core.lives import strategies, trained, tried
from tft.core.job.transitions import State
from tft.protocol.messages import Kill, Load, Save, Spawn, Spawned, Stop
from tft.testing.scripted import ScriptedJob


def test_a_process_that_cannot_be_ended_is_given_up_after_its_limit() -> None:
    """
    When an agent does not say within ten seconds that a process has ended, then the job goes on
    without its last word: nobody obeys in its place, and its rank comes back on another node.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 1})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    assert job.state is State.FREEZING
    assert job.machine.next_deadline() == pytest.approx(job.now + 10.0, abs=0.1)
    job.wait()
    assert job.facts("rank_not_ended")[0]["rank"] == 3
    assert [(s.rank, s.node) for s in job.orders(Spawn)][-1] == (3, 2)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert [k.rank for k in job.machine.outstanding() if isinstance(k, Kill)] == [3]


def test_who_was_to_be_replaced_and_cannot_be_ended_is_done_without() -> None:
    """
    When a rank is to get another process, the one it has cannot be ended, and there is no other
    place for it, then it is not waited for: what was decided is decided again.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    job.script.deaf = {1}
    for _ in range(2):
        job.fault(2, "memory")
        job.settle()
    assert job.machine.incident.decision.strategy == "recover"
    job.wait()
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in"]
    assert job.machine.members == {0, 1, 3}


def test_a_job_that_ends_does_not_wait_for_a_process_that_cannot_be_ended() -> None:
    """
    When somebody cannot be ended while a last checkpoint is written, then it is written without.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    job.script.deaf = {1}
    job.stop(0)
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"


def test_what_is_left_by_a_process_that_was_given_up_counts_all_the_same() -> None:
    """
    When a process ends after all that was given up, then what it had captured of its own is in the
    last checkpoint.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable={"dump"})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    assert job.state is State.CLEARING
    job.kill(3)
    job.settle()
    assert [s.private for s in job.orders(Save) if s.private] == [{3: "00"}]


def test_a_process_that_ends_late_after_all_makes_room_for_the_next() -> None:
    """
    When a process could not be ended in time, and its end is reported before the strategy is
    chosen, then its node is a place for the rank again.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable={"recover", "dump"})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    assert job.state is State.CLEARING
    job.script.deaf = set()
    job.kill(3)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert [(s.rank, s.node) for s in job.orders(Spawn)][-1] == (3, 1)


def test_a_node_is_a_place_again_also_for_a_rank_that_has_moved() -> None:
    """
    When the process that could not be ended ends after its rank has moved to another node, and that
    node is lost later, then the rank comes back to the first node.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 1})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    former = job.ranks[3]
    job.wait()
    job.settle()
    job.train()
    assert job.ranks[3].node == 2
    job.script.deaf = set()
    job._ends(former, -9)
    job.lose_node(2)
    job.settle()
    job.train()
    assert strategies(job) == ["recover", "recover"]
    assert job.ranks[3].node == 1


def test_a_node_that_is_there_is_not_said_to_be_gone() -> None:
    """
    When a rank has no place because a process of it may still run on its node, then the report says
    so.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable={"recover", "dump"})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    job.settle()
    assert "a process of rank 3 may still run on node 1" in tried(job)["recover"]


def test_a_ceiling_holds_until_everyone_has_gone_back() -> None:
    """
    When everyone was brought back behind a pollution, and a rank dies much later, but before the
    success was announced, then what they have trained since then is sound.
    """
    job = trained(steps=6, keeps=2)
    job.fault(1, "memory", polluted=True)
    job.settle()
    for one in job.ranks.values():
        one.loop.announce = False  # the controller does not listen
    job.train(5)
    held = job.ranks[0].step
    job.kill(2)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"]) == ("recover", held + 1)


def test_all_can_be_lost_and_come_back_more_than_once() -> None:
    """
    When all processes are lost, and one replacement dies before it has joined, then that is no
    script that never calls `tft.init`: it is started again.
    """
    job = ScriptedJob(2, resume=("/checkpoints/step-4", 4)).start()
    job.train(2)
    job.script.slow = {0, 1}
    job.kill(0)
    job.kill(1)
    job.settle()
    assert job.state is State.CHOOSING or job.state is State.AWAITING
    assert job.machine.next_deadline() is not None
    job.script.slow = set()
    job.kill(0)
    job.settle()
    assert job.over is None
    assert len(job.orders(Spawn)) == 5


def test_who_was_furthest_before_everyone_went_back_does_not_say_where_to_stop() -> None:
    """
    When everyone was brought back to a checkpoint and a fault comes then, then nobody is told to
    finish a step that lies far ahead.
    """
    job = trained(steps=9, groups={"a": (0, 1), "b": (2,), "c": (3,)})
    job.checkpointed(4)
    job.kill(3)
    job.settle()
    assert [load.step for load in job.orders(Load)] == [4]
    job.fault(1, "network")
    job.settle()
    assert [stop.finish for stop in job.orders(Stop)] == [9, 4]


def test_asking_twice_for_the_end_does_not_begin_it_anew() -> None:
    """
    When SIGTERM comes while a last checkpoint is written already, then it is not written twice;
    that somebody asked is how the job is said to have ended.
    """
    job = trained()
    job.script.muted = {(0, "save")}
    job.fault(1, "software")
    job.settle()
    job.stop(15)
    job.settle()
    assert len(job.orders(Save)) == 4
    job.script.muted = set()
    job.repeat()
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("cancelled", 143)


def test_whoever_has_ended_is_not_ended_again_with_its_node() -> None:
    """
    When a node is given up, and the process of a rank there has ended long ago, then nobody waits
    for its end: the others go on at once.
    """
    enable = frozenset({"retry", "scale_in", "dump"})
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=enable)
    job.kill(3)
    job.settle()
    job.train()
    job.notice(2, "node", "its fan has failed")
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [2]
    assert strategies(job) == ["scale_in", "scale_in"]
    assert job.machine.members == {0, 1}


def test_whoever_is_being_ended_is_not_told_so_twice() -> None:
    """
    When a process was told to end, and then its node is given up, then only the others there are
    told to end, and the job goes on when each of them has.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)}, groups={"a": (0, 2), "b": (1, 3)})
    job.notice(3, "process", "its card is gone")
    job.notice(2, "node", "its fan has failed")
    job.settle()
    job.train()
    assert [(k.rank, k.cause) for k in job.orders(Kill)] == [
        (3, "its card is gone"), (2, "its fan has failed"),
    ]  # fmt: skip
    assert strategies(job) == ["scale_in"]
    assert job.machine.members == {0, 1}


def test_who_starts_after_it_was_given_up_is_ended_all_the_same() -> None:
    """
    When a process was to be ended because it took too long to start, and only then its agent says
    that it has started, then it is still to be ended.
    """
    job = trained()
    job.script.gone = {0}  # its agent hears nothing
    job.kill(1)
    job.settle()
    job.wait()
    (spawn,) = job.orders(Spawn)
    (kill,) = job.orders(Kill)
    assert (kill.rank, kill.incarnation) == (spawn.rank, spawn.incarnation) == (1, 1)
    job.report(Spawned(node=0, rank=1, incarnation=1, pid=7, at=job.now))
    assert job.machine.outstanding() == [kill]
