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
    Return the reasons for which the job refused notices.
    """
    return [facts["why_not"] for facts in job.facts("notice_not_taken")]


def test_a_notice_of_a_rank_that_takes_no_part_is_told_and_not_taken() -> None:
    """
    When something is seen of a rank outside the world, or of one that has left with its column,
    then nothing follows, and the log says why.
    """
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
            "why_not": "the rank does not take part",
        }
        for rank in (3, 9)
    ]


def test_a_notice_of_a_process_that_is_starting_is_told_and_not_taken() -> None:
    """
    When a fault is seen of a rank whose next process is only on its way, then the new process is
    left in peace, and the log says why.
    """
    job = trained()
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    before = len(job.said)
    job.notice(1, "hang")
    assert len(job.said) == before
    assert not_taken(job) == ["its process is starting, and has no state yet that could be wrong"]


def test_a_node_is_given_up_though_its_process_is_only_starting() -> None:
    """
    When it is the node that is wrong, then the process that starts there is ended and comes up on
    another; it is no member's state that is lost.
    """
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


def test_a_notice_of_a_rank_without_a_process_is_told_and_not_taken() -> None:
    """
    When a rank has lost its process and nobody may start another yet, then there is nothing that a
    notice could be about; nor where none was asked for yet.
    """
    job = trained(enable=frozenset({"scale_in", "dump"}))
    job.kill(3)
    job.notice(3, "process")
    assert job.orders(Kill) == []
    fresh = ScriptedJob(2)
    fresh.notice(1, "node")
    assert not_taken(job) == not_taken(fresh) == ["the rank has no process"]


def test_a_notice_of_a_process_that_is_being_ended_is_told_and_not_taken() -> None:
    """
    When the same is said once more, then the process is not ended twice, and it is one fault.
    """
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
def test_what_is_seen_of_a_rank_while_the_job_starts_counts_against_it(kind: FaultKind) -> None:
    """
    When a rank may cause no incident, and something is seen of it while others still start, then it
    is not given another process.
    """
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
def test_where_memory_is_bad_the_kept_copies_are_not_trusted(kind: FaultKind) -> None:
    """
    When the memory of a rank is suspect, then it takes its state from others, though it keeps a
    copy of the step before; so it is for what it has sent out as for what it says itself.
    """
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
    """When two ranks raise the same exception in the same step, with different tracebacks, then the
    report has one fault."""
    job = trained()
    raised(job, 0)
    raised(job, 1, traceback="Traceback\n  File b\n  File c\nBoom: it broke")
    job.settle()
    assert told(job) == [0]
    (incident,) = job.reports()
    assert len(incident["faults"]) == 1


def test_different_exceptions_on_two_ranks_are_two_faults() -> None:
    """When the second exception has another step, kind or text, then the log names both ranks."""
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
    then both are logged, and the job is dumped."""
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
    """When a successor raises before it takes over, then no fault is logged, and the ranks that
    train get no order."""
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
    """When a rank has raised and its node is lost before it answers, then the node fault has the
    step that the exception named."""
    job = trained(placement=TWO_NODES)
    raised(job, 3, kind="network")
    job.report(NodeLost(node=1, why="its agent has ended", at=job.now))
    steps = {f["rank"]: f["step"] for f in job.facts("fault") if f["kind"] == "node"}
    assert steps == {2: 0, 3: 4}


def test_kept_copies_of_a_rank_with_corrupt_memory_are_not_used() -> None:
    """When a rank has a polluted corruption fault, then its kept copies are not used, and it
    fetches from the other ranks."""
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
def test_a_rank_that_has_lost_its_context_gets_another_process(kind: FaultKind) -> None:
    """
    When an exception has taken the context of its device with it, then the rank is not asked to go on:
    its process is ended with the exception's words, another one takes its place, and the report
    has one fault, of the kind that it was.
    """
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


def test_a_fault_that_leaves_the_context_is_retried() -> None:
    """
    When the same words come and the context is intact, then the process is kept.
    """
    job = trained()
    job.fault(1, "memory", ECC)
    after(job)
    assert job.orders(Kill) == []
    assert strategies(job) == ["retry"]


def test_a_broken_connection_that_took_the_context_is_no_symptom() -> None:
    """
    When a rank says, while everyone is being stopped for the fault of another, that a broken connection
    took the context of its device, then it gets another process, too.
    """
    job = trained()
    job.fault(0, "memory")
    assert job.doing == "freezing"
    job.fault(1, "network", "CUDA error: uncorrectable NVLink error", context_lost=True)
    after(job)
    assert [spawn.rank for spawn in job.orders(Spawn)] == [1]
    assert strategies(job) == ["recover"]
    assert job.doing == "healthy"


def test_a_context_that_is_found_lost_later_has_its_process_replaced_at_once() -> None:
    """
    When a rank finds out only on the way back into the loop that its context is lost, then nobody has it
    try again: its process is replaced, and the report says which order it was.
    """
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


def test_nobody_fetches_from_a_rank_whose_context_is_lost() -> None:
    """
    When the rank whose context is lost had a copy that another needs, then that one is given the copy
    of a third.
    """
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


def test_a_bug_that_takes_the_context_leaves_a_checkpoint_of_the_others() -> None:
    """
    When a script's own bug has taken the context of a device, then the others write the last
    checkpoint, and that rank is not asked for a part of it.
    """
    job = trained()
    text = "AcceleratorError: CUDA error: an illegal memory access was encountered"
    job.fault(0, "software", text, context_lost=True)
    after(job)
    assert job.over is not None
    assert job.over.result == "dumped"
    assert all(0 not in save.to for save in job.orders(Save))
    assert job.orders(Spawn) == []


def test_a_context_that_is_found_lost_while_saving_is_no_reason_to_replace() -> None:
    """
    When a rank that is to write a part of the last checkpoint finds its context lost, then another
    one writes it, and no process is started for that.
    """
    job = trained()
    job.ranks[0].context_lost = True
    job.fault(3, "software")
    after(job)
    assert job.over is not None
    assert job.over.result == "dumped"
    assert job.orders(Spawn) == []


def test_everyone_stands_still_while_such_a_process_is_being_ended() -> None:
    """
    When the process of a rank that has found its context lost does not end at once, then the fault is
    known all the same, with its step, and nobody goes on without it.
    """
    job = trained(groups={"a": (0, 1), "b": (2, 3)})
    job.ranks[2].context_lost = True
    job.script.deaf = {0}
    job.fault(1, "memory")
    job.settle()
    assert job.doing == "freezing"
    faults = [(f["kind"], f["rank"], f["step"]) for f in job.facts("fault")]
    assert faults == [("memory", 1, 4), ("process", 2, 4)]


def test_who_takes_no_copy_back_for_the_last_checkpoint_is_not_replaced() -> None:
    """
    When a rank finds its context lost as it takes back the copy that it is to save, then another one saves
    that, and the rank what is its own: nobody else has it.
    """
    job = trained(world=3, keeps=1, enable=frozenset({"dump"}))
    job.ranks[0].context_lost = True
    job.fault(2, "numeric", polluted=True)
    job.settle()
    saves = {save.to: save.shards for save in job.orders(Save)}
    assert (saves[0,], saves[1,]) == ((), ("dense",))
    assert job.orders(Spawn) == []
    assert job.over is not None
    assert job.over.result == "dumped"


def test_a_context_that_is_lost_when_all_is_done_is_nobodys_loss() -> None:
    """
    When a rank that has done all its steps finds its context lost as it is told that the job is complete,
    then the job is.
    """
    job = trained()
    job.ranks[2].context_lost = True
    job.script.failures[2, "complete"] = ["AcceleratorError: CUDA error: unknown error"]
    job.finish()
    assert job.over is not None
    assert job.over.result == "completed"
    assert job.orders(Kill) == []


def test_every_rank_whose_device_a_bug_has_stopped_is_ended() -> None:
    """
    When the same bug has taken the contexts of two devices, then that is one fault, and neither of the two
    is asked for a part of the last checkpoint.
    """
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
    """When a rank caused more incidents than allowed and the job cannot shrink, then the rank is
    not repaired again. The report gives the reason, and the job is dumped."""
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
    """When a rank fails too often and the job can shrink, then the rank leaves, also when its
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
    """When a rank has left after too many failures, then no process is started for it. After the
    failure window, the rank rejoins."""
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
    `scale_in`, and the first rank leaves."""
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
    """When a rank loses its node more often than allowed, then the rank is not moved again, and
    leaves the job."""
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
