"""
What has no end by itself is given one: a process that cannot be ended, a limit that is over when
what it was for has been done, a place that nobody comes to.
"""

import pytest

from tests.core.lives import strategies, trained, tried
from tft.core.job.transitions import State
from tft.protocol.messages import Kill, Load, Save, Spawn, Spawned, Stop
from tft.testing.scripted import ScriptedJob


def test_job_continues_without_a_process_that_does_not_end_in_ten_seconds() -> None:
    """When an agent does not report within ten seconds that a process has ended, then the job
    continues without its last words. The rank moves to another node."""
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


def test_strategy_is_chosen_again_when_a_process_cannot_be_ended() -> None:
    """When a process that is to be replaced cannot be ended and no other node has room, then the
    job does not wait, and the strategy is chosen again."""
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


def test_last_checkpoint_is_written_without_a_process_that_cannot_be_ended() -> None:
    """When a process cannot be ended while a last checkpoint is written, then the checkpoint is
    written without this process."""
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    job.script.deaf = {1}
    job.stop(0)
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"


def test_captured_state_of_a_process_that_ends_late_is_saved() -> None:
    """When a process ends after its time limit, then its captured state is still in the last
    checkpoint."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable={"dump"})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    assert job.state is State.CLEARING
    job.kill(3)
    job.settle()
    assert [s.private for s in job.orders(Save) if s.private] == [{3: "00"}]


def test_process_that_ends_late_makes_its_node_available_again() -> None:
    """When a process did not end in time and its end is reported before the strategy is chosen,
    then its node is available again for the rank."""
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


def test_moved_rank_can_return_to_its_first_node_after_a_late_process_end() -> None:
    """When a process ends late, after its rank has moved to another node, and that node is lost
    later, then the rank returns to its first node."""
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


def test_report_says_that_a_process_may_still_run_on_the_node() -> None:
    """When a rank has no place because its process may still run on its node, then the report says
    this."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable={"recover", "dump"})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    job.settle()
    assert "a process of rank 3 may still run on node 1" in tried(job)["recover"]


def test_step_ceiling_ends_when_all_ranks_have_rolled_back() -> None:
    """When all ranks rolled back because of pollution and a rank dies later, before success was
    announced, then the steps trained since the rollback count as sound."""
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


def test_all_ranks_can_be_lost_and_a_successor_can_die_before_it_joins() -> None:
    """When all processes are lost and one successor dies before it joins, then it is started again.
    The job does not treat its script as one that never calls `tft.init`."""
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


def test_stop_after_a_rollback_uses_the_step_of_the_rollback() -> None:
    """When all ranks rolled back from step 9 to the checkpoint of step 4 and another fault occurs,
    then the stop order names step 4 and not step 9."""
    job = trained(steps=9, groups={"a": (0, 1), "b": (2,), "c": (3,)})
    job.checkpointed(4)
    job.kill(3)
    job.settle()
    assert [load.step for load in job.orders(Load)] == [4]
    job.fault(1, "network")
    job.settle()
    assert [stop.finish for stop in job.orders(Stop)] == [9, 4]


def test_sigterm_during_a_last_checkpoint_does_not_start_a_second_one() -> None:
    """When SIGTERM arrives while a last checkpoint is written, then it is not written twice. The
    job ends as `cancelled`."""
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


def test_ended_process_is_not_ended_again_with_its_node() -> None:
    """When a node is excluded and the process of one of its ranks has already ended, then only the
    other rank is told to end. The job does not wait for the ended process."""
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


def test_terminating_process_is_not_told_to_end_again_with_its_node() -> None:
    """When a process was told to end and its node is excluded after that, then only the other
    processes there are told to end. The job continues when all have ended."""
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


def test_process_that_starts_after_its_kill_order_is_still_ended() -> None:
    """When a process is to be ended because its start took too long and its agent then reports the
    start, then the kill order stays outstanding."""
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
