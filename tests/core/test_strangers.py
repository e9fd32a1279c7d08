"""
Whoever comes without being asked for: a process that claims a rank, an agent that claims a node.
"""

import pytest

from tests.core.lives import strategies, trained
from tft.protocol.messages import (
    Answered,
    Faulted,
    Joined,
    NodeJoined,
    Position,
    Ready,
    Refused,
    Rollback,
    Save,
    ShardCopies,
    Spawn,
)
from tft.testing.scripted import ScriptedJob

STRANGER = "rank.2/0.77"


def claim(job: ScriptedJob) -> Joined:
    """
    The script of rank 2 was started again by somebody, with the environment it had.
    """
    return Joined(
        rank=2, incarnation=0, world=4, pid=77, started=5, host="h", address="h:9", adaptor="fake",
        strategies=(), at=job.now,
    )  # fmt: skip


def test_reports_of_a_refused_process_are_ignored() -> None:
    """When a process whose claim on a rank was refused continues to send reports for that rank,
    then these reports change nothing."""
    job = trained()
    held = job.machine._job.ranks.states[2].holdings.held
    job.report(claim(job), sender=STRANGER)
    job.said.clear()
    shards = (ShardCopies(shard="other", ranks=(2,)),)
    job.report(Ready(rank=2, incarnation=0, shards=shards, at=job.now), sender=STRANGER)
    job.report(
        Faulted(
            rank=2, incarnation=0, kind="software", step=1, summary="Boom", traceback="Boom",
            position=Position(step=0, window=False), at=job.now,
        ),
        sender=STRANGER,
    )  # fmt: skip
    assert job.said == []
    assert job.doing == "healthy"
    assert job.machine._job.ranks.states[2].holdings.held == held
    assert "other" not in job.machine._job.ranks.topology().groups


def test_report_of_an_unordered_process_is_ignored() -> None:
    """When a report comes from an incarnation of a rank that the controller has never ordered, then
    it changes nothing."""
    job = trained()
    fault = Faulted(
        rank=2, incarnation=9, kind="software", step=1, summary="Boom", traceback="Boom",
        position=Position(step=0, window=False), at=job.now,
    )  # fmt: skip
    job.report(fault, sender="rank.2/9.77")
    assert job.said == []
    assert job.doing == "healthy"


def test_answer_of_an_unknown_process_does_not_count_for_the_rank() -> None:
    """When a process that does not hold the rank answers an order, then the controller still waits
    for the answer of the process that holds it."""
    job = trained()
    job.script.muted = {(2, "freeze")}
    job.kill(1)
    job.settle()
    incident = job.machine.incident
    answer = Answered(
        rank=2, incarnation=0, incident=incident.number, round=incident.round, order="freeze",
        position=Position(step=0, window=False), held=0, began=job.now, at=job.now,
    )  # fmt: skip
    job.report(answer, sender=STRANGER)
    assert job.doing == "freezing"
    job.report(answer)
    assert job.doing == "clearing"


def test_refusal_is_repeated_and_the_refused_process_is_remembered() -> None:
    """When a claim is refused, then the refusal is repeated for a limited time. The controller
    remembers the refused process and does not acknowledge its reports."""
    job = trained()
    job.report(claim(job), sender=STRANGER)
    assert list(job.machine.refused) == [STRANGER]
    (refused,) = job.machine.outstanding()
    assert isinstance(refused, Refused)
    assert refused.pid == 77
    job.now += 60.0
    job.train()
    job.lead(2)
    assert job.machine.outstanding() == []
    assert list(job.machine.refused) == [STRANGER]


def test_new_agent_on_a_node_means_its_ranks_are_lost() -> None:
    """When a new agent joins for a node, then the ranks of that node are lost and started again
    there. A repeated join of the same agent changes nothing."""
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    joined = NodeJoined(node=1, host="h", pid=1, ranks=(2, 3), at=job.now)
    job.report(joined)
    assert job.said == []
    job.ranks[2].alive = job.ranks[3].alive = False
    again = NodeJoined(node=1, host="h", pid=2, ranks=(2, 3), at=job.now)
    job.report(again)
    assert job.doing == "freezing"
    job.settle()
    assert [(s.rank, s.node, s.incarnation) for s in job.orders(Spawn)] == [(2, 1, 1), (3, 1, 1)]
    job.train()
    assert strategies(job) == ["recover"]
    faults = job.machine.incidents[-1].faults
    assert {fault.evidence for fault in faults} == {"another agent has come up on node 1"}


@pytest.mark.parametrize(("node", "ranks"), [(0, (0, 1)), (1, (2, 3))])
def test_captured_state_is_recreated_when_the_agent_of_its_ranks_is_new(
    node: int, ranks: tuple[int, ...]
) -> None:
    """When a new agent joins for a node, then the captured state of its ranks is lost and is
    recreated."""
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    for rank in ranks:
        job.ranks[rank].alive = False
    job.report(NodeJoined(node=node, host="h", pid=2, ranks=ranks, at=job.now))
    job.settle()
    job.train()
    assert job.orders(Rollback)[-1].derive == ranks


def test_new_agent_while_a_successor_is_awaited_does_not_end_the_job() -> None:
    """When a new agent joins for a node while a successor starts there, then the ranks of the node
    are started there once more. No last checkpoint is written."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=frozenset({"retry", "recover", "dump"}))
    job.script.slow = {3}
    job.kill(3)
    job.settle()
    assert job.doing == "awaiting"
    job.script.slow = set()
    job.ranks[2].alive = job.ranks[3].alive = False
    job.report(NodeJoined(node=1, host="h", pid=2, ranks=(2, 3), at=job.now))
    assert job.doing == "awaiting"
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert job.orders(Save) == []


@pytest.mark.parametrize(("pid", "derived"), [(1, ()), (9, (2, 3))])
def test_returning_node_has_its_captured_state_only_with_the_same_agent(
    pid: int, derived: tuple[int, ...]
) -> None:
    """When a node lost by silence returns with the same agent, then the captured state of its ranks
    is available. With another agent it is recreated."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=frozenset({"recover"}), advised=True)
    job.lose_node(1)
    job.settle()
    assert job.doing == "choosing"
    job.script.gone = set()
    job.report(NodeJoined(node=1, host="h", pid=pid, ranks=(2, 3), at=job.now))
    job.advise()
    job.settle()
    job.train()
    assert job.orders(Rollback)[-1].derive == derived


def test_node_that_joins_after_the_end_starts_no_process() -> None:
    """When a job ends before all of its nodes have joined and another node joins then, then no
    process is started there."""
    job = ScriptedJob(4, placement={0: (0, 1), 1: (2, 3)})
    job.lead(1)
    job.come(0)
    job.settle()
    job.script.muted = {(rank, "end") for rank in range(2)}
    job.stop()
    job.said.clear()
    job.come(1)
    assert job.orders(Spawn) == []


def test_strategy_is_chosen_again_when_a_second_rank_of_the_node_is_lost() -> None:
    """When one process of a node is to be ended and a new agent joins for the node, then the
    strategy is chosen again for both lost ranks."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=frozenset({"recover", "dump"}))
    job.script.deaf = {1}
    job.fault(2, "memory")
    job.settle()
    assert job.doing == "awaiting"
    job.script.deaf = set()
    job.said.clear()
    job.ranks[2].alive = job.ranks[3].alive = False
    job.report(NodeJoined(node=1, host="h", pid=9, ranks=(2, 3), at=job.now))
    assert "ranks [2, 3]" in str(job.facts("strategy_chosen")[-1]["why"])
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]


def test_returning_node_starts_only_the_rank_outside_the_shrunk_job() -> None:
    """When a shrunk job has lost another rank and plugins are asked about it, then a returning node
    starts only the rank that is outside the job."""
    shape = {0: (0, 1), 1: (2,), 2: (3,)}
    enable = frozenset({"recover", "scale_in", "scale_out"})
    job = trained(placement=shape, spare={2: 1}, advised=True, enable=enable)
    job.lose_node(2)
    job.settle()
    job.advise()
    job.settle()
    job.train()
    job.lose_node(1)
    job.settle()
    assert job.doing == "choosing"
    job.said.clear()
    job.come(2)
    assert [spawn.rank for spawn in job.orders(Spawn)] == [3]
