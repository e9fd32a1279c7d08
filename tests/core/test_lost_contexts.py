"""
Ranks whose device takes no more work from them: only another process can go on in their place.
"""

import pytest

from tests.core.lives import strategies, trained, tried
from tft.protocol.messages import FaultKind, Fetch, Kill, Save, Spawn
from tft.testing.scripted import ScriptedJob

ECC = "AcceleratorError: CUDA error: uncorrectable ECC error encountered"


def after(job: ScriptedJob) -> None:
    """
    All that follows, and a step more where it goes on.
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
