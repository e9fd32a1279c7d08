"""
What the job knows of a rank: its processes one after the other, and its rank-local state.
"""

import pytest

from tests.core.lives import (
    strategies,
    take_over,
    trained,
    tried,
)
from tft.core.job.holdings import (
    Holdings,
)
from tft.core.job.policy import (
    STRATEGIES,
)
from tft.core.job.rank_process import (
    ProcessStage,
    RankProcess,
)
from tft.core.job.rank_state import (
    Declared,
    LocalState,
    RankState,
)
from tft.core.plan.standing import (
    Standing,
)
from tft.protocol.messages import (
    Fetch,
    Joined,
    Load,
    Position,
    Rollback,
    Spawn,
)
from tft.testing.scripted import (
    ScriptedJob,
)

# ---------------------------------------------------------------- the processes of a rank


def test_new_rank_state_has_no_process_and_holds_no_state() -> None:
    """When no process was ordered yet, then a rank has no incarnation and holds no state. Copies
    that it keeps later are trusted."""
    job = ScriptedJob(2)
    assert [job.machine.incarnation(rank) for rank in (0, 1)] == [-1, -1]
    rank_state = RankState(rank=1)
    assert rank_state.standing("") == Standing(rank=1, alive=False)
    rank_state.process.stage, rank_state.holdings.backups = ProcessStage.READY, (0, 1)
    assert rank_state.able
    assert rank_state.holdings.kept == (0, 1)


def test_new_rank_state_has_no_process_facts_declarations_or_findings() -> None:
    """When no process was ordered yet, then all facts about a process are empty, nothing is
    declared, and no check has a finding."""
    rank_state = RankState(rank=1)
    process, declared = rank_state.process, rank_state.declared
    assert (process.pid, process.started, process.sender) == (0, 0, "")
    assert (process.spawned, process.began, process.terminating_since) == (0.0, 0.0, 0.0)
    assert (process.terminating, process.blame, process.straggles) == ("", "", "")
    assert (declared.derives, declared.reloads, declared.after) == (False, False, 0.0)
    assert (rank_state.check.verdict, rank_state.check.finding) == ("pass", "")


def test_order_of_a_new_process_resets_the_facts_of_the_old_process() -> None:
    """When another process is ordered for a rank, then all facts of the old process are reset. The
    facts of the rank, its captured rank-local state and its last trained step are kept."""
    rank_state = RankState(
        rank=1, node=2, excluded_nodes={0: 3}, declared=Declared(column=(1, 5)),
        local_state=LocalState(page=2, reported={7: "ab"}),
    )  # fmt: skip
    rank_state.order(0, 10.0)
    joined = Joined(
        rank=1, incarnation=0, world=8, pid=77, started=5, host="h", address="h:1", adaptor="fake",
        strategies=("retry",), derives=True, at=11.0,
    )  # fmt: skip
    rank_state.join(joined, "rank.1/0")
    rank_state.process.stage = ProcessStage.READY
    rank_state.holdings = Holdings(held=7, backups=(5, 6), trusted=False, damaged=True, doubted=4)
    rank_state.training = rank_state.finished = rank_state.repaired = True
    rank_state.process.invited = True
    rank_state.process.terminating = rank_state.process.blame = "hang"
    rank_state.failures.write = rank_state.failures.commit = "the disk is full"
    rank_state.position = Position(step=7, window=True)
    rank_state.order(1, 20.0)
    assert rank_state == RankState(
        rank=1,
        node=2,
        excluded_nodes={0: 3},
        process=RankProcess(incarnation=1, stage=ProcessStage.ORDERED, spawned=20.0, began=20.0),
        declared=Declared(
            column=(1, 5), address="h:1", strategies=frozenset({"retry"}), derives=True
        ),
        local_state=LocalState(page=2, reported={7: "ab"}),
        left=7,
    )


def test_terminating_process_is_neither_alive_nor_coming() -> None:
    """When a process was told to end, then it counts neither as alive nor as starting, at any
    stage. Before that, only a ready process counts as alive, and only an ordered, spawned or joined
    one as starting."""
    for stage in ProcessStage:
        rank_state = RankState(rank=1, process=RankProcess(stage=stage))
        standing = rank_state.standing("no room")
        ready = stage is ProcessStage.READY
        starting = stage in (ProcessStage.ORDERED, ProcessStage.SPAWNED, ProcessStage.JOINED)
        assert (standing.alive, standing.coming) == (ready, starting)
        assert standing.unplaceable == "no room"
        assert rank_state.able is ready
        rank_state.process.terminating = "it hangs"
        standing = rank_state.standing("")
        assert (standing.alive, standing.coming, rank_state.able) == (False, False, False)


def test_copies_from_before_a_memory_repair_are_not_trusted() -> None:
    """When the memory of a rank is damaged, then none of its kept copies is trusted. After the
    repair only copies of later steps are trusted."""
    for damaged, doubted, kept in ((True, -1, ()), (False, 4, (5,)), (False, -1, (3, 4, 5))):
        holdings = Holdings(backups=(3, 4, 5), damaged=damaged, doubted=doubted)
        assert holdings.kept == kept


def test_process_that_loads_its_own_checkpoint_has_no_usable_copy() -> None:
    """When a process is loading a checkpoint that it keeps itself, then neither its current state
    nor its kept copies can be used."""
    holdings = Holdings(held=5, backups=(3, 4), searching=True)
    assert holdings.kept == ()
    assert not holdings.sound


def test_comparison_result_is_removed_when_the_copy_is_replaced() -> None:
    """When the state of a rank is replaced by a fetch or a load, then the comparison result of the
    old copy is removed."""
    for fetched in (False, True):
        holdings = Holdings(held=5, outrun=frozenset({"a"}), disputed=True)
        holdings.replaced(fetched=fetched)
        assert holdings == Holdings(held=5, fetched=fetched)


def test_loaded_checkpoint_makes_the_state_of_a_rank_sound() -> None:
    """When all ranks have loaded the checkpoint of step 4, then the current state of each rank can
    be used. Of its kept copies, only those of steps after 4 can be used."""
    holdings = Holdings(
        held=4, backups=(3, 4, 5), trusted=False, damaged=True, disputed=True,
        outrun=frozenset({"a"}),
    )  # fmt: skip
    holdings.reloaded(4)
    assert holdings == Holdings(held=4, backups=(3, 4, 5), doubted=4)
    assert holdings.sound
    assert holdings.kept == (5,)


@pytest.mark.parametrize("far", ["ordered", "spawned"])
def test_rank_moves_when_its_node_fails_before_its_process_has_started(far: str) -> None:
    """When a node is reported as faulty while a process starts there, or before its agent has
    reported the start, then the node is excluded. The rank moves to another node."""
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 2})
    job.script.slow = {3}
    if far == "ordered":
        job.script.gone = {1}  # the agent of node 1 receives no orders
    job.kill(3)
    job.settle()
    job.notice(3, "node", "its power goes")
    job.script.slow = set()
    job.settle()
    if far == "ordered":
        job.wait()  # no agent reports the end of the process of rank 3
        job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert {one.node for one in job.ranks.values()} == {0, 2}


# ---------------------------------------------------------------- rank-local state


TWO_NODES = {0: (0, 1), 1: (2, 3)}
SEVEN = ("/run/checkpoints/step-00000007", 7)
NO_SHRINKING = frozenset({"retry", "recover", "dump"})
GONE = "the RNG and data position of rank 2 at the end of step 3 were lost with its node"


def test_lost_captured_state_that_cannot_be_recreated_ends_in_a_dump() -> None:
    """When a node is lost and the adaptor cannot make the RNG and data position of its ranks anew,
    then the job does not recover. The remaining ranks write a last checkpoint."""
    job = trained(placement={**TWO_NODES, 2: ()}, spare={2: 2}, derives=False, enable=NO_SHRINKING)
    job.lose_node(1)
    job.settle()
    assert strategies(job) == ["dump"]
    assert tried(job)["recover"] == GONE
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)


def test_node_that_joins_later_does_not_restore_lost_captured_state() -> None:
    """When a node is lost and another node with room joins before the strategy is chosen, then the
    rank-local state of the lost ranks is still lost. No process is started, and a last checkpoint
    is written."""
    job = trained(placement=TWO_NODES, spare={2: 2}, derives=False, enable=NO_SHRINKING)
    job.script.muted = {(0, "stop")}
    job.lose_node(1)
    job.settle()
    job.come(2)
    assert job.doing == "clearing"
    job.script.muted = set()
    job.repeat()
    job.settle()
    assert strategies(job) == ["dump"]
    assert tried(job)["recover"] == GONE
    assert job.orders(Spawn) == []


def test_captured_state_of_a_process_that_cannot_be_ended_is_lost() -> None:
    """When a process cannot be ended and its rank can only start on another node, then its
    rank-local state is lost. The strategy `recover` is refused, and a last checkpoint is written.
    """
    job = trained(placement={**TWO_NODES, 2: ()}, spare={2: 1}, derives=False, enable=NO_SHRINKING)
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    job.settle()
    assert strategies(job) == ["dump"]
    assert tried(job)["recover"] == GONE.replace("rank 2", "rank 3")


def test_captured_state_is_recreated_when_the_checkpoint_is_not_whole() -> None:
    """When a rank dies before it has loaded the first checkpoint and its new process cannot read
    it, then the rank fetches its shards from another rank. It makes its rank-local state anew."""
    job = ScriptedJob(2, resume=SEVEN, strategies=STRATEGIES)
    job.script.muted = {(1, "load")}
    job.start()
    job.script.muted = set()
    job.script.failures[1, "load"] = ["a digest differs"] * 2
    job.kill(1)
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert len(job.orders(Load)) == 3
    assert [fetch.to for fetch in job.orders(Fetch)] == [(1,)]
    assert job.orders(Rollback)[-1].derive == (1,)
    assert {rank.step for rank in job.ranks.values()} == {8}


def test_rank_that_returns_after_further_training_does_not_load_again() -> None:
    """When a rank was lost before any of its rank-local state was captured, and returns after the
    others have trained on, then it makes this state anew. No rank loads the checkpoint again."""
    job = ScriptedJob(4, resume=SEVEN, strategies=STRATEGIES, placement={0: (0, 1, 2), 1: (3,)})
    job.script.muted = {(3, "load")}
    job.start()
    job.lose_node(1)
    job.settle()
    job.train(2)
    assert job.machine.members == {0, 1, 2}
    loads = len(job.orders(Load))
    job.script.muted = set()
    job.come(1)
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in", "scale_out"]
    assert len(job.orders(Load)) == loads
    assert job.orders(Rollback)[-1].derive == (3,)
    assert job.doing == "healthy"


def taken_over(local_state: dict[int, str], *, derives: bool) -> ScriptedJob:
    """
    Return a job in which a process on another node has taken over from rank 1 at the end of step 3.

    The node of the first process has reported the given rank-local state. `derives` says whether
    the adaptor can make a rank-local state from the step alone.
    """
    job = trained(
        placement={0: (0, 1), 1: ()}, spare={1: 1}, world=2, keeps=2, derives=derives,
        enable=frozenset({"migrate", "retry", "recover", "dump"}),
    )  # fmt: skip
    take_over(job, local_state)
    assert (job.doing, job.ranks[1].node) == ("resuming", 1)
    return job


def moved(local_state: dict[int, str], *, derives: bool) -> ScriptedJob:
    """
    Return the job of `taken_over` after a fault that sends all ranks back to step 2.

    The fault occurs before a further step is complete.
    """
    job = taken_over(local_state, derives=derives)
    job.fault(0, "numeric", polluted=True)
    job.settle()
    return job


def test_captured_state_of_the_first_process_survives_loss_of_its_successor() -> None:
    """When the successor of a rank is lost too, and all ranks roll back to a step before the
    takeover, then the order to roll back contains the rank-local state captured from the first
    process."""
    job = taken_over({2: "ab", 3: "cd"}, derives=False)
    job.kill(1)
    job.settle()
    job.fault(0, "numeric", polluted=True)
    job.settle()
    assert (job.orders(Rollback)[-1].step, job.orders(Rollback)[-1].local_state) == (2, {1: "ab"})


def test_rollback_gives_a_moved_rank_its_earlier_captured_state() -> None:
    """When all ranks roll back to a step before a rank moved to another node, then the order to
    roll back contains the captured rank-local state of this rank at that step."""
    job = moved({2: "ab", 3: "cd"}, derives=False)
    assert (job.orders(Rollback)[-1].step, job.orders(Rollback)[-1].local_state) == (2, {1: "ab"})
    job.train()
    assert strategies(job) == ["retry"]
    assert job.doing == "healthy"


def test_rollback_omits_captured_state_of_steps_that_were_trained_again() -> None:
    """When a rank that moved has trained the rolled-back steps again, then its own process has
    captured their rank-local state. The next order to roll back does not contain the old one."""
    job = moved({2: "ab", 3: "cd"}, derives=False)
    job.train()
    job.fault(0, "network")
    job.settle()
    assert (job.orders(Rollback)[-1].step, job.orders(Rollback)[-1].local_state) == (3, {})


def test_moved_rank_recreates_captured_state_that_is_not_known() -> None:
    """When all ranks roll back to a step before a rank moved, and its rank-local state of that step
    is not known, then the rank makes it anew. If the adaptor cannot do this, then `retry` is
    refused."""
    job = moved({3: "cd"}, derives=True)
    assert job.orders(Rollback)[-1].derive == (1,)
    job.train()
    assert strategies(job) == ["retry"]
    job = moved({3: "cd"}, derives=False)
    assert tried(job)["retry"] == (
        "the RNG and data position of rank 1 at the end of step 2 were lost with its node"
    )
