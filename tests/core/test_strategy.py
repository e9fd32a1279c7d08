"""
The strategies `recover` and `dump`: where a lost process is replaced, and which checkpoint is saved
if it cannot be replaced.
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


# ---------------------------------------------------------------- a requested last checkpoint


def test_requested_dump_ends_with_a_last_checkpoint_and_code_3() -> None:
    """When an operator requests a last checkpoint, then all ranks stop at one step and the lowest
    holder saves the shard. Each rank saves its rank-local state, one rank commits, and the result
    is `dumped`."""
    job = trained()
    job.stop(0)
    job.settle()
    assert names(job.said) == [
        "Freeze", "Stop", "Compare", "Save", "Save", "Save", "Save", "Commit", "End", "EndNode", "EndNode",
    ]  # fmt: skip
    assert [f.cause for f in job.orders(Freeze)] == ["an operator asks for it"]
    assert [(s.finish, s.to) for s in job.orders(Stop)] == [(3, (0, 1, 2, 3))]
    assert [(s.to, s.shards, s.local_state) for s in job.orders(Save)] == [
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
        "dense", "local-state-0", "local-state-1", "local-state-2", "local-state-3",
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


def test_dump_waits_for_a_rank_that_is_in_its_update() -> None:
    """When a last checkpoint is requested while one rank is in its update of step 4, then all ranks
    finish step 4, and step 4 is saved."""
    job = trained()
    job.window(2)
    job.stop(0)
    job.settle()
    assert [s.finish for s in job.orders(Stop)] == [4]
    assert {s.step for s in job.orders(Save)} == {4}


def test_dump_requested_in_an_incident_does_not_wait_for_the_successor() -> None:
    """When a last checkpoint is requested while a killed rank is replaced, then the survivors save
    without the new process. They also write the captured rank-local state of the lost rank."""
    job = trained()
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    assert job.doing == "awaiting"
    job.stop(0)
    job.settle()
    assert {s.to: s.local_state for s in job.orders(Save)} == {(0,): {1: "00"}, (2,): {}, (3,): {}}
    job.wait()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)


def test_first_request_to_end_decides_the_result() -> None:
    """When a second request to end arrives while the first one is carried out, then the first
    request decides how the job ends."""
    job = trained()
    job.stop(0)
    job.stop(15)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert len(job.orders(Freeze)) == 1


def test_dump_before_any_rank_is_ready_saves_nothing() -> None:
    """When a last checkpoint is requested before any rank is ready, then nothing is saved and the
    job ends as `failed` with code 4."""
    job = ScriptedJob(2)
    job.lead(1)
    job.stop(0)
    assert job.machine.outcome is not None
    assert (job.machine.outcome.result, job.machine.outcome.code) == ("failed", 4)
    assert job.orders(Save) == []


# ---------------------------------------------------------------- a last checkpoint from kept copies


def test_rank_past_the_saved_step_restores_its_copy_before_it_saves() -> None:
    """When only the holders of one shard have completed a further step, then the step that all
    shards have is saved. A rank that is past this step restores its kept copy first."""
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


def test_last_checkpoint_uses_a_kept_copy_when_the_last_update_is_polluted() -> None:
    """When numbers went wrong and the last update may have spread them to all ranks, then the kept
    copy of the step before is saved."""
    job = trained(keeps=1, enable=CAN_ONLY_DUMP)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((0,), 2)]
    assert {s.step for s in job.orders(Save)} == {2}
    assert job.over is not None
    assert job.over.result == "dumped"


def test_other_holder_saves_when_the_saver_cannot_restore_its_copy() -> None:
    """When the saver cannot restore its copy, then another holder restores its copy and saves it."""
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


# ---------------------------------------------------------------- faults during a last checkpoint


def test_other_holder_saves_when_the_saver_fails() -> None:
    """When the disk of the saver is full, then another holder saves the state in a new round."""
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


def test_job_fails_when_no_holder_can_write_the_last_checkpoint() -> None:
    """When every holder fails to save, then nothing is committed and the job fails. The reason says
    why the writing failed."""
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


def test_other_rank_commits_after_all_ranks_save_again_when_a_commit_fails() -> None:
    """When the rank that commits fails, then all ranks save once more and another rank commits. The
    failed rank saves too, because no other rank has its rank-local state."""
    job = trained(enable=CAN_ONLY_DUMP)
    job.script.failures[1, "commit"] = ["OSError: stale file handle"]
    job.kill(0)
    job.settle()
    assert [c.to for c in job.orders(Commit)] == [(1,), (2,)]
    assert [f.name for f in job.orders(Commit)[-1].files] == [
        "dense", "local-state-0", "local-state-1", "local-state-2", "local-state-3",
    ]  # fmt: skip
    assert job.over is not None
    assert job.over.result == "dumped"


def test_job_fails_when_no_rank_can_commit_the_last_checkpoint() -> None:
    """When no rank can commit, then the job fails, and the reason says why."""
    job = trained(world=2, enable=CAN_ONLY_DUMP)
    job.script.failures[1, "commit"] = ["OSError: stale file handle"]
    job.kill(0)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert "rank 1 could not write: OSError: stale file handle" in job.over.why


def test_saver_that_hangs_is_ended_and_another_holder_writes_its_part() -> None:
    """When a rank that saves does not answer in time, then it is asked for its stacks and ended.
    Another holder writes its part only after the end of that process is known."""
    job = trained(enable=CAN_ONLY_DUMP, save=90.0)
    job.script.muted = {(1, "save")}
    job.kill(0)
    job.settle()
    job.wait()
    assert [(k.rank, k.last_words) for k in job.orders(Kill)] == [(1, True)]
    assert len([s for s in job.orders(Save) if s.shards]) == 1
    job.settle()
    last = [s for s in job.orders(Save) if s.shards][-1]
    assert (last.to, last.local_state) == ((2,), {0: "00", 1: "00"})
    assert job.over is not None
    assert job.over.result == "dumped"


@pytest.mark.parametrize("order", [Save, Commit])
def test_second_death_during_a_dump_makes_the_remaining_ranks_save_again(
    order: type[Save | Commit],
) -> None:
    """When another rank dies while the survivors save or commit, then the remaining ranks save
    everything again, including the parts of both lost ranks."""
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
        (2,), ["dense", "local-state-0", "local-state-1", "local-state-2", "local-state-3"],
    )  # fmt: skip


def test_dump_fails_when_the_last_holder_of_a_shard_dies() -> None:
    """When the only holder of a shard dies while it saves, then no checkpoint is committed, and the
    reason names the shard."""
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


def test_other_nodes_write_the_last_checkpoint_when_a_node_is_lost() -> None:
    """When a whole node is lost while the last checkpoint is written, then the ranks of the other
    nodes write all of it."""
    job = trained(placement=TWO_NODES, enable=CAN_ONLY_DUMP)
    job.script.muted = {(1, "save")}
    job.kill(0)
    job.settle()
    job.lose_node(0)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert [s.to for s in job.orders(Save) if s.shards] == [(1,), (2,)]


def test_pause_requested_during_a_last_checkpoint_is_ignored() -> None:
    """When a pause is requested while the last checkpoint is written, then nothing changes."""
    job = trained(enable=CAN_ONLY_DUMP)
    job.script.muted = {(1, "save")}
    job.kill(0)
    job.settle()
    before = len(job.said)
    job.pause()
    job.go_on()
    assert len(job.said) == before
    assert job.doing == "dumping"


def test_rank_that_dies_during_a_last_checkpoint_is_not_started_again() -> None:
    """When a plugin has chosen a last checkpoint and another rank dies while it is written, then
    no process is started for that rank, although `recover` is enabled."""
    job = trained(advised=True)
    job.script.muted = {(1, "save")}
    job.kill(0)
    job.settle()
    job.advise(strategy="dump")
    job.settle()
    job.kill(2)
    assert job.doing == "dumping"
    assert [spawn.rank for spawn in job.orders(Spawn)] == [0]


def test_shards_to_save_are_spread_over_the_nodes_when_enabled() -> None:
    """When the policy spreads the last checkpoint over the nodes, then each of two nodes writes one
    of two shards."""
    groups = {"a": (0, 2), "b": (1, 3)}
    job = trained(groups=groups, placement=TWO_NODES, enable=CAN_ONLY_DUMP, spread_savers=True)
    job.stop(0)
    job.settle()
    assert {s.to: s.shards for s in job.orders(Save) if s.shards} == {(0,): ("a",), (3,): ("b",)}


def test_agents_get_the_end_at_the_decision_and_after_the_last_rank() -> None:
    """When the outcome is decided, then the agents get an order to end with the grace of the ranks.
    When the last rank has left, then they get it again."""
    job = trained()
    job.stop(0)
    job.settle()
    assert [e.grace for e in job.orders(EndNode)] == [5.0, 5.0]
    assert job.doing == "ended"
    assert job.machine.next_deadline() is None


def test_job_ends_when_ranks_do_not_answer_the_end_order() -> None:
    """When the ranks do not answer the order to end, then the job is over after at most three times
    their grace."""
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


# ---------------------------------------------------------------- recover: the node


def test_ranks_of_a_lost_node_start_on_a_node_with_room() -> None:
    """When a node is lost and another node has room, then its ranks are started there at once and
    copy the state. All ranks resume at the interrupted step."""
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


def test_lost_process_is_started_again_on_its_own_node() -> None:
    """When only a process is lost, then its replacement starts on the same node, even if another
    node has room."""
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.kill(3)
    job.settle()
    assert [(s.node, s.rank) for s in job.orders(Spawn)] == [(1, 3)]


def test_job_is_dumped_when_a_node_has_too_little_room_for_the_lost_ranks() -> None:
    """When a lost node had two ranks and another node has room for only one, then `recover` fails
    and a last checkpoint is written. The reason names the lost node."""
    job = trained(placement=WITH_ROOM, spare={2: 1}, enable=frozenset({"recover", "dump"}))
    job.lose_node(1)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert [s.rank for s in job.orders(Spawn)] == [2]
    assert tried(job)["recover"] == "node 1 is lost, and no other node has room for its ranks"


def test_moved_rank_is_started_again_on_its_new_node() -> None:
    """When a rank that moved to another node dies there, then its next process starts on that node."""
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.lose_node(1)
    job.settle()
    job.train()
    job.kill(3)
    job.settle()
    job.train()
    assert [(s.node, s.rank) for s in job.orders(Spawn)] == [(2, 2), (2, 3), (2, 3)]
    assert strategies(job) == ["recover", "recover"]


def test_returning_node_can_get_ranks_again() -> None:
    """When an agent joins again after its node was lost, then its node can get as many ranks as the
    agent reports room for."""
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


def test_rank_0_moves_to_another_node_like_any_other_rank() -> None:
    """When the node of rank 0 is lost, then rank 0 starts on another node."""
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.lose_node(0)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert job.ranks[0].node == 2


# ---------------------------------------------------------------- recover: policies and limits


def test_all_processes_of_a_node_are_replaced_with_the_policy_node() -> None:
    """When one process dies and the policy replaces whole nodes, then the other processes of that
    node are replaced too. The incident does not count against these ranks."""
    job = trained(placement=TWO_NODES, replace="node")
    job.kill(2)
    job.settle()
    job.train()
    assert [(k.rank, k.last_words) for k in job.orders(Kill)] == [(3, False)]
    assert [k.cause for k in job.orders(Kill)] == ["node 1 is replaced, because it has lost rank 2"]
    assert sorted((s.rank, s.node) for s in job.orders(Spawn)) == [(2, 1), (3, 1)]
    (incident,) = job.reports()
    assert (incident["strategy"], incident["processes_started"]) == ("recover", 2)
    assert list(job.machine._job.history.troubles) == [2]


def test_whole_node_policy_replaces_no_process_when_recover_is_disabled() -> None:
    """When the policy replaces whole nodes but `recover` is not enabled, then the other ranks on
    the node of a lost rank continue."""
    job = trained(
        placement=TWO_NODES, replace="node", enable=frozenset({"retry", "scale_in", "dump"})
    )
    job.kill(2)
    job.settle()
    job.train()
    assert job.orders(Kill) == []
    assert strategies(job) == ["scale_in"]
    assert job.machine.members == {0, 1, 3}


def test_whole_node_policy_replaces_no_process_when_the_job_ends() -> None:
    """When the policy replaces whole nodes and a process dies after the end was requested, then the
    other processes of its node write their part of the last checkpoint."""
    job = trained(placement=TWO_NODES, replace="node")
    job.stop(0)
    job.kill(2)
    job.settle()
    assert job.orders(Kill) == []
    assert job.over is not None
    assert job.over.result == "dumped"


def test_rank_lost_and_replaced_again_with_its_node_has_one_fault() -> None:
    """When the policy replaces whole nodes, and a rank is lost and replaced, and another rank of
    its node is lost after that, then the first rank has one fault in the report."""
    job = trained(placement=TWO_NODES, replace="node")
    job.kill(2)
    while not job.orders(Regroup):
        job._obey(job._queue.popleft())
    job.kill(3)
    job.settle()
    job.train()
    (incident,) = job.reports()
    (fault,) = (f for f in incident["faults"] if f["rank"] == 2)
    assert (
        fault["evidence"] == "was ended by signal 9\nnode 1 is replaced, because it has lost rank 3"
    )


def test_whole_node_policy_keeps_processes_on_the_node_with_room() -> None:
    """When the policy replaces whole nodes and a node is lost, then its ranks move to a node with
    room. The processes on that node are not ended."""
    job = trained(placement=TWO_NODES, spare={0: 2}, replace="node")
    job.lose_node(1)
    job.settle()
    job.train()
    assert [k.rank for k in job.orders(Kill) if k.node == 0] == []
    assert strategies(job) == ["recover"]
    assert {f.to for f in job.orders(Fetch)} == {(2,), (3,)}


def test_rank_is_started_at_most_three_times_in_one_incident() -> None:
    """When the replacement of a rank dies repeatedly, then the job ends after the third start with
    a last checkpoint. The reason gives the number of deaths."""
    job = trained(enable=frozenset({"recover", "dump"}))
    for _ in range(4):
        job.kill(1)
        job.settle()
    assert [s.incarnation for s in job.orders(Spawn)] == [1, 2, 3]
    assert job.over is not None
    assert job.over.result == "dumped"
    assert tried(job)["recover"] == "rank 1 has died 4 times in this incident"


def test_each_incident_counts_deaths_separately() -> None:
    """When a rank dies twice and the job was healthy between the deaths, then the second incident
    counts deaths from zero."""
    job = trained(respawns=1)
    for _ in range(2):
        job.kill(1)
        job.settle()
        job.train()
    assert strategies(job) == ["recover", "recover"]


def test_successor_that_is_not_ready_in_time_is_ended_and_started_again() -> None:
    """When a new process is not ready before its time limit, then it is ended, and another process
    is started."""
    job = trained(join=40.0)
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    job.wait()
    assert [(k.rank, k.incarnation, k.cause) for k in job.orders(Kill)] == [
        (1, 1, "the process has not called session.run 40 s after its start")
    ]
    job.script.slow = set()
    job.settle()
    job.train()
    assert [s.incarnation for s in job.orders(Spawn)] == [1, 2]
    assert strategies(job) == ["recover"]


def test_job_is_dumped_when_the_adaptor_supports_only_dump() -> None:
    """When the adaptor supports only `dump` and a process dies, then a last checkpoint is written,
    and no process is started."""
    job = trained(strategies=("dump",))
    job.kill(1)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert job.orders(Spawn) == []
    assert tried(job) == {
        strategy: f"the adaptor of ranks [0, 2, 3] does not support the strategy {strategy}"
        for strategy in ("retry", "recover", "scale_in")
    }


@pytest.mark.parametrize(
    ("strategies", "spawned"),
    [
        (("retry", "dump"), []),
        (("retry", "recover", "dump"), [1]),
        (("scale_in", "scale_out", "dump"), [1]),
    ],
)
def test_successor_is_started_at_once_when_a_possible_strategy_needs_it(
    strategies: tuple[str, ...], spawned: list[int]
) -> None:
    """When a rank is lost and the other ranks support a strategy that needs a new process, then the
    process is started at once. Otherwise no process is started."""
    job = trained(strategies=strategies)
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    assert [order.rank for order in job.orders(Spawn)] == spawned


def test_all_ranks_load_a_checkpoint_when_the_only_holder_is_lost() -> None:
    """When the only holder of a shard dies, then all ranks load the newest checkpoint, and the
    steps since that checkpoint count as lost."""
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


def test_job_ends_when_a_checkpoint_cannot_be_loaded_repeatedly() -> None:
    """When the load of a checkpoint fails repeatedly, then the job does not try without limit. It
    ends with the reason."""
    groups = {"a": (0, 1), "b": (2,), "c": (3,)}
    job = trained(groups=groups)
    job.checkpointed(2)
    job.kill(3)
    job.script.failures[3, "load"] = ["the manifest is damaged"] * 20
    job.settle()
    for _ in range(3):  # recover and scale_in are tried three times each, and retry is not offered
        if job.over is None:
            job.wait()
            job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.facts("order_failed")[0]["why"] == "the manifest is damaged"
    assert len(job.orders(Load)) == 2  # the damaged checkpoint is not offered again


def test_job_fails_and_names_the_lost_shard_without_a_checkpoint() -> None:
    """When the only holder of a shard dies and there is no checkpoint, then the job fails. The
    reasons for `recover` and `dump` both name the shard."""
    groups = {"a": (0, 1), "b": (2,), "c": (3,)}
    job = trained(groups=groups)
    job.kill(3)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    nobody = "no sound copy of shard 'c' is left on ranks [3]"
    assert (tried(job)["recover"], tried(job)["dump"]) == (nobody, nobody)


def test_all_members_form_groups_under_a_new_name_after_a_loss() -> None:
    """When process groups are formed after the loss of a node, then one order goes to all members.
    It has a new name for the groups, and leaves no member out."""
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.lose_node(1)
    job.settle()
    (regroup,) = job.orders(Regroup)
    assert (regroup.to, regroup.without, regroup.step) == ((0, 1, 2, 3), (), 4)
    assert regroup.name == "job/1.1"
    assert regroup.incarnations == {2: 1, 3: 1}


# ---------------------------------------------------------------- notices from outside


@pytest.mark.parametrize("kind", ["process", "hang"])
def test_rank_with_an_externally_reported_loss_or_hang_is_replaced(kind: str) -> None:
    """When an external report says that a rank has lost its process or hangs, then the rank is
    ended and replaced. The report has only this fault, with the text of the external report."""
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


def test_externally_reported_network_fault_forms_the_groups_again() -> None:
    """When an external report says that a link is broken, then the process groups are formed again,
    and all processes are kept."""
    job = trained()
    job.notice(2, "network", "port 7 is down")
    job.settle()
    job.train()
    assert job.orders(Kill) == []
    assert strategies(job) == ["retry"]
    assert job.orders(Fetch) == []


def test_externally_reported_software_fault_ends_in_a_dump() -> None:
    """When an external report says that the script has a bug, then the job ends with a last
    checkpoint."""
    job = trained()
    job.notice(2, "software", "the data set is empty")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert "the data set is empty" in job.over.why


def test_external_report_of_an_unknown_or_starting_rank_is_ignored() -> None:
    """When an external report names a rank that does not exist, or a rank whose new process is
    already starting, then nothing changes."""
    job = trained()
    job.report(_noticed_of(9))
    assert job.said == []
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    before = len(job.said)
    job.notice(1, "process")
    assert len(job.said) == before


def test_job_does_not_wait_for_a_process_on_a_node_that_is_excluded() -> None:
    """When a node is reported as faulty and excluded while a process starts there, then the job
    does not wait for this process. The ranks of the node leave by `scale_in`."""
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
