"""
Copies that ranks keep of steps further back, and the rank-local state that belongs to them.
"""

import pytest

from tests.core.lives import strategies, trained, tried
from tft.protocol.messages import Fetch, Load, Restore, Rollback
from tft.testing.scripted import ScriptedJob


def kept(job: ScriptedJob, *steps: int) -> ScriptedJob:
    """
    Let all ranks keep copies of `steps`.
    """
    for rank in job.ranks.values():
        rank.state.backups = steps
    return job


def test_killed_rank_goes_back_to_a_copy_that_the_others_keep() -> None:
    """When the numbers are wrong since a step and a rank is killed in the same incident, then the
    others restore their newest earlier copy. The new process fetches this copy, and takes its
    rank-local state from the page of the rank: nothing is derived."""
    job = kept(trained(steps=9), 2, 5)
    job.fault(1, "numeric", polluted=True, not_after=7)
    job.kill(2)
    job.settle()
    job.train()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((0, 1, 3), 5)]
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((2,), 5)]
    [source] = {s.rank for f in job.orders(Fetch) for t in f.transfers for s in t.sources} & {0}
    assert source == 0
    assert [(r.step, r.derive) for r in job.orders(Rollback)] == [(5, ())]
    (incident,) = job.reports()
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 4)


@pytest.mark.parametrize("not_after", [3, 2])
def test_newest_copy_before_the_limit_is_taken(not_after: int) -> None:
    """When several copies are kept, then the newest that is not later than the limit is restored."""
    job = kept(trained(steps=9), 2, 5)
    job.fault(1, "numeric", polluted=True, not_after=not_after)
    job.settle()
    assert {r.step for r in job.orders(Restore)} == {2}


def test_copies_before_a_node_was_lost_do_not_count_without_rank_local_state() -> None:
    """When a rank is lost with its node, then its rank-local state of the kept steps is lost, too.
    All ranks load a checkpoint instead, though an older step is kept."""
    job = trained(steps=9, placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1}, derives=False)
    kept(job, 2, 5).checkpointed(4)
    job.lose_node(1)
    job.settle()
    job.train()
    assert (job.orders(Restore), {o.step for o in job.orders(Load)}) == ([], {4})


def test_copy_that_only_some_ranks_keep_is_given_to_the_others() -> None:
    """When one rank could not make the copy that the others keep, then it fetches this copy."""
    job = kept(trained(steps=9), 2, 5)
    job.ranks[3].state.backups = (2,)
    job.fault(1, "numeric", polluted=True, not_after=7)
    job.settle()
    job.train()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((0, 1, 2), 5)]
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((3,), 5)]
    assert strategies(job) == ["retry"]
    assert tried(job) == {}


def test_checkpoints_after_the_limit_are_given_up_when_the_job_ends() -> None:
    """When a job ends in an incident with wrong numbers, then the outcome says from which checkpoints
    no job may resume. When a later job in the same process completes, then there is no such limit.
    """
    job = kept(trained(steps=9, enable=frozenset({"dump"})), 2, 5)
    job.fault(1, "numeric", polluted=True, not_after=7)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.sound) == ("dumped", 7)
    recovered = kept(trained(steps=9), 2, 5)
    recovered.fault(1, "numeric", polluted=True, not_after=7)
    recovered.settle()
    recovered.train(5)
    recovered.finish()
    recovered.settle()
    assert recovered.over is not None
    assert (recovered.over.result, recovered.over.sound) == ("completed", None)


def test_a_step_that_is_completed_before_ranks_leave_their_loops_counts_as_lost() -> None:
    """When a rank had begun the update of a step, and the others complete this step before they leave
    their loops, then it is one of the steps that are lost if all go back to an earlier copy."""
    job = kept(trained(steps=9), 2, 5)
    job.window(1)
    job.fault(0, "numeric", polluted=True, not_after=7)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["step"], incident["steps_lost"]) == (6, 5)


def test_copies_of_the_start_that_differ_after_they_were_equal_are_a_fault() -> None:
    """When all ranks have begun with equal copies and later go back to copies of step 0 that one of
    them fetches damaged, then this rank fetches once more."""
    job = kept(trained(steps=9), 0)
    job.ranks[3].state.backups = ()
    job.script.miscopied = {3: 1}
    job.fault(1, "numeric", polluted=True, not_after=0)
    job.settle()
    job.train()
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((3,), 0), ((3,), 0)]
    assert job.machine.begins_unlike == ()
    assert job.doing == "healthy"
