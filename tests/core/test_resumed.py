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
def test_who_is_lost_while_all_load_is_given_its_own_state_from_the_checkpoint(
    *, derives: bool
) -> None:
    """
    When a rank dies while everyone loads the checkpoint, then everyone loads it again: what is
    private to the rank stands there and nowhere else, though others hold all that it shares.
    """
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


def test_what_a_script_begins_with_is_not_what_the_checkpoint_holds() -> None:
    """
    When an incident comes before everyone has loaded, then the state that the script has set up is
    held by nobody, and everyone loads.
    """
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


def test_what_was_loaded_need_not_be_made_anew() -> None:
    """
    When the ranks of a node that is lost are started elsewhere, and everyone loads a checkpoint
    since no copy is left, then everyone has its own state from there, and none is made anew.
    """
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
def test_a_resumed_job_knows_what_lies_before_its_checkpoint(
    older: tuple[tuple[str, int], ...],
) -> None:
    """
    When the checkpoint that a job begins from cannot be read, then all load the one before it, if there
    is one, and train on from there; else the job fails.
    """
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


def test_a_resumed_job_can_go_back_before_its_checkpoint() -> None:
    """
    When what was loaded may have spread what is wrong, then a resumed job goes back to the checkpoint
    before the one it began from.
    """
    job = ScriptedJob(2, resume=SEVEN, older=(("/elsewhere/3", 3),), strategies=STRATEGIES).start()
    job.checkpointed(8)
    job.notice(0, "numeric", polluted=True)
    job.settle()
    assert [load.step for load in job.orders(Load)] == [7, 3]
