"""
Faults: notices from outside, exceptions of scripts, lost device contexts, and ranks that fail repeatedly.
"""

import pytest

from tests.core.lives import (
    names,
    strategies,
    trained,
    tried,
)
from tft.core.job.policy import (
    Policy,
)
from tft.protocol.messages import (
    Faulted,
    FaultKind,
    Fetch,
    Kill,
    NodeLost,
    Noticed,
    Position,
    Regroup,
    Restore,
    Save,
    Spawn,
    StoreOpened,
)
from tft.testing.scripted import (
    ScriptedJob,
)

# ---------------------------------------------------------------- notices from outside


def not_taken(job: ScriptedJob) -> list[object]:
    """
    Return the reasons that the log gives for notices that had no effect.
    """
    return [facts["why_not"] for facts in job.facts("notice_not_taken")]


def test_notice_about_a_rank_outside_the_job_is_only_logged() -> None:
    """When a notice reports a fault of a rank outside the world, or of a rank that has left with
    its model replica, then no order is sent, and the log says why."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=frozenset({"scale_in", "dump"}))
    job.kill(3)
    job.settle()
    job.train()
    job.said.clear()
    job.notice(3, "memory", "too many corrected errors")
    job.report(Noticed(rank=9, kind="memory", evidence="too many corrected errors", at=job.now))
    assert job.said == []
    assert job.doing == "healthy"
    assert job.facts("notice_not_taken") == [
        {
            "rank": rank,
            "kind": "memory",
            "evidence": "too many corrected errors",
            "why_not": "the rank does not take part in training",
        }
        for rank in (3, 9)
    ]


def test_notice_about_a_starting_process_is_only_logged() -> None:
    """When a notice reports a fault of a rank whose new process is still starting, then that
    process is kept, and the log says why."""
    job = trained()
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    before = len(job.said)
    job.notice(1, "hang")
    assert len(job.said) == before
    assert not_taken(job) == ["its process is starting, and has no state yet that could be wrong"]


def test_faulty_node_is_given_up_while_its_process_starts() -> None:
    """When a notice says that a node is faulty while a process starts there, then both processes of
    the node are ended. Its ranks start on another node."""
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 2})
    job.script.slow = {3}
    job.kill(3)
    job.settle()
    job.notice(3, "node", "its fan has failed")
    job.script.slow = set()
    job.settle()
    job.train()
    assert not_taken(job) == []
    assert [k.rank for k in job.orders(Kill)] == [2, 3]
    assert {job.ranks[rank].node for rank in (2, 3)} == {2}
    assert job.doing == "healthy"


def test_notice_about_a_rank_without_a_process_is_only_logged() -> None:
    """When a rank has no process, because it was lost or was never ordered, then a notice about it
    is only logged."""
    job = trained(enable=frozenset({"scale_in", "dump"}))
    job.kill(3)
    job.notice(3, "process")
    assert job.orders(Kill) == []
    fresh = ScriptedJob(2)
    fresh.notice(1, "node")
    assert not_taken(job) == not_taken(fresh) == ["the rank has no process"]


def test_second_notice_about_a_terminating_process_is_only_logged() -> None:
    """When the same fault is reported again while the process is being ended, then the process is
    not ended twice, and there is one fault."""
    job = trained()
    job.notice(1, "process", "its card is gone")
    job.notice(1, "process", "its card is gone")
    assert [k.rank for k in job.orders(Kill)] == [1]
    assert not_taken(job) == ["its process is being ended: its card is gone"]
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert len(incident["faults"]) == 1


@pytest.mark.parametrize("kind", ["process", "hang"])
def test_notice_during_the_start_counts_against_the_rank(kind: FaultKind) -> None:
    """When the policy allows a rank no incident, and a notice reports a fault of a rank while other
    ranks still start, then that rank gets no other process."""
    job = ScriptedJob(3, Policy(flaps=0))
    job.script.slow = {2}
    job.lead(1)
    job.come(0)
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.settle()
    job.notice(1, kind, "its card is gone")
    job.settle()
    assert "rank 1 was the cause of 1 incidents" in tried(job)["recover"]


@pytest.mark.parametrize("kind", ["memory", "corruption"])
def test_kept_copies_of_a_rank_with_bad_memory_are_not_used(kind: FaultKind) -> None:
    """When the memory of a rank is faulty, then the rank fetches its state from other ranks. Its
    own kept copy of the step before is not used."""
    job = trained(keeps=1, groups={"a": (0, 1), "b": (2, 3)})
    job.notice(1, kind)
    job.window(3)
    job.settle()
    job.train()
    assert [f.to for f in job.orders(Fetch)] == [(1,)]
    assert 1 not in {rank for order in job.orders(Restore) for rank in order.to}
    assert strategies(job) == ["retry"]
    assert names(job.said).count("Freeze") == 1


# ---------------------------------------------------------------- exceptions that leave the loop


TWO_NODES = {0: (0, 1), 1: (2, 3)}


def raised(
    job: ScriptedJob,
    rank: int,
    *,
    kind: FaultKind = "software",
    step: int = 4,
    traceback: str = "Traceback\n  File a\nBoom: it broke",
    incarnation: int = 0,
) -> None:
    """
    Report that an exception with this traceback has left the training loop of `rank`.
    """
    job.report(
        Faulted(
            rank=rank, incarnation=incarnation, kind=kind, step=step, summary="Boom: it broke",
            traceback=traceback, position=Position(step=3, window=False), at=job.now,
        )
    )  # fmt: skip


def told(job: ScriptedJob) -> list[object]:
    """
    Return the ranks whose exceptions are in the log.
    """
    return [facts["rank"] for facts in job.facts("rank_faulted")]


def test_same_exception_on_two_ranks_is_one_fault() -> None:
    """When two ranks raise the same exception in the same step, even with different tracebacks,
    then the report has one fault."""
    job = trained()
    raised(job, 0)
    raised(job, 1, traceback="Traceback\n  File b\n  File c\nBoom: it broke")
    job.settle()
    assert told(job) == [0]
    (incident,) = job.reports()
    assert len(incident["faults"]) == 1


def test_different_exceptions_on_two_ranks_are_two_faults() -> None:
    """When the exception of a second rank has another step, kind or text, then the log names both
    ranks."""
    for change in (
        {"step": 5},
        {"traceback": "Traceback\n  File a\nCrack: it broke"},
        {"kind": "memory"},
    ):
        job = trained()
        raised(job, 0)
        raised(job, 1, **change)
        job.settle()
        assert told(job) == [0, 1], change


def test_software_fault_ends_the_job_when_a_memory_fault_has_the_same_text() -> None:
    """When one rank has a memory fault and another rank has a software fault with the same text,
    then both are logged. The job writes a last checkpoint and ends."""
    job = trained()
    raised(job, 0, kind="memory")
    raised(job, 1)
    job.settle()
    assert told(job) == [0, 1]
    assert job.over is not None
    assert job.over.result == "dumped"


def test_exception_without_a_traceback_is_reported_by_its_summary() -> None:
    """When an exception is reported without a traceback, then the report has its summary as
    evidence."""
    job = trained()
    raised(job, 1, kind="network", traceback="")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [f["evidence"] for f in incident["faults"]] == ["Boom: it broke"]


@pytest.mark.parametrize("kind", ["software", "memory"])
def test_exception_of_a_successor_is_not_a_fault_of_the_job(kind: FaultKind) -> None:
    """When a successor raises an exception before it takes over, then no fault is logged, and the
    ranks that train get no order."""
    job = trained(placement={**TWO_NODES, 2: ()}, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.said.clear()
    job.join(job.successors[3])
    raised(job, 3, kind=kind, incarnation=1)
    assert told(job) == []
    assert job.said == []
    assert job.doing == "healthy"


def test_lost_rank_has_the_step_of_its_last_exception() -> None:
    """When a rank has reported an exception and its node is then lost, then the node fault of that
    rank has the step that the exception named."""
    job = trained(placement=TWO_NODES)
    raised(job, 3, kind="network")
    job.report(NodeLost(node=1, why="its agent has ended", at=job.now))
    steps = {f["rank"]: f["step"] for f in job.facts("fault") if f["kind"] == "node"}
    assert steps == {2: 0, 3: 4}


def test_lost_node_is_not_reported_as_hanging() -> None:
    """When the ranks of a node do not answer, so that their processes are to be ended, and the node is
    then found lost, then the incident has the fault `node` for each of them, and no fault `hang`."""
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 2})
    job.script.deaf = {1}
    job.script.muted = {(2, "freeze"), (3, "freeze")}
    job.fault(0, "network")
    job.settle()
    job.wait()
    assert [f["kind"] for f in job.facts("fault")].count("hang") == 2
    job.script.muted = set()
    job.script.gone = {1}
    job.report(NodeLost(node=1, why="its agent is silent", at=job.now))
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert {(f["kind"], f["rank"]) for f in incident["faults"]} == {("node", 2), ("node", 3)}
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)


def test_kept_copies_of_a_rank_with_corrupt_memory_are_not_used() -> None:
    """When a rank has a corruption fault that may have polluted its state, then its kept copies are
    not used. It fetches from the other ranks."""
    job = trained(keeps=1)
    job.fault(1, "corruption", polluted=True)
    job.settle()
    job.train()
    assert [f.to for f in job.orders(Fetch)] == [(1,)]
    assert job.doing == "healthy"


# ---------------------------------------------------------------- lost device contexts


ECC = "AcceleratorError: CUDA error: uncorrectable ECC error encountered"


def after(job: ScriptedJob) -> None:
    """
    Run the recovery, and train one more step if the job continues.
    """
    job.settle()
    if job.over is None:
        job.train()


@pytest.mark.parametrize("kind", ["memory", "network", "process"])
def test_rank_with_a_lost_device_context_is_replaced(kind: FaultKind) -> None:
    """When an exception has destroyed the device context of a rank, then its process is ended and
    replaced. The report has one fault, with the kind and the text of the exception."""
    job = trained()
    job.fault(1, kind, ECC, context_lost=True)
    after(job)
    assert [(kill.rank, kill.incarnation) for kill in job.orders(Kill)] == [(1, 0)]
    assert [(spawn.rank, spawn.incarnation) for spawn in job.orders(Spawn)] == [(1, 1)]
    assert strategies(job) == ["recover"]
    assert "have lost their process" in tried(job)["retry"]
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [(kind, 1, 4)]
    assert ECC in incident["faults"][0]["evidence"]
    assert job.doing == "healthy"


def test_rank_with_an_intact_device_context_is_retried() -> None:
    """When the device context of a rank is intact after a memory fault, then the process is kept."""
    job = trained()
    job.fault(1, "memory", ECC)
    after(job)
    assert job.orders(Kill) == []
    assert strategies(job) == ["retry"]


def test_connection_error_with_a_lost_context_replaces_the_rank() -> None:
    """When all ranks stop for a fault, and another rank then reports a broken connection that has
    destroyed its device context, then this rank is replaced."""
    job = trained()
    job.fault(0, "memory")
    assert job.doing == "freezing"
    job.fault(1, "network", "CUDA error: uncorrectable NVLink error", context_lost=True)
    after(job)
    assert [spawn.rank for spawn in job.orders(Spawn)] == [1]
    assert strategies(job) == ["recover"]
    assert job.doing == "healthy"


def test_context_found_lost_in_a_rebuild_replaces_the_rank_at_once() -> None:
    """When a rank finds during a rebuild that its device context is lost, then the rebuild is not
    tried again in that process. The process is replaced, and the fault says that it could not
    rebuild."""
    job = trained(groups={"a": (0, 1), "b": (2, 3)})
    job.ranks[2].context_lost = True
    job.fault(1, "memory")
    after(job)
    assert [spawn.rank for spawn in job.orders(Spawn)] == [2]
    assert [kill.rank for kill in job.orders(Kill)] == [2]
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [
        ("memory", 1, 4), ("process", 2, 4),
    ]  # fmt: skip
    words = "AcceleratorError: CUDA error: unspecified launch failure"
    assert incident["faults"][1]["evidence"].startswith(f"could not rebuild: {words}")
    assert strategies(job) == ["recover"]
    assert job.doing == "healthy"


def test_rank_with_a_lost_context_is_no_source() -> None:
    """When a rank with a lost device context holds a copy that another rank needs, then the other
    rank fetches from a third rank."""
    job = trained(groups={"a": (0, 1, 2), "b": (3,)})
    job.fault(0, "memory")
    job.fault(1, "memory", ECC, context_lost=True)
    after(job)
    sources = {
        source.rank
        for fetch in job.orders(Fetch)
        for transfer in fetch.transfers
        for source in transfer.sources
    }
    assert sources == {2}
    assert job.doing == "healthy"


def test_last_checkpoint_is_written_without_a_rank_that_lost_its_context() -> None:
    """When a bug of the script has destroyed a device context, then the other ranks write the last
    checkpoint, and this rank writes no part of it."""
    job = trained()
    text = "AcceleratorError: CUDA error: an illegal memory access was encountered"
    job.fault(0, "software", text, context_lost=True)
    after(job)
    assert job.over is not None
    assert job.over.result == "dumped"
    assert all(0 not in save.to for save in job.orders(Save))
    assert job.orders(Spawn) == []


def test_context_lost_while_saving_starts_no_process() -> None:
    """When a rank finds its device context lost while it writes its part of the last checkpoint,
    then another rank writes that part, and no process is started."""
    job = trained()
    job.ranks[0].context_lost = True
    job.fault(3, "software")
    after(job)
    assert job.over is not None
    assert job.over.result == "dumped"
    assert job.orders(Spawn) == []


def test_job_waits_while_a_rank_with_a_lost_context_is_ended() -> None:
    """When the process of a rank with a lost device context does not end at once, then the fault
    and its step are already logged, and the other ranks wait."""
    job = trained(groups={"a": (0, 1), "b": (2, 3)})
    job.ranks[2].context_lost = True
    job.script.deaf = {0}
    job.fault(1, "memory")
    job.settle()
    assert job.doing == "freezing"
    faults = [(f["kind"], f["rank"], f["step"]) for f in job.facts("fault")]
    assert faults == [("memory", 1, 4), ("process", 2, 4)]


def test_context_lost_while_restoring_a_copy_to_save_starts_no_process() -> None:
    """When a rank finds its device context lost while it restores the copy to be saved, then
    another rank saves that shard. The rank still saves its rank-local state, which no other rank
    has."""
    job = trained(world=3, keeps=1, enable=frozenset({"dump"}))
    job.ranks[0].context_lost = True
    job.fault(2, "numeric", polluted=True)
    job.settle()
    saves = {save.to: save.shards for save in job.orders(Save)}
    assert (saves[0,], saves[1,]) == ((), ("dense",))
    assert job.orders(Spawn) == []
    assert job.over is not None
    assert job.over.result == "dumped"


def test_context_lost_after_the_last_step_does_not_fail_the_job() -> None:
    """When a rank has done all its steps and finds its device context lost in the order `complete`,
    then the outcome is still `completed`."""
    job = trained()
    job.ranks[2].context_lost = True
    job.script.failures[2, "complete"] = ["AcceleratorError: CUDA error: unknown error"]
    job.finish()
    assert job.over is not None
    assert job.over.result == "completed"
    assert job.orders(Kill) == []


def test_one_bug_that_destroys_two_contexts_ends_both_processes() -> None:
    """When the same bug has destroyed two device contexts, then both processes are ended, and the
    report has only one `software` fault. Neither rank writes a part of the last checkpoint."""
    job = trained()
    for rank in (0, 2):
        job.fault(rank, "software", "CUDA error: device-side assert triggered", context_lost=True)
    after(job)
    assert [kill.rank for kill in job.orders(Kill)] == [0, 2]
    assert {rank for save in job.orders(Save) for rank in save.to} == {1, 3}
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("software", 0), ("process", 2)]


# ---------------------------------------------------------------- ranks that fail repeatedly


WHY = "rank 1 was the cause of 3 incidents within 600 s"
NO_SHRINKING = frozenset({"retry", "recover", "dump"})


def fails(job: ScriptedJob, kind: FaultKind, rank: int = 1) -> None:
    """
    Let a rank fail, run the recovery, and train one more step if the job continues.
    """
    if kind == "process":
        job.kill(rank)
    else:
        job.fault(rank, kind)
    job.settle()
    if job.over is None:
        job.train()


@pytest.mark.parametrize("kind", ["process", "memory", "numeric"])
def test_job_is_dumped_when_a_rank_fails_too_often_and_it_cannot_shrink(kind: FaultKind) -> None:
    """When a rank has caused more incidents than allowed and the job cannot shrink, then the rank
    is not repaired again. The job writes a last checkpoint and ends, and the report gives the
    reason."""
    job = trained(flaps=2, enable=NO_SHRINKING)
    for _ in range(3):
        assert job.over is None
        fails(job, kind)
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert strategies(job)[-1] == "dump"
    assert tried(job)["recover"] == WHY
    assert tried(job)["retry"] == (
        WHY if kind != "process" else "ranks [1] have lost their process"
    )
    assert len(job.orders(Spawn)) == (2 if kind == "process" else 0)


@pytest.mark.parametrize("kind", ["process", "memory"])
def test_rank_that_fails_too_often_leaves_when_the_job_can_shrink(kind: FaultKind) -> None:
    """When a rank fails too often and the job can shrink, then the rank leaves the job, even if its
    process is alive. The other ranks continue."""
    job = trained(flaps=2)
    for _ in range(3):
        fails(job, kind)
    assert strategies(job)[-1] == "scale_in"
    assert tried(job)["recover"] == WHY
    assert job.machine.members == {0, 2, 3}
    assert [r.without for r in job.orders(Regroup)][-1] == (1,)
    assert job.doing == "healthy"


def test_rank_that_left_after_too_many_failures_rejoins_only_after_the_window() -> None:
    """When a rank has left after too many failures, then no process is started for it until the
    failure window has passed. After the window, the rank rejoins."""
    job = trained(flaps=1)
    for _ in range(2):
        fails(job, "process")
    assert job.machine.members == {0, 2, 3}
    before = len(job.orders(Spawn))
    fails(job, "network", rank=2)
    assert len(job.orders(Spawn)) == before
    assert job.machine.members == {0, 2, 3}
    job.now += 700.0
    fails(job, "network", rank=2)
    job.train()
    assert job.machine.members == {0, 1, 2, 3}


def test_failures_outside_the_window_do_not_count() -> None:
    """When the failures of a rank are far enough apart, then the rank is replaced every time."""
    job = trained(flaps=2, flap_window=100.0)
    for _ in range(6):
        fails(job, "process")
        job.now += 60.0
    assert strategies(job) == ["recover"] * 6
    assert job.doing == "healthy"


def test_failures_are_counted_per_rank() -> None:
    """When four ranks fail one after another, then each is replaced, and no rank counts as failing
    too often."""
    job = trained(flaps=1)
    for rank in range(4):
        fails(job, "process", rank)
    assert strategies(job) == ["recover"] * 4


def test_rank_that_reports_broken_connections_is_not_counted_as_failing() -> None:
    """When a rank reports broken connections each time another rank dies, then only the ranks that
    died are counted."""
    job = trained(flaps=1)
    job.fault(0, "network")
    job.kill(1)
    job.settle()
    job.train()
    job.fault(0, "network")
    job.kill(2)
    job.settle()
    job.train()
    assert strategies(job) == ["recover", "recover"]
    assert {rank: len(at) for rank, at in job.machine._job.history.troubles.items()} == {1: 1, 2: 1}


def test_two_deaths_of_a_rank_in_one_incident_count_once() -> None:
    """When the new process of a rank dies in the same incident, then this counts as one failure of
    the rank."""
    job = trained(flaps=1)
    job.kill(1)
    job.settle()
    job.kill(1)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert {rank: len(at) for rank, at in job.machine._job.history.troubles.items()} == {1: 1}


def test_flapping_rank_leaves_when_another_rank_fails_with_it() -> None:
    """When a rank that fails too often and another rank die together, then the job follows
    `scale_in`, and the rank that fails too often leaves."""
    job = trained(flaps=1)
    fails(job, "process")
    job.script.slow = {2}
    job.kill(1)
    job.kill(2)
    job.settle()
    job.train()
    assert strategies(job)[-1] == "scale_in"
    assert 1 not in job.machine.members
    assert job.doing == "healthy"


def test_rank_leaves_when_it_loses_its_node_too_often() -> None:
    """When the node of a rank is lost more often than allowed, then the rank is not moved to
    another node again, and leaves the job."""
    job = trained(
        flaps=1, placement={0: (0, 1, 2), 1: (3,), 2: (), 3: (), 4: ()}, spare={2: 1, 3: 1, 4: 1}
    )
    for node in (1, 2):
        job.lose_node(node)
        job.settle()
        job.train()
    assert [s.node for s in job.orders(Spawn)] == [2]
    assert strategies(job) == ["recover", "scale_in"]
    assert tried(job)["recover"] == "rank 3 was the cause of 2 incidents within 600 s"


def test_job_is_dumped_when_it_has_too_many_incidents() -> None:
    """When the job has reached its limit of 2 incidents, then the next incident ends in a last
    checkpoint, for any rank."""
    job = trained(max_incidents=2)
    for rank in (0, 1, 2):
        fails(job, "process", rank)
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert tried(job)["recover"] == "the job has had 2 incidents, which is its limit"
    assert [s.rank for s in job.orders(Spawn)] == [0, 1]
