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


def test_what_another_process_says_of_a_rank_is_absorbed() -> None:
    """
    When a process that was refused has not heard it, and goes on as if it held the rank, then what
    it says changes nothing.
    """
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


def test_a_report_of_a_process_that_was_never_ordered_is_absorbed() -> None:
    """
    When a report comes from an incarnation of a rank that the controller has never ordered, then it changes nothing.
    """
    job = trained()
    fault = Faulted(
        rank=2, incarnation=9, kind="software", step=1, summary="Boom", traceback="Boom",
        position=Position(step=0, window=False), at=job.now,
    )  # fmt: skip
    job.report(fault, sender="rank.2/9.77")
    assert job.said == []
    assert job.doing == "healthy"


def test_another_process_does_not_answer_for_a_rank() -> None:
    """
    When a process that does not hold the rank answers an order in its place, then the answer of the
    one that does is still waited for.
    """
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


def test_a_refusal_is_repeated_and_the_refused_is_not_told_that_it_was_heard() -> None:
    """
    When a claim is refused, then that is said again for a while, since nobody answers it; and the
    controller knows who must not believe that it was heard.
    """
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


def test_another_agent_on_a_node_means_that_what_ran_there_is_gone() -> None:
    """
    When an agent joins for a node whose last agent nobody has missed yet, then the ranks of that
    node are lost, and started again there; when the same agent is heard twice, nothing follows.
    """
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
def test_what_ranks_had_captured_goes_with_their_agent(node: int, ranks: tuple[int, ...]) -> None:
    """
    When an agent starts anew, then the pages its ranks had are gone: what is their own is made anew.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    for rank in ranks:
        job.ranks[rank].alive = False
    job.report(NodeJoined(node=node, host="h", pid=2, ranks=ranks, at=job.now))
    job.settle()
    job.train()
    assert job.orders(Rollback)[-1].derive == ranks


def test_another_agent_while_replacements_are_awaited_is_no_end() -> None:
    """
    When a replacement is on its way and the agent of its node starts anew, then the node is known to be
    there when it is judged what can be done: its ranks are started there once more, and nothing is saved.
    """
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
def test_a_node_that_comes_back_has_its_pages_if_its_agent_is_the_same(
    pid: int, derived: tuple[int, ...]
) -> None:
    """
    When a node was given up for its silence and comes back, then what its ranks had captured is there if
    it is the agent of before, and not if it is another one.
    """
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


def test_a_node_that_comes_when_all_is_over_starts_nobody() -> None:
    """
    When a job is ended before all of its nodes have come, and one comes then, then nobody is started there.
    """
    job = ScriptedJob(4, placement={0: (0, 1), 1: (2, 3)})
    job.lead(1)
    job.come(0)
    job.settle()
    job.script.muted = {(rank, "end") for rank in range(2)}
    job.stop()
    job.said.clear()
    job.come(1)
    assert job.orders(Spawn) == []


def test_who_is_lost_beside_one_that_was_to_be_ended_is_planned_for() -> None:
    """
    When one process of a node is to be ended, and its agent starts anew with all that ran there, then
    what to do is decided anew, for the other rank too.
    """
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


def test_a_node_that_comes_is_for_those_outside_and_not_for_one_that_is_thought_about() -> None:
    """
    When a job has shrunk, then has lost another rank, and plugins are asked what to do about that, then a
    node that comes back starts the rank that is outside, and nobody else.
    """
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
