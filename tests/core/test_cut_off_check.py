"""
Checks that a fault cuts off: what some ranks have found by then counts.
"""

from typing import Any

from tests.core.lives import strategies, trained
from tft.protocol.messages import Check, Kill, Spawn
from tft.testing.scripted import ScriptedJob

FOUND = "the check found: a link drops packets (rank 2)"


def checking(**facts: Any) -> ScriptedJob:  # Any: as in `trained`
    """
    Two nodes and a third with room. The check has found rank 2 unfit, and still runs on rank 1.
    """
    placement = {0: (0, 1), 1: (2, 3), 2: ()}
    job = trained(**{"placement": placement, "spare": {2: 4}, **facts})
    job.script.verdicts = {2: ("isolate", "a link drops packets")}
    job.script.muted = {(1, "check")}
    job.pause("links")
    job.settle()
    assert job.doing == "paused"
    job.script.muted = set()
    return job


def started(job: ScriptedJob) -> list[tuple[int, int]]:
    """
    Rank and node of every process that was asked for.
    """
    return sorted((spawn.rank, spawn.node) for spawn in job.orders(Spawn))


def test_unfit_rank_is_isolated_when_a_fault_interrupts_the_check() -> None:
    """When a rank dies in a check that has found another rank unfit, then the node of the unfit
    rank is excluded in the same incident, and its ranks move. The check does not run again."""
    job = checking()
    job.kill(0)
    job.settle()
    job.train()
    assert [(k.rank, k.node, k.cause) for k in job.orders(Kill)] == [(2, 1, FOUND), (3, 1, FOUND)]
    assert started(job) == [(0, 0), (2, 2), (3, 2)]
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [
        ("process", 0), ("node", 2), ("node", 3),
    ]  # fmt: skip
    assert FOUND in incident["faults"][1]["evidence"]
    assert strategies(job) == ["recover"]
    assert job.doing == "healthy"
    assert job.machine.checked == "a link drops packets (rank 2); a fault has interrupted it"
    assert job.facts("checked") == [{"what": job.machine.checked}]
    assert len(job.orders(Check)) == 1


def test_unfit_rank_that_dies_in_the_check_moves_to_another_node() -> None:
    """When a rank reports that it is unfit and dies before the check ends, then all ranks of its
    node move. The job does not wait for the end of the dead process."""
    job = checking()
    job.kill(2)
    began = job.now
    job.settle()
    job.train()
    assert [(k.rank, k.cause) for k in job.orders(Kill)] == [(3, FOUND)]
    assert started(job) == [(2, 2), (3, 2)]
    assert job.doing == "healthy"
    assert job.now < began + 1.0


def test_lost_node_of_an_unfit_rank_is_not_used_again() -> None:
    """When a check has found a rank unfit and its node is lost before the check ends, then no
    process is started on that node when its agent returns."""
    job = checking()
    job.lose_node(1)
    job.settle()
    job.train()
    job.come(1)
    job.settle()
    assert started(job) == [(2, 2), (3, 2)]
    assert 1 not in job.machine.nodes
    assert job.doing == "healthy"


def test_hung_rank_is_ended_and_the_node_of_an_unfit_rank_is_excluded() -> None:
    """When a check has found one rank unfit and another rank never answers, then the silent rank is
    ended. The node of the unfit rank is excluded."""
    job = checking(check=30.0)
    job.wait()
    job.settle()
    job.train()
    assert [(k.rank, k.node) for k in job.orders(Kill)] == [(2, 1), (3, 1), (1, 0)]
    assert started(job) == [(1, 0), (2, 2), (3, 2)]
    assert job.doing == "healthy"


def test_check_is_cut_off_without_a_kill_when_most_ranks_do_not_answer() -> None:
    """When most ranks do not answer a check in time, then the check is cut off and no rank is
    ended. All ranks continue from their step."""
    job = trained()
    job.script.muted = {(rank, "check") for rank in range(3)}
    job.pause("links")
    job.settle()
    job.wait()
    assert job.doing == "freezing"
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.orders(Kill) == []
    (incident,) = job.reports()
    assert (incident["strategy"], incident["steps_lost"]) == ("retry", 0)
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [("network", None, 4)]
    assert incident["faults"][0]["evidence"] == "ranks [0, 1, 2]: no answer to check in time"
    assert job.machine.checked == "a fault has interrupted it"


def test_node_of_an_unfit_rank_is_excluded_when_most_ranks_do_not_answer() -> None:
    """When a check has found one rank unfit and most other ranks do not answer, then the node of
    the unfit rank is excluded. The other ranks keep their processes."""
    job = trained(placement={0: (0, 1), 1: (2,), 2: (3,), 3: ()}, spare={3: 4})
    job.script.verdicts = {2: ("isolate", "a link drops packets")}
    job.script.muted = {(rank, "check") for rank in (0, 1, 3)}
    job.pause("links")
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert [(k.rank, k.cause) for k in job.orders(Kill)] == [(2, FOUND)]
    assert started(job) == [(2, 3)]
    assert job.doing == "healthy"


def test_ranks_without_an_answer_are_ended_when_they_are_at_most_half() -> None:
    """When at most half of the ranks do not answer a check in time, then these ranks count as hung
    and are ended."""
    job = trained()
    job.script.muted = {(rank, "check") for rank in (0, 1)}
    job.pause("links")
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [0, 1]
    assert job.doing == "healthy"


def test_check_verdict_to_end_the_job_applies_when_the_check_is_cut_off() -> None:
    """When a rank reports in a check that the job must end, and another rank dies before the check
    ends, then the job writes a last checkpoint and ends."""
    job = trained()
    job.script.verdicts = {2: ("end", "the model has diverged")}
    job.script.muted = {(1, "check")}
    job.pause("model")
    job.settle()
    job.kill(3)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert "the check ends the job: the model has diverged (rank 2)" in job.over.why
    assert job.orders(Spawn) == []


def test_verdict_of_an_earlier_check_does_not_exclude_the_new_node() -> None:
    """When a rank has moved after a check found it unfit, and dies in the next check without an
    answer, then the rank restarts on its new node."""
    job = checking()
    job.kill(0)
    job.settle()
    job.train()
    job.said.clear()
    job.script.muted = {(2, "check")}
    job.pause("links")
    job.settle()
    job.script.muted = set()
    job.kill(2)
    job.settle()
    job.train()
    assert job.orders(Kill) == []
    assert started(job) == [(2, 2)]
    assert job.doing == "healthy"


def test_unfit_ranks_without_a_reason_are_isolated() -> None:
    """When a check finds ranks unfit and gives no reason, then their processes are ended, and the
    result names the ranks."""
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 4})
    job.script.verdicts = {2: ("isolate", ""), 3: ("isolate", "")}
    job.pause("links")
    job.settle()
    assert [k.rank for k in job.orders(Kill)] == [2, 3]
    assert "(rank 2, 3)" in job.machine.checked
