"""
What a rank has captured of its own (RNG, data position): where it is when the rank has moved, and
who may make it anew.
"""

from tests.core.lives import strategies, take_over, trained, tried
from tft.core.job.policy import STRATEGIES
from tft.protocol.messages import Fetch, Load, Rollback, Spawn
from tft.testing.scripted import ScriptedJob

TWO_NODES = {0: (0, 1), 1: (2, 3)}
SEVEN = ("/run/checkpoints/step-00000007", 7)
NO_SHRINKING = frozenset({"retry", "recover", "dump"})
GONE = "the RNG and data position of rank 2 at the end of step 3 were lost with its node"


def test_lost_captured_state_that_cannot_be_recreated_ends_in_a_dump() -> None:
    """When a node is lost and the adaptor cannot recreate the RNG and data position of its ranks,
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
    captured state is still lost. No process is started, and a last checkpoint is written."""
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
    """When a process cannot be ended and its rank can only return on another node, then its
    captured state is lost. The strategy `recover` is refused, and a last checkpoint is written."""
    job = trained(placement={**TWO_NODES, 2: ()}, spare={2: 1}, derives=False, enable=NO_SHRINKING)
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    job.settle()
    assert strategies(job) == ["dump"]
    assert tried(job)["recover"] == GONE.replace("rank 2", "rank 3")


def test_captured_state_is_recreated_when_the_checkpoint_is_not_whole() -> None:
    """When a rank dies before it loads the first checkpoint, and the checkpoint is not whole, then
    the rank fetches its shared state from others. Its own captured state is recreated."""
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
    """When a rank was lost before it had captured any state and returns after the others trained
    further, then its captured state is recreated. No rank loads the checkpoint again."""
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


def taken_over(private: dict[int, str], *, derives: bool) -> ScriptedJob:
    """
    A job in which another process, on another node, has taken over from rank 1 at the end of step 3;
    the first has left this.
    """
    job = trained(
        placement={0: (0, 1), 1: ()}, spare={1: 1}, world=2, keeps=2, derives=derives,
        enable=frozenset({"migrate", "retry", "recover", "dump"}),
    )  # fmt: skip
    take_over(job, private)
    assert (job.doing, job.ranks[1].node) == ("resuming", 1)
    return job


def moved(private: dict[int, str], *, derives: bool) -> ScriptedJob:
    """
    The same, and before a step is done everyone has to go back to the one before.
    """
    job = taken_over(private, derives=derives)
    job.fault(0, "numeric", polluted=True)
    job.settle()
    return job


def test_captured_state_of_the_first_process_survives_loss_of_its_successor() -> None:
    """When the successor of a rank is lost too, and all ranks roll back to a step before the
    takeover, then the rollback order includes the first process's captured state."""
    job = taken_over({2: "ab", 3: "cd"}, derives=False)
    job.kill(1)
    job.settle()
    job.fault(0, "numeric", polluted=True)
    job.settle()
    assert (job.orders(Rollback)[-1].step, job.orders(Rollback)[-1].private) == (2, {1: "ab"})


def test_rollback_gives_a_moved_rank_its_earlier_captured_state() -> None:
    """When all ranks roll back to a step before a rank moved, then the rollback order gives the
    rank its captured state of that step."""
    job = moved({2: "ab", 3: "cd"}, derives=False)
    assert (job.orders(Rollback)[-1].step, job.orders(Rollback)[-1].private) == (2, {1: "ab"})
    job.train()
    assert strategies(job) == ["retry"]
    assert job.doing == "healthy"


def test_rollback_omits_captured_state_of_steps_that_were_trained_again() -> None:
    """When a moved rank has trained the rolled-back steps again, then it has captured their state
    itself. The next rollback order does not give the old captured state."""
    job = moved({2: "ab", 3: "cd"}, derives=False)
    job.train()
    job.fault(0, "network")
    job.settle()
    assert (job.orders(Rollback)[-1].step, job.orders(Rollback)[-1].private) == (3, {})


def test_moved_rank_recreates_captured_state_that_is_not_known() -> None:
    """When all ranks roll back to a step before a rank moved and its captured state is not known,
    then it is recreated. When the adaptor cannot recreate it, then `retry` is refused."""
    job = moved({3: "cd"}, derives=True)
    assert job.orders(Rollback)[-1].derive == (1,)
    job.train()
    assert strategies(job) == ["retry"]
    job = moved({3: "cd"}, derives=False)
    assert tried(job)["retry"] == (
        "the RNG and data position of rank 1 at the end of step 2 were lost with its node"
    )
