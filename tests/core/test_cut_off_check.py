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


def test_a_rank_that_was_found_unfit_is_isolated_with_the_fault_that_cuts_the_check_off() -> None:
    """
    When a rank dies in a check that has found another one unfit, then that one's node is given up
    in the same incident, its ranks move, and whoever asked for the check reads what was found. The
    check is not begun again.
    """
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


def test_a_rank_that_found_itself_unfit_and_dies_is_not_started_where_it_was() -> None:
    """
    When a rank says that it is unfit and dies before the check is over, then it and the others of
    its node move, and nobody waits for its end, which has come.
    """
    job = checking()
    job.kill(2)
    began = job.now
    job.settle()
    job.train()
    assert [(k.rank, k.cause) for k in job.orders(Kill)] == [(3, FOUND)]
    assert started(job) == [(2, 2), (3, 2)]
    assert job.doing == "healthy"
    assert job.now < began + 1.0


def test_the_node_of_an_unfit_rank_that_is_lost_is_not_taken_back() -> None:
    """
    When a node is lost before the check is over that has found one of its ranks unfit, then
    nothing is started there when its agent comes again.
    """
    job = checking()
    job.lose_node(1)
    job.settle()
    job.train()
    job.come(1)
    job.settle()
    assert started(job) == [(2, 2), (3, 2)]
    assert 1 not in job.machine.nodes
    assert job.doing == "healthy"


def test_a_rank_in_which_a_check_hangs_does_not_cover_one_that_is_unfit() -> None:
    """
    When the check has found one rank unfit and another never says anything, then that one is
    ended, and the unfit one's node is given up.
    """
    job = checking(check=30.0)
    job.wait()
    job.settle()
    job.train()
    assert [(k.rank, k.node) for k in job.orders(Kill)] == [(2, 1), (3, 1), (1, 0)]
    assert started(job) == [(1, 0), (2, 2), (3, 2)]
    assert job.doing == "healthy"


def test_a_check_that_keeps_most_of_them_is_cut_off_and_ends_nobody() -> None:
    """
    When most ranks do not come through a check in time, since one of them hangs in it or nobody is
    heard, then it is cut off, nobody is ended, and everyone goes on from where they stood.
    """
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


def test_what_was_found_before_a_check_kept_the_others_counts() -> None:
    """
    When a check has found one rank unfit and most others do not come through it, then the node of
    that one is given up, and the others live.
    """
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


def test_one_half_that_a_check_keeps_is_ended() -> None:
    """
    When no more than half of them do not come through a check in time, then the others did without
    them: it is they that hang.
    """
    job = trained()
    job.script.muted = {(rank, "check") for rank in (0, 1)}
    job.pause("links")
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [0, 1]
    assert job.doing == "healthy"


def test_a_check_that_ends_the_job_ends_it_though_it_is_cut_off() -> None:
    """
    When one rank says that the job has to end, and another dies before the check is over, then
    a last checkpoint is written all the same.
    """
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


def test_what_an_earlier_check_has_found_is_not_held_against_the_next_node() -> None:
    """
    When a rank has moved because a check found its node unfit, and dies in the next check before
    it has said anything, then it is started again where it was.
    """
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


def test_a_rank_that_is_unfit_without_a_word_has_not_passed() -> None:
    """
    When a check finds ranks unfit and says nothing more, then their node is given up, and whoever
    asked reads which ranks it were.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 4})
    job.script.verdicts = {2: ("isolate", ""), 3: ("isolate", "")}
    job.pause("links")
    job.settle()
    assert [k.rank for k in job.orders(Kill)] == [2, 3]
    assert "(rank 2, 3)" in job.machine.checked
