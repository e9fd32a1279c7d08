"""
The last checkpoint of a job: which ranks write it, and which messages explain its failure.
"""

import pytest

from tests.core.lives import strategies, trained, tried
from tft.protocol.messages import Commit, End, EndNode, OrderName, Rebuild, Restore, Save
from tft.testing.scripted import ScriptedJob

CAN_ONLY_DUMP = frozenset({"dump"})


def test_who_cannot_write_holds_nothing_that_could_be_saved() -> None:
    """
    When the only rank that is left of a shard cannot write, then the others, who could, write
    nothing more: the shard is named as missing, and so is why.
    """
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


def test_a_shard_that_nobody_has_is_named_though_nobody_could_commit_either() -> None:
    """
    When the only rank that is left cannot write, then the shard that nobody else has is the reason,
    not that nobody is left.
    """
    job = trained(world=2, enable=CAN_ONLY_DUMP)
    job.script.failures[1, "save"] = ["OSError: no space left on device"]
    job.kill(0)
    job.settle()
    assert "shard 'dense'" in tried(job)["dump"]


def test_where_nobody_can_commit_that_is_the_reason() -> None:
    """
    When everyone who is left can write but not commit, then that is said, with the reason of each.
    """
    job = trained(world=3, enable=CAN_ONLY_DUMP)
    job.script.failures[1, "commit"] = job.script.failures[2, "commit"] = [
        "OSError: stale file handle"
    ] * 2
    job.kill(0)
    job.settle()
    assert tried(job)["dump"] == (
        "no rank is left to commit it; rank 1 could not write: OSError: stale file handle; rank "
        "2 could not write: OSError: stale file handle"
    )
    assert job.reports()[-1]["strategy"] == "exit"


def test_whoever_has_to_take_a_copy_back_is_named_in_order() -> None:
    """
    When several ranks save shards from copies that they keep, then they are told in order.
    """
    job = trained(groups={"a": (0, 2), "b": (1, 3)}, keeps=1, enable=CAN_ONLY_DUMP)
    job.fault(3, "numeric", polluted=True)
    job.kill(0)
    job.settle()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((1, 2), 2)]


def test_what_was_written_before_it_was_planned_anew_is_not_counted() -> None:
    """
    When a node is lost that had written its part already, then what is committed is what the others
    have written since.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=CAN_ONLY_DUMP)
    job.script.muted = {(2, "save")}
    job.stop(0)
    job.settle()
    job.script.muted = set()
    job.lose_node(0)
    job.settle()
    (commit,) = job.orders(Commit)
    assert [file.name for file in commit.files] == ["dense", "local-state-2", "local-state-3"]


def test_an_incident_that_is_cut_short_by_the_end_has_not_been_recovered_from() -> None:
    """
    When all processes are lost, and the end is asked for before one of the new ones is ready, then
    there is nothing to save, and the report does not claim what was only begun.
    """
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


def test_a_last_checkpoint_of_an_earlier_step_has_no_reservation_about_a_later_one() -> None:
    """
    When a copy could not be read at the end of a step, and then an earlier step is saved, then the report says nothing
    of that copy, and it says what the loops do in their tails.
    """
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


def test_a_rank_with_another_process_saves_what_is_its_own_itself() -> None:
    """
    When a rank has got another process, and then all is saved, then the rank saves its own RNG and data position, and
    no other rank saves what the lost process had captured.
    """
    job = trained()
    job.kill(3)
    while not job.orders(Rebuild):
        job.obey_next()
    job.stop(0)
    job.settle()
    saves = [(save.to, save.local_state) for save in job.orders(Save)]
    assert saves == [((rank,), {}) for rank in range(4)]


def test_a_process_that_joins_a_job_that_is_over_is_told_so_with_those_who_leave() -> None:
    """
    When a process calls `tft.init` after the end was decided, then it is told to leave like the others that have not
    left yet, in the order of the ranks.
    """
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


def test_a_last_checkpoint_is_called_as_the_job_was_told() -> None:
    """
    When checkpoints have a name of the user's own, then the last one has it, wherever they are.
    """
    job = ScriptedJob(2, checkpoint_name="gpt-{step}").start()
    job.train(3)
    job.stop()
    job.settle()
    assert {save.directory for save in job.orders(Save)} == {"/run/checkpoints/gpt-3"}
    assert {commit.directory for commit in job.orders(Commit)} == {"/run/checkpoints/gpt-3"}


def test_savers_are_spread_over_the_nodes_that_the_ranks_have_moved_to() -> None:
    """
    When another process has taken over from a straggler, on a node of its own, then what is left on
    the node that it had before saves there.
    """
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

    Rank 0 left the job with its model replica when rank 1 was lost, but its process is alive. The
    orders in `muted` are not answered by their ranks.
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
def test_what_one_outside_does_not_save_itself_the_others_save(goes: str) -> None:
    """
    When a rank that has left the job is lost while it writes its part of the last checkpoint, however
    that comes, then the others write it, and what the rank has captured, where that is known.
    """
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


def test_where_one_outside_does_not_commit_another_one_does() -> None:
    """
    When a rank that has left the job ends before it has committed the last checkpoint, then that is
    saved and committed by the others.
    """
    job = outside((0, "commit"))
    job.kill(0)
    job.settle()
    assert [commit.to for commit in job.orders(Commit)] == [(0,), (2,)]
    assert job.over is not None
    assert job.over.result == "dumped"


def test_once_all_is_saved_one_outside_that_does_not_commit_may_go() -> None:
    """
    When a rank that has left the job ends after all have saved, and another one commits, then that
    goes on: what is saved is not saved again.
    """
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


def test_nothing_is_saved_any_more_when_it_has_turned_out_that_nothing_can_be() -> None:
    """
    When all who hold a shard fail to write it, then the job ends, and nobody is told to save after that.
    """
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


def test_nothing_is_saved_any_more_when_one_outside_had_the_last_copy() -> None:
    """
    When no member can write a shard, and the rank outside the job that could ends, then the job ends, and nobody is told
    to save after that.
    """
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


def test_who_cannot_take_its_copy_back_still_saves_what_is_its_own() -> None:
    """
    When a rank that is to save a shard cannot take back the copy of it, then another one saves that,
    and the rank what is its own: nobody else has it.
    """
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


def test_where_nobody_can_take_a_copy_back_that_is_the_reason() -> None:
    """
    When every rank that keeps a copy fails to take it back, then nothing is saved, and the reason of
    each is said.
    """
    job = trained(world=2, keeps=1, enable=CAN_ONLY_DUMP)
    job.script.failures = {(rank, "restore"): [f"bit {rank} is another"] * 3 for rank in (0, 1)}
    job.fault(1, "numeric", polluted=True)
    job.settle()
    assert job.orders(Save) == []
    assert tried(job)["dump"] == (
        "no sound copy of shard 'dense', of step 2 or earlier, is left on ranks [0, 1]; "
        "rank 0 could not write: bit 0 is another; rank 1 could not write: bit 1 is another"
    )


def test_what_is_a_ranks_own_is_saved_of_another_step_than_it_was_asked_for() -> None:
    """
    When the only rank that has done the last step cannot write it, then the step before is saved,
    which another holds, and with it what the rank had captured of its own then.
    """
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
def test_whoever_has_a_sound_shard_writes_it_once_more(*, all_of_them: bool) -> None:
    """
    When all copies are to be saved, then each rank writes what it holds, once it has to and once it may;
    what a rank has whose memory failed is not written, and without that wish each shard is written once.
    """
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


def test_what_is_planned_anew_is_written_without_further_copies() -> None:
    """
    When a rank cannot write its part of a last checkpoint, which may be because the copies of others have
    taken the room, then it is written anew without any.
    """
    job = trained(save_copies=True, enable=CAN_ONLY_DUMP)
    job.script.failures[0, "save"] = ["OSError: no space left on device"]
    job.kill(3)
    job.settle()
    first, second = job.orders(Save)[:3], job.orders(Save)[3:]
    assert [save.copies for save in first] == [(), ("dense",), ("dense",)]
    assert {save.copies for save in second} == {()}
    assert job.over is not None
    assert job.over.result == "dumped"
