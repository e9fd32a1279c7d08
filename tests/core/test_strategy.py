"""
Recover and dump: where a lost process comes back, and what is saved when none can.
"""

import pytest

from tests.core.lives import names, strategies, trained, tried
from tft.protocol.messages import (
    Commit,
    End,
    EndNode,
    Fetch,
    Freeze,
    Kill,
    Load,
    Noticed,
    Regroup,
    Restore,
    Save,
    Spawn,
    Stop,
)
from tft.testing.scripted import ScriptedJob

TWO_NODES = {0: (0, 1), 1: (2, 3)}
WITH_ROOM = {0: (0, 1), 1: (2, 3), 2: ()}
CAN_ONLY_DUMP = frozenset({"dump"})


# ---------------------------------------------------------------- a requested dump


def test_a_dump_that_is_asked_for_ends_with_a_checkpoint_and_code_3() -> None:
    """
    When an operator asks for a last checkpoint, no signal having come, then everyone is frozen
    and stopped at the same step, the lowest-placed holder saves the state and each its own part,
    one commits, and the job ends as `dumped`.
    """
    job = trained()
    job.stop(0)
    job.settle()
    assert names(job.said) == [
        "Freeze", "Stop", "Compare", "Save", "Save", "Save", "Save", "Commit", "End", "EndNode", "EndNode",
    ]  # fmt: skip
    assert [f.cause for f in job.orders(Freeze)] == ["an operator asks for it"]
    assert [(s.finish, s.to) for s in job.orders(Stop)] == [(3, (0, 1, 2, 3))]
    assert [(s.to, s.shards, s.private) for s in job.orders(Save)] == [
        ((0,), ("dense",), {}), ((1,), (), {}), ((2,), (), {}), ((3,), (), {}),
    ]  # fmt: skip
    assert {(s.step, s.directory) for s in job.orders(Save)} == {
        (3, "/run/checkpoints/step-00000003")
    }
    (commit,) = job.orders(Commit)
    assert (commit.to, commit.step, commit.directory) == (
        (0,), 3, "/run/checkpoints/step-00000003",
    )  # fmt: skip
    assert [f.name for f in commit.files] == [
        "dense", "private-0", "private-1", "private-2", "private-3",
    ]  # fmt: skip
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert job.over.why == "an operator asks for it; a last checkpoint of step 3 is written"
    (end,) = job.orders(End)
    assert (end.to, end.code) == ((0, 1, 2, 3), 3)
    assert job.machine.last_step == 3
    (incident,) = job.reports()
    assert (incident["strategy"], incident["faults"], incident["step"]) == ("dump", [], 4)
    assert tried(job) == dict.fromkeys(("retry", "recover", "scale_in"), "an operator asks for it")


def test_a_dump_waits_for_those_in_their_update() -> None:
    """
    When the dump is asked for while one rank is in its update of step 4, then step 4 is what
    everyone finishes, and what is saved.
    """
    job = trained()
    job.window(2)
    job.stop(0)
    job.settle()
    assert [s.finish for s in job.orders(Stop)] == [4]
    assert {s.step for s in job.orders(Save)} == {4}


def test_a_dump_asked_for_in_an_incident_ends_it() -> None:
    """
    When the dump is asked for while a killed rank is replaced, then nobody waits for the new
    process: the survivors save, and write what the lost one had captured.
    """
    job = trained()
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    assert job.doing == "awaiting"
    job.stop(0)
    job.settle()
    assert {s.to: s.private for s in job.orders(Save)} == {(0,): {1: "00"}, (2,): {}, (3,): {}}
    job.wait()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)


def test_only_the_first_request_to_end_counts() -> None:
    """
    When a second request comes while the first is carried out, then the first says how it ends.
    """
    job = trained()
    job.stop(0)
    job.stop(15)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert len(job.orders(Freeze)) == 1


def test_a_dump_before_anything_was_trained_just_ends() -> None:
    """
    When the dump is asked for before any rank is ready, then there is nothing to save.
    """
    job = ScriptedJob(2)
    job.lead(1)
    job.stop(0)
    assert job.machine.outcome is not None
    assert (job.machine.outcome.result, job.machine.outcome.code) == ("failed", 4)
    assert job.orders(Save) == []


# ---------------------------------------------------------------- a dump from copies that are kept


def test_who_has_gone_on_too_far_takes_back_a_copy_before_it_saves() -> None:
    """
    When only the lost rank and its peers of one shard were a step further, then the step that
    every shard has, in use or kept, is saved, and whoever is beyond it takes its copy back first.
    """
    groups = {"a": (0, 1), "b": (2, 3)}
    job = trained(groups=groups, keeps=1, enable=CAN_ONLY_DUMP)
    for rank in (0, 1):
        job.window(rank)
        job.close(rank)
    job.script.stuck = {2, 3}
    job.kill(1)
    job.settle()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((0,), 3)]
    assert {s.to: s.shards for s in job.orders(Save)} == {(0,): ("a",), (2,): ("b",), (3,): ()}
    said = names(job.said)
    assert said.index("Restore") < said.index("Save") < said.index("Commit")
    assert {s.step for s in job.orders(Save)} == {3}
    (incident,) = job.reports()
    assert (incident["step"], incident["steps_lost"]) == (4, 1)


def test_polluted_numbers_are_not_saved() -> None:
    """
    When numbers went wrong and the last update may have spread them, then what is saved is the
    copy that was kept of the step before.
    """
    job = trained(keeps=1, enable=CAN_ONLY_DUMP)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((0,), 2)]
    assert {s.step for s in job.orders(Save)} == {2}
    assert job.over is not None
    assert job.over.result == "dumped"


def test_a_copy_that_cannot_be_taken_back_is_written_by_another() -> None:
    """
    When the saver cannot take its copy back, then another holder does, and saves.
    """
    job = trained(keeps=1, enable=CAN_ONLY_DUMP)
    job.script.failures[0, "restore"] = ["digest differs"]
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert [r.to for r in job.orders(Restore)] == [(0,), (1,)]
    assert [s.to for s in job.orders(Save) if s.shards] == [(1,)]
    (commit,) = job.orders(Commit)
    assert commit.round == 2
    assert job.over is not None
    assert job.over.result == "dumped"


# ---------------------------------------------------------------- what can go wrong with a dump


def test_a_saver_that_fails_leaves_its_part_to_another() -> None:
    """
    When the saver's disk is full, then another holder saves all of it, under a round of its own.
    """
    job = trained(enable=CAN_ONLY_DUMP)
    job.script.failures[1, "save"] = ["OSError: no space left on device"]
    job.kill(0)
    job.settle()
    rounds = {s.round: [(s.to, s.shards) for s in job.orders(Save)] for s in job.orders(Save)}
    assert sorted(rounds) == [1, 2]
    assert [s.to for s in job.orders(Save) if s.shards] == [(1,), (2,)]
    assert [s.to for s in job.orders(Save) if s.round == 2] == [(2,), (3,)]
    assert job.over is not None
    assert job.over.result == "dumped"


def test_a_checkpoint_that_nobody_can_write_is_not_claimed() -> None:
    """
    When every holder fails to save, then nothing is committed, the job has failed, and the
    operator reads why the writing failed.
    """
    job = trained(world=2, enable=CAN_ONLY_DUMP)
    job.script.failures[1, "save"] = ["OSError: no space left on device"]
    job.kill(0)
    job.settle()
    assert job.orders(Commit) == []
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert "no space left on device" in job.over.why
    (incident,) = job.reports()
    assert incident["strategy"] == "exit"


def test_a_commit_that_fails_is_done_by_another() -> None:
    """
    When the rank that commits cannot, then all save once more, it too, since what it has of its
    own is nobody else's, and another one commits.
    """
    job = trained(enable=CAN_ONLY_DUMP)
    job.script.failures[1, "commit"] = ["OSError: stale file handle"]
    job.kill(0)
    job.settle()
    assert [c.to for c in job.orders(Commit)] == [(1,), (2,)]
    assert [f.name for f in job.orders(Commit)[-1].files] == [
        "dense", "private-0", "private-1", "private-2", "private-3",
    ]  # fmt: skip
    assert job.over is not None
    assert job.over.result == "dumped"


def test_a_checkpoint_that_nobody_can_commit_is_not_claimed() -> None:
    """
    When nobody can commit, then the job has failed, and the operator reads why.
    """
    job = trained(world=2, enable=CAN_ONLY_DUMP)
    job.script.failures[1, "commit"] = ["OSError: stale file handle"]
    job.kill(0)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert "rank 1 could not write: OSError: stale file handle" in job.over.why


def test_a_saver_that_hangs_is_ended_and_its_part_written_by_another() -> None:
    """
    When the saver never answers, then after the limit it is ended, with its last words, and only
    when its end is known does another holder write its part.
    """
    job = trained(enable=CAN_ONLY_DUMP, save=90.0)
    job.script.muted = {(1, "save")}
    job.kill(0)
    job.settle()
    job.wait()
    assert [(k.rank, k.last_words) for k in job.orders(Kill)] == [(1, True)]
    assert len([s for s in job.orders(Save) if s.shards]) == 1
    job.settle()
    last = [s for s in job.orders(Save) if s.shards][-1]
    assert (last.to, last.private) == ((2,), {0: "00", 1: "00"})
    assert job.over is not None
    assert job.over.result == "dumped"


@pytest.mark.parametrize("order", [Save, Commit])
def test_a_second_death_during_a_dump_is_planned_for_anew(order: type[Save | Commit]) -> None:
    """
    When another rank dies while the survivors save or commit, then what is left of them saves
    everything, the parts of both lost ones included.
    """
    job = trained(enable=CAN_ONLY_DUMP)
    job.kill(0)
    while not job.orders(order):
        job._obey(job._queue.popleft())
    job.kill(1)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    (*_, last) = job.orders(Commit)
    assert (last.to, [f.name for f in last.files]) == (
        (2,), ["dense", "private-0", "private-1", "private-2", "private-3"],
    )  # fmt: skip


def test_a_dump_whose_last_holder_dies_ends_in_failure() -> None:
    """
    When the only rank with a shard dies while it saves, then no checkpoint is claimed, and the
    shard is named.
    """
    groups = {"a": (0, 1), "b": (2, 3)}
    job = trained(groups=groups, enable=CAN_ONLY_DUMP)
    job.kill(3)
    while not job.orders(Save):
        job._obey(job._queue.popleft())
    job.kill(2)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.over.why.startswith("no last checkpoint can be written: ")
    assert "shard 'b'" in job.over.why
    assert tried(job)["dump"] in job.over.why
    assert job.orders(Commit) == []


def test_a_node_lost_during_a_dump_costs_its_part_only() -> None:
    """
    When a whole node goes while the last checkpoint is written, then the others write it.
    """
    job = trained(placement=TWO_NODES, enable=CAN_ONLY_DUMP)
    job.script.muted = {(1, "save")}
    job.kill(0)
    job.settle()
    job.lose_node(0)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert [s.to for s in job.orders(Save) if s.shards] == [(1,), (2,)]


def test_a_pause_is_not_begun_in_a_job_that_ends() -> None:
    """
    When a pause is asked for while the last checkpoint is written, then nothing follows from it.
    """
    job = trained(enable=CAN_ONLY_DUMP)
    job.script.muted = {(1, "save")}
    job.kill(0)
    job.settle()
    before = len(job.said)
    job.pause()
    job.go_on()
    assert len(job.said) == before
    assert job.doing == "dumping"


def test_savers_are_spread_over_the_nodes_where_that_is_wanted() -> None:
    """
    When the checkpoint is to be spread, then each node writes one of two shards.
    """
    groups = {"a": (0, 2), "b": (1, 3)}
    job = trained(groups=groups, placement=TWO_NODES, enable=CAN_ONLY_DUMP, spread_savers=True)
    job.stop(0)
    job.settle()
    assert {s.to: s.shards for s in job.orders(Save) if s.shards} == {(0,): ("a",), (3,): ("b",)}


def test_the_end_is_told_to_nodes_at_once_and_again_when_everyone_has_left() -> None:
    """
    When the outcome is decided, then the agents are told how long the ranks have; when the last
    rank is gone, they are told that it is over.
    """
    job = trained()
    job.stop(0)
    job.settle()
    assert [e.grace for e in job.orders(EndNode)] == [5.0, 5.0]
    assert job.doing == "ended"
    assert job.machine.next_deadline() is None


def test_ranks_that_do_not_leave_are_not_waited_for() -> None:
    """
    When the ranks do not answer that they leave, then the job is over all the same after three
    times what they get.
    """
    job = trained()
    job.script.muted = {(r, "end") for r in range(4)}
    job.stop(0)
    job.settle()
    assert job.doing == "exiting"
    began = job.now
    for _ in range(5):
        if job.over is None:
            job.wait()
    assert job.over is not None
    assert job.now <= began + 15.0


# ---------------------------------------------------------------- recover: where


def test_a_lost_node_comes_back_where_there_is_room() -> None:
    """
    When a node is lost and another has room, then its ranks are started there at once, copy the
    others' state, and everyone goes on at the step that was interrupted.
    """
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.lose_node(1)
    assert [(s.node, s.rank, s.incarnation) for s in job.orders(Spawn)] == [(2, 2, 1), (2, 3, 1)]
    assert {s.cause for s in job.orders(Spawn)} == {
        "rank 2 has lost its process", "rank 3 has lost its process",
    }  # fmt: skip
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("recover", 4, 0)
    assert (incident["processes_started"], incident["pids_kept"]) == (2, True)
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("node", 2), ("node", 3)]
    assert tried(job) == {"retry": "ranks [2, 3] have lost their process"}
    assert {f.to for f in job.orders(Fetch)} == {(2,), (3,)}


def test_a_process_that_dies_comes_back_on_its_own_node() -> None:
    """
    When only a process is lost, then it is started on its own node, room elsewhere or not.
    """
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.kill(3)
    job.settle()
    assert [(s.node, s.rank) for s in job.orders(Spawn)] == [(1, 3)]


def test_room_is_given_to_so_many_ranks_only() -> None:
    """
    When a lost node had two ranks and the other has room for one, then the job cannot recover;
    the place that is gone is named.
    """
    job = trained(placement=WITH_ROOM, spare={2: 1}, enable=frozenset({"recover", "dump"}))
    job.lose_node(1)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert [s.rank for s in job.orders(Spawn)] == [2]
    assert tried(job)["recover"] == "node 1 is gone, and its ranks have no other place"


def test_ranks_that_moved_come_back_on_their_new_node() -> None:
    """
    When a rank that was moved to another node dies there, then it is started there.
    """
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.lose_node(1)
    job.settle()
    job.train()
    job.kill(3)
    job.settle()
    job.train()
    assert [(s.node, s.rank) for s in job.orders(Spawn)] == [(2, 2), (2, 3), (2, 3)]
    assert strategies(job) == ["recover", "recover"]


def test_a_node_that_comes_again_can_be_given_ranks_again() -> None:
    """
    When an agent is started again after its node was lost, then it has room for what it says.
    """
    job = trained(placement=WITH_ROOM, spare={1: 2, 2: 2})
    job.lose_node(1)
    job.settle()
    job.train()
    job.come(1)
    job.lose_node(2)
    job.settle()
    job.train()
    assert [(s.node, s.rank) for s in job.orders(Spawn)] == [(2, 2), (2, 3), (1, 2), (1, 3)]
    assert strategies(job) == ["recover", "recover"]


def test_a_rank_placed_first_is_like_any_other() -> None:
    """
    When the node of rank 0 is lost, then rank 0 comes back elsewhere.
    """
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.lose_node(0)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert job.ranks[0].node == 2


# ---------------------------------------------------------------- recover: how much


def test_all_of_a_node_is_replaced_where_that_is_the_policy() -> None:
    """
    When one process dies and nodes are replaced as a whole, then the node's other processes are
    ended and come back with it; nobody else is touched, and they are not held guilty.
    """
    job = trained(placement=TWO_NODES, replace="node")
    job.kill(2)
    job.settle()
    job.train()
    assert [(k.rank, k.last_words) for k in job.orders(Kill)] == [(3, False)]
    assert [k.cause for k in job.orders(Kill)] == ["its node is replaced with rank 2"]
    assert sorted((s.rank, s.node) for s in job.orders(Spawn)) == [(2, 1), (3, 1)]
    (incident,) = job.reports()
    assert (incident["strategy"], incident["processes_started"]) == ("recover", 2)
    assert list(job.machine._job.history.troubles) == [2]


def test_nobody_is_replaced_with_its_node_where_nobody_is_replaced() -> None:
    """
    When nodes are replaced as a whole, but ranks get no other processes, then the others on the node of a lost rank go
    on.
    """
    job = trained(
        placement=TWO_NODES, replace="node", enable=frozenset({"retry", "scale_in", "dump"})
    )
    job.kill(2)
    job.settle()
    job.train()
    assert job.orders(Kill) == []
    assert strategies(job) == ["scale_in"]
    assert job.machine.members == {0, 1, 3}


def test_nobody_is_replaced_with_its_node_in_a_job_that_ends() -> None:
    """
    When nodes are replaced as a whole, and a process dies after the end was asked for, then the
    others of its node are left alone: they have their part of the last checkpoint to write.
    """
    job = trained(placement=TWO_NODES, replace="node")
    job.stop(0)
    job.kill(2)
    job.settle()
    assert job.orders(Kill) == []
    assert job.over is not None
    assert job.over.result == "dumped"


def test_who_was_lost_and_is_replaced_with_its_node_is_one_fault() -> None:
    """
    When a rank was lost, and the next time another one of its node, with which it is replaced,
    then its loss is told once.
    """
    job = trained(placement=TWO_NODES, replace="node")
    job.kill(2)
    while not job.orders(Regroup):
        job._obey(job._queue.popleft())
    job.kill(3)
    job.settle()
    job.train()
    (incident,) = job.reports()
    (fault,) = (f for f in incident["faults"] if f["rank"] == 2)
    assert fault["evidence"] == "was ended by signal 9\nits node is replaced with rank 3"


def test_where_a_lost_node_moves_to_nobody_is_replaced() -> None:
    """
    When nodes are replaced as a whole and one is lost, then its ranks move to a node with room,
    and the processes that live there are left alone: they have the state.
    """
    job = trained(placement=TWO_NODES, spare={0: 2}, replace="node")
    job.lose_node(1)
    job.settle()
    job.train()
    assert [k.rank for k in job.orders(Kill) if k.node == 0] == []
    assert strategies(job) == ["recover"]
    assert {f.to for f in job.orders(Fetch)} == {(2,), (3,)}


def test_a_rank_is_started_again_three_times_in_one_incident() -> None:
    """
    When the replacement of a rank dies again and again, then after the third the job ends with
    what the others hold, and the sentence says how often.
    """
    job = trained(enable=frozenset({"recover", "dump"}))
    for _ in range(4):
        job.kill(1)
        job.settle()
    assert [s.incarnation for s in job.orders(Spawn)] == [1, 2, 3]
    assert job.over is not None
    assert job.over.result == "dumped"
    assert tried(job)["recover"] == "rank 1 has died 4 times in this incident"


def test_a_new_incident_counts_its_own_deaths() -> None:
    """
    When a rank dies twice with success in between, then the second incident begins at none.
    """
    job = trained(respawns=1)
    for _ in range(2):
        job.kill(1)
        job.settle()
        job.train()
    assert strategies(job) == ["recover", "recover"]


def test_a_replacement_that_never_gets_ready_is_ended_and_tried_again() -> None:
    """
    When a new process does not come as far as its session, then after the limit it is ended, and
    another is started.
    """
    job = trained(join=40.0)
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    job.wait()
    assert [(k.rank, k.incarnation, k.cause) for k in job.orders(Kill)] == [
        (1, 1, "not ready 40 s after its start")
    ]
    job.script.slow = set()
    job.settle()
    job.train()
    assert [s.incarnation for s in job.orders(Spawn)] == [1, 2]
    assert strategies(job) == ["recover"]


def test_what_an_adaptor_cannot_do_is_not_done() -> None:
    """
    When the adaptor takes part in nothing but `dump`, then that is what a death ends in, and no process is started
    in the place of the one that is lost.
    """
    job = trained(strategies=("dump",))
    job.kill(1)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert job.orders(Spawn) == []
    assert tried(job) == dict.fromkeys(
        ("retry", "recover", "scale_in"), "the adaptor of ranks [0, 2, 3] cannot take part"
    )


@pytest.mark.parametrize(
    ("strategies", "spawned"),
    [
        (("retry", "dump"), []),
        (("retry", "recover", "dump"), [1]),
        (("scale_in", "scale_out", "dump"), [1]),
    ],
)
def test_a_process_is_started_at_once_where_a_strategy_waits_for_it(
    strategies: tuple[str, ...], spawned: list[int]
) -> None:
    """
    When a rank is lost, then another process is started for it where the others can take part in a strategy that
    gives it one: in place of it, or when all are to take part again.
    """
    job = trained(strategies=strategies)
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    assert [order.rank for order in job.orders(Spawn)] == spawned


def test_a_lost_process_whose_state_nobody_has_comes_back_from_a_checkpoint() -> None:
    """
    When the only holder of a shard dies, then everyone, not only it, loads the newest checkpoint,
    and the steps since then count as lost.
    """
    groups = {"a": (0, 1), "b": (2,), "c": (3,)}
    job = trained(groups=groups)
    job.checkpointed(1)
    job.checkpointed(2)
    job.kill(3)
    job.settle()
    job.train()
    (load,) = job.orders(Load)
    assert (load.to, load.directory, load.step) == ((0, 1, 2, 3), "/periodic/2", 2)
    assert job.orders(Fetch) == []
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("recover", 3, 1)


def test_a_checkpoint_that_cannot_be_loaded_is_tried_and_given_up() -> None:
    """
    When loading fails again and again, then the job ends with the reason instead of for ever.
    """
    groups = {"a": (0, 1), "b": (2,), "c": (3,)}
    job = trained(groups=groups)
    job.checkpointed(2)
    job.kill(3)
    job.script.failures[3, "load"] = ["the manifest is damaged"] * 20
    job.settle()
    for _ in range(3):  # retry is no choice, recover and scale_in are tried three times each
        if job.over is None:
            job.wait()
            job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.facts("order_failed")[0]["why"] == "the manifest is damaged"
    assert len(job.orders(Load)) == 2  # it is not offered again


def test_without_a_checkpoint_the_shard_that_nobody_has_is_named() -> None:
    """
    When the only holder dies and there is no checkpoint, then nothing can go on, and nothing can
    be saved: the shard is in every sentence.
    """
    groups = {"a": (0, 1), "b": (2,), "c": (3,)}
    job = trained(groups=groups)
    job.kill(3)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    nobody = "no sound copy of shard 'c' is left on ranks [3]"
    assert (tried(job)["recover"], tried(job)["dump"]) == (nobody, nobody)


def test_groups_are_formed_at_a_store_of_a_node_that_is_there() -> None:
    """
    When groups are formed after a loss, then all members meet under a new name, nobody without.
    """
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.lose_node(1)
    job.settle()
    (regroup,) = job.orders(Regroup)
    assert (regroup.to, regroup.without, regroup.step) == ((0, 1, 2, 3), (), 4)
    assert regroup.name == "job/1.1"
    assert regroup.incarnations == {2: 1, 3: 1}


# ---------------------------------------------------------------- noticed from outside


@pytest.mark.parametrize("kind", ["process", "hang"])
def test_a_process_that_is_noticed_to_be_lost_is_ended_and_replaced(kind: str) -> None:
    """
    When somebody outside says that a rank has lost its process, or hangs, then it is ended,
    replaced, and the report has that one fault, in their words.
    """
    job = trained()
    job.notice(2, "process" if kind == "process" else "hang", "its container is gone")
    job.settle()
    job.train()
    assert [(k.rank, k.last_words, k.cause) for k in job.orders(Kill)] == [
        (2, kind == "hang", "its container is gone")
    ]
    (incident,) = job.reports()
    (fault,) = incident["faults"]
    assert (fault["kind"], fault["rank"], fault["step"]) == (kind, 2, 4)
    assert fault["evidence"].startswith("its container is gone")
    assert incident["strategy"] == "recover"


def test_a_network_fault_that_is_noticed_forms_the_groups_anew() -> None:
    """
    When somebody outside sees a link break, then the groups are formed anew with all processes.
    """
    job = trained()
    job.notice(2, "network", "port 7 is down")
    job.settle()
    job.train()
    assert job.orders(Kill) == []
    assert strategies(job) == ["retry"]
    assert job.orders(Fetch) == []


def test_a_software_fault_that_is_noticed_ends_the_job() -> None:
    """
    When somebody outside says that the program is wrong, then the job is dumped.
    """
    job = trained()
    job.notice(2, "software", "the data set is empty")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert "the data set is empty" in job.over.why


def test_what_is_noticed_of_strangers_is_absorbed() -> None:
    """
    When the rank does not exist, or its process is on the way already, then nothing follows.
    """
    job = trained()
    job.report(_noticed_of(9))
    assert job.said == []
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    before = len(job.said)
    job.notice(1, "process")
    assert len(job.said) == before


def test_a_node_that_is_taken_away_while_its_ranks_start_is_not_trained_on() -> None:
    """
    When a node is given up while a process starts there, then that is no reason to wait for it.
    """
    job = trained(placement=TWO_NODES)
    job.script.slow = {3}
    job.kill(3)
    job.settle()
    job.notice(3, "node", "its power goes")
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in"]
    assert job.machine.members == frozenset({0, 1})


def _noticed_of(rank: int) -> Noticed:
    return Noticed(rank=rank, kind="process", evidence="seen", at=0.0)
