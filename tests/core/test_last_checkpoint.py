"""
The last checkpoint of a job: which ranks write it, and which messages explain its failure.
"""

import pytest

from tests.core.lives import strategies, trained, tried
from tft.protocol.messages import Commit, End, EndNode, OrderName, Rebuild, Restore, Save
from tft.testing.scripted import ScriptedJob

CAN_ONLY_DUMP = frozenset({"dump"})


def test_job_fails_when_the_last_holder_of_a_shard_cannot_write() -> None:
    """When the only remaining holder of a shard cannot write it, then no other rank is asked to
    write it. The reason names the missing shard and the error of the rank."""
    job = trained(groups={"a": (0, 1), "b": (2, 3)}, enable=CAN_ONLY_DUMP)
    job.script.failures[2, "save"] = ["OSError: no space left on device"]
    job.kill(3)
    job.settle()
    assert job.orders(Commit) == []
    assert len([save for save in job.orders(Save) if "b" in save.shards]) == 1
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.over.why == f"no last checkpoint can be written: {tried(job)['dump']}"
    assert "shard 'b'" in job.over.why
    assert job.over.why.endswith("; rank 2 could not write: OSError: no space left on device")


def test_missing_shard_is_the_reason_before_a_missing_committer() -> None:
    """When the only remaining rank cannot write, then the reason is the missing shard, which no
    other rank has. The reason is not that no rank is left to commit."""
    job = trained(world=2, enable=CAN_ONLY_DUMP)
    job.script.failures[1, "save"] = ["OSError: no space left on device"]
    job.kill(0)
    job.settle()
    assert "shard 'dense'" in tried(job)["dump"]


def test_job_fails_when_no_rank_can_commit() -> None:
    """When all remaining ranks can write but none can commit, then the reason says so, with the
    cause for each rank."""
    job = trained(world=3, enable=CAN_ONLY_DUMP)
    job.script.failures[1, "commit"] = job.script.failures[2, "commit"] = [
        "OSError: stale file handle"
    ] * 2
    job.kill(0)
    job.settle()
    assert tried(job)["dump"] == (
        "no rank is left to commit the checkpoint; rank 1 could not write: OSError: stale file "
        "handle; rank 2 could not write: OSError: stale file handle"
    )
    assert job.reports()[-1]["strategy"] == "exit"


def test_ranks_that_restore_copies_to_save_are_listed_in_order() -> None:
    """When several ranks save shards from kept copies, then they are ordered to restore in the
    order of their ranks."""
    job = trained(groups={"a": (0, 2), "b": (1, 3)}, keeps=1, enable=CAN_ONLY_DUMP)
    job.fault(3, "numeric", polluted=True)
    job.kill(0)
    job.settle()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((1, 2), 2)]


def test_commit_lists_only_files_of_the_new_plan() -> None:
    """When a node is lost after its ranks have written their parts, then the commit lists only the
    files that the other ranks have written since then."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=CAN_ONLY_DUMP)
    job.script.muted = {(2, "save")}
    job.stop(0)
    job.settle()
    job.script.muted = set()
    job.lose_node(0)
    job.settle()
    (commit,) = job.orders(Commit)
    assert [file.name for file in commit.files] == ["dense", "local-state-2", "local-state-3"]


def test_unfinished_recovery_is_reported_as_exit() -> None:
    """When all processes are lost and a stop request comes before a new process is ready, then
    nothing is saved. The report has the strategy `exit` and not `recover`."""
    job = trained(2)
    job.checkpointed(2)
    job.script.slow = {0, 1}
    job.kill(0)
    job.kill(1)
    job.settle()
    assert job.machine.incident.decision.strategy == "recover"
    job.stop(15)
    job.settle()
    assert job.machine.outcome is not None
    assert (job.machine.outcome.result, job.machine.outcome.code) == ("cancelled", 143)
    (incident,) = job.reports()
    assert (incident["strategy"], incident["pids_kept"]) == ("exit", None)


def test_newest_checkpoint_of_an_ended_job_is_its_last_one() -> None:
    """When the job has ended with a last checkpoint, then this is the newest one, also if a signal
    has asked for the end. When it has ended without, then the newest is the periodic one."""
    saved = trained(4)
    saved.checkpointed(2)
    saved.stop(15)
    saved.settle()
    assert saved.over is not None
    assert saved.over.result == "cancelled"
    assert saved.machine.checkpointed == saved.machine.last_step > 2
    lost = trained(2)
    lost.checkpointed(2)
    lost.script.slow = {0, 1}
    lost.kill(0)
    lost.kill(1)
    lost.stop(15)
    lost.settle()
    assert lost.machine.checkpointed == 2


def test_last_checkpoint_has_no_reservation_about_a_later_step() -> None:
    """When a copy was unreadable at the end of a step and an earlier step is saved, then the report
    does not mention this copy. It still lists the loops that draw random numbers in their tails."""
    job = trained(keeps=2)
    job.ranks[2].state.content = ""
    job.kill(1)
    job.settle()
    assert "could not be read" in job.machine.incident.exactness.sentences[0]
    job.ranks[2].state.content = "right"
    for one in job.ranks.values():
        one.loop.inexact = ("the loop draws",)
    job.fault(3, "numeric", polluted=True)
    job.stop(0)
    job.settle()
    assert {save.step for save in job.orders(Save)} == {2}
    assert job.reports()[-1]["inexact"] == ["ranks [0, 1, 2, 3]: the loop draws"]


def test_replaced_rank_saves_its_own_rank_local_state() -> None:
    """When a rank has a new process and a last checkpoint is written, then the rank saves its own
    RNG and data position. No other rank saves those that were captured from the lost process."""
    job = trained()
    job.kill(3)
    while not job.orders(Rebuild):
        job.obey_next()
    job.stop(0)
    job.settle()
    saves = [(save.to, save.local_state) for save in job.orders(Save)]
    assert saves == [((rank,), {}) for rank in range(4)]


def test_process_that_joins_an_ending_job_is_ordered_to_end() -> None:
    """When a process calls `tft.init` after the end was decided, then it gets the order to end like
    the other remaining ranks, in the order of the ranks."""
    job = trained(world=9)
    job.script.slow = {8}
    job.kill(8)
    job.settle()
    job.stop(0)
    job.script.muted = {(1, "end")}
    job.settle()
    assert job.doing == "exiting"
    job.join(job.ranks[8])
    assert job.orders(End)[-1].to == (1, 8)


def test_last_checkpoint_has_the_configured_name() -> None:
    """When the user has configured a name for checkpoints, then the last checkpoint is saved and
    committed under this name."""
    job = ScriptedJob(2, checkpoint_name="gpt-{step}").start()
    job.train(3)
    job.stop()
    job.settle()
    assert {save.directory for save in job.orders(Save)} == {"/run/checkpoints/gpt-3"}
    assert {commit.directory for commit in job.orders(Commit)} == {"/run/checkpoints/gpt-3"}


def test_savers_are_spread_over_the_new_nodes_after_a_migration() -> None:
    """When a successor on another node has taken over the rank of a straggler, then the other rank
    of the old node saves a shard there."""
    job = trained(
        placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 1}, spread_savers=True,
        groups={"a": (0, 3), "b": (1, 2)},
    )  # fmt: skip
    job.notice(0, "straggler", "three times as slow as the others")
    job.settle()
    job.train()
    assert strategies(job) == ["migrate"]
    job.stop(0)
    job.settle()
    assert {save.to: save.shards for save in job.orders(Save) if save.shards} == {
        (0,): ("a",), (1,): ("b",),
    }  # fmt: skip


def outside(*muted: tuple[int, OrderName]) -> ScriptedJob:
    """
    Return a job that is writing its last checkpoint, in which rank 0 takes part.

    Rank 0 left the job with its model replica when rank 1 was lost, but its process is alive.
    `muted` names orders that the given ranks do not answer.
    """
    job = trained(
        placement={0: (0,), 1: (1,), 2: (2, 3)}, columns={0: (0, 1), 1: (0, 1)},
        enable=frozenset({"scale_in", "dump"}),
    )  # fmt: skip
    job.lose_node(1)
    job.settle()
    assert job.machine.members == {2, 3}
    job.script.muted = set(muted)
    job.stop(0)
    job.settle()
    assert job.doing == "dumping"
    return job


@pytest.mark.parametrize("goes", ["it is late", "it ends", "its node is lost"])
def test_members_save_for_a_lost_rank_outside_the_job(goes: str) -> None:
    """When a rank outside the job is lost while it saves, then a member writes the shard of that
    rank. The member also writes the captured rank-local state of the rank if it is known."""
    job = outside((0, "save"))
    match goes:
        case "it is late":
            job.wait()
        case "it ends":
            job.kill(0)
        case _:
            job.lose_node(0)
    job.settle()
    local_state = {} if goes == "its node is lost" else {0: "00"}
    assert [(save.to, save.shards, save.local_state) for save in job.orders(Save)][-2:] == [
        ((2,), ("dense",), local_state),
        ((3,), (), {}),
    ]
    assert len(job.orders(Commit)) == 1
    assert job.over is not None
    assert job.over.result == "dumped"


def test_member_commits_when_a_rank_outside_is_lost() -> None:
    """When a rank outside the job ends before it has committed the last checkpoint, then a member
    commits it, and the result of the job is `dumped`."""
    job = outside((0, "commit"))
    job.kill(0)
    job.settle()
    assert [commit.to for commit in job.orders(Commit)] == [(0,), (2,)]
    assert job.over is not None
    assert job.over.result == "dumped"


def test_saved_files_are_kept_when_a_rank_outside_ends_later() -> None:
    """When a rank outside the job ends after all files are saved and another rank commits, then the
    commit continues and nothing is saved again."""
    job = trained(
        placement={0: (0, 1), 1: (2,), 2: (3,)}, columns={2: (2, 3), 3: (2, 3)},
        enable=frozenset({"scale_in", "dump"}),
    )  # fmt: skip
    job.lose_node(2)
    job.settle()
    job.script.muted = {(0, "commit")}
    job.stop(0)
    job.settle()
    saves = len(job.orders(Save))
    job.kill(2)
    job.script.muted = set()
    job.repeat()
    job.settle()
    assert len(job.orders(Save)) == saves
    assert job.over is not None
    assert job.over.result == "dumped"


def test_no_save_order_follows_when_a_shard_cannot_be_saved() -> None:
    """When all holders of a shard fail to write it, then the job ends, and no rank gets an order to
    save after that."""
    job = trained(groups={"a": (0, 1), "b": (2, 3)}, enable=frozenset({"dump"}))
    job.script.failures = {(rank, "save"): ["the disk is full"] * 4 for rank in (2, 3)}
    job.script.muted = {(0, "save"), (0, "end")}
    job.kill(1)
    job.settle()
    assert job.doing == "exiting"
    assert {type(order) for order in job.machine.outstanding()} == {End, EndNode}
    kinds = [type(said) for said in job.said if isinstance(said, Save | End)]
    assert kinds == sorted(kinds, key=[Save, End].index)
    assert job.orders(Save)


def test_no_save_order_follows_when_the_last_holder_outside_ends() -> None:
    """When no member can write a shard, and the last holder of it, a rank outside the job, ends,
    then the job ends. No order to save follows the first order to end."""
    job = trained(
        placement={0: (0,), 1: (1,), 2: (2, 3)}, columns={0: (0, 1), 1: (0, 1)},
        enable=frozenset({"scale_in", "dump"}),
    )  # fmt: skip
    job.lose_node(1)
    job.settle()
    job.script.failures = {(rank, "save"): ["the disk is full"] * 4 for rank in (2, 3)}
    job.script.muted = {(0, "save"), (2, "end")}
    job.stop(0)
    job.settle()
    assert job.doing == "dumping"
    job.kill(0)
    job.settle()
    assert job.doing == "exiting"
    kinds = [type(said) for said in job.said if isinstance(said, Save | End)]
    assert kinds == sorted(kinds, key=[Save, End].index)


def test_rank_that_cannot_restore_its_copy_saves_its_rank_local_state() -> None:
    """When a rank cannot restore the copy that it should save, then another rank saves the shard.
    The first rank saves its rank-local state, which no other rank has."""
    job = trained(world=3, keeps=1, enable=CAN_ONLY_DUMP)
    job.script.failures[0, "restore"] = ["its digest is another"]
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert [restore.to for restore in job.orders(Restore)] == [(0,), (1,)]
    assert {save.to: save.shards for save in job.orders(Save)} == {
        (0,): (), (1,): ("dense",), (2,): (),
    }  # fmt: skip
    (commit,) = job.orders(Commit)
    assert [file.name for file in commit.files] == [
        "dense",
        "local-state-0",
        "local-state-1",
        "local-state-2",
    ]
    assert job.over is not None
    assert job.over.result == "dumped"


def test_job_fails_when_no_rank_can_restore_its_copy() -> None:
    """When every rank that keeps a copy fails to restore it, then nothing is saved, and the reason
    names the failure of each rank."""
    job = trained(world=2, keeps=1, enable=CAN_ONLY_DUMP)
    job.script.failures = {(rank, "restore"): [f"bit {rank} is another"] * 3 for rank in (0, 1)}
    job.fault(1, "numeric", polluted=True)
    job.settle()
    assert job.orders(Save) == []
    assert tried(job)["dump"] == (
        "no sound copy of shard 'dense', of step 2 or earlier, is left on ranks [0, 1]; "
        "rank 0 could not write: bit 0 is another; rank 1 could not write: bit 1 is another"
    )


def test_rank_local_state_of_the_step_before_is_saved() -> None:
    """When the only rank that holds the last step cannot write it, then another rank saves the step
    before. The RNG and data position of the first rank, captured at that step, are saved too."""
    job = trained(world=2, enable=CAN_ONLY_DUMP)
    job.script.failures[0, "save"] = ["OSError: no space left on device"]
    job.script.stuck = {1}
    job.window(0)
    job.stop(0)
    job.settle()
    assert [(save.step, save.to, save.shards, save.local_state) for save in job.orders(Save)] == [
        (4, (0,), ("dense",), {}), (4, (1,), (), {}), (3, (1,), ("dense",), {0: "00"}),
    ]  # fmt: skip
    (commit,) = job.orders(Commit)
    assert [file.name for file in commit.files] == ["dense", "local-state-0", "local-state-1"]
    assert job.over is not None
    assert job.over.result == "dumped"


@pytest.mark.parametrize("all_of_them", [False, True])
def test_all_sound_copies_are_saved_when_enabled(*, all_of_them: bool) -> None:
    """When all copies are to be saved, then each rank with sound memory also writes copies of
    shards that other ranks write. Without this setting each shard is written once."""
    job = trained(
        groups={"a": (0, 1, 2), "b": (2, 3), "c": (3,)},
        save_copies=all_of_them,
        enable=CAN_ONLY_DUMP,
    )
    job.fault(1, "memory")
    job.settle()
    told = {save.to[0]: (save.shards, save.copies) for save in job.orders(Save)}
    once = {0: (("a",), ()), 1: ((), ()), 2: (("b",), ()), 3: (("c",), ())}
    more = {2: (("b",), ("a",)), 3: (("c",), ("b",))}
    assert told == (once | more if all_of_them else once)
    assert job.over is not None
    assert job.over.result == "dumped"


def test_second_plan_of_a_last_checkpoint_has_no_further_copies() -> None:
    """When a rank cannot write its part of a last checkpoint, then the checkpoint is planned again.
    The new plan has each shard only once, because further copies may have filled the disk."""
    job = trained(save_copies=True, enable=CAN_ONLY_DUMP)
    job.script.failures[0, "save"] = ["OSError: no space left on device"]
    job.kill(3)
    job.settle()
    first, second = job.orders(Save)[:3], job.orders(Save)[3:]
    assert [save.copies for save in first] == [(), ("dense",), ("dense",)]
    assert {save.copies for save in second} == {()}
    assert job.over is not None
    assert job.over.result == "dumped"
