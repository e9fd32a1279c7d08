"""
A job that starts from a checkpoint, and what goes wrong before it has gone on from there.
"""

import pytest

from tests.core.lives import strategies
from tft.core.job.policy import STRATEGIES
from tft.protocol.messages import Fetch, Load, Rollback
from tft.testing.scripted import ScriptedJob

SEVEN = ("/run/checkpoints/step-00000007", 7)


@pytest.mark.parametrize("derives", [True, False])
def test_rank_lost_during_the_first_load_gets_its_state_from_the_checkpoint(
    *, derives: bool
) -> None:
    """When a rank dies while all ranks load the checkpoint, then all ranks load it again. Only the
    checkpoint has the private state of the lost rank."""
    job = ScriptedJob(2, resume=SEVEN, derives=derives, strategies=STRATEGIES)
    job.script.muted = {(1, "load")}
    job.start()
    job.script.muted = set()
    job.kill(1)
    job.machine._job.ranks.states[1].local_state.reported = {}  # it had not captured anything
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert [load.to for load in job.orders(Load)] == [(0, 1), (0, 1)]
    assert job.orders(Fetch) == []
    assert job.orders(Rollback)[-1].derive == ()


def test_initial_state_of_the_script_does_not_replace_the_checkpoint() -> None:
    """When an incident occurs before all ranks have loaded, then the initial state of the script
    does not count, and all ranks load the checkpoint again."""
    job = ScriptedJob(2, resume=SEVEN, strategies=STRATEGIES)
    job.script.muted = {(0, "load"), (1, "load")}
    job.start()
    job.script.muted = set()
    job.notice(0, "numeric", polluted=True)
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert [load.step for load in job.orders(Load)] == [7, 7]
    assert {rank.step for rank in job.ranks.values()} == {8}


def test_captured_state_from_a_loaded_checkpoint_is_not_recreated() -> None:
    """When the ranks of a lost node move and all ranks load a checkpoint because no copy is left,
    then captured state comes from the checkpoint. No rank recreates it."""
    job = ScriptedJob(
        2, placement={0: (0,), 1: (1,)}, groups={"a": (0,), "b": (1,)}, spare={0: 1},
        strategies=STRATEGIES,
    ).start()  # fmt: skip
    job.train(3)
    job.checkpointed(2)
    job.lose_node(1)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert [(load.step, load.to) for load in job.orders(Load)] == [(2, (0, 1))]
    assert job.orders(Rollback)[-1].derive == ()


@pytest.mark.parametrize(
    "older", [(), (("/run/checkpoints/step-00000005", 5), ("/elsewhere/3", 3))]
)
def test_resumed_job_loads_an_older_checkpoint_when_its_first_is_unreadable(
    older: tuple[tuple[str, int], ...],
) -> None:
    """When the checkpoint of a resumed job cannot be read, then all ranks load the older checkpoint
    and train from there. Without an older one the job fails."""
    job = ScriptedJob(2, resume=SEVEN, older=older, strategies=STRATEGIES)
    job.script.failures = {
        (rank, "load"): ["a digest differs"] * (2 if older else 9) for rank in range(2)
    }
    job.start()
    while older and job.doing != "healthy" and job.machine.next_deadline() is not None:
        job.wait()
        job.settle()
        job.train()
    if older:
        assert [load.directory for load in job.orders(Load)] == [SEVEN[0], SEVEN[0], older[0][0]]
        assert {rank.step for rank in job.ranks.values()} == {6}
        return
    while job.over is None:
        job.wait()
        job.settle()
    assert {load.directory for load in job.orders(Load)} == {SEVEN[0]}
    assert job.over.result == "failed"


def test_resumed_job_rolls_back_to_a_checkpoint_before_its_first() -> None:
    """When the loaded state may already be polluted, then a resumed job loads the checkpoint before
    the one that it started from."""
    job = ScriptedJob(2, resume=SEVEN, older=(("/elsewhere/3", 3),), strategies=STRATEGIES).start()
    job.checkpointed(8)
    job.notice(0, "numeric", polluted=True)
    job.settle()
    assert [load.step for load in job.orders(Load)] == [7, 3]
