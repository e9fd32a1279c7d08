"""
A job that starts from a checkpoint, and what goes wrong before it has gone on from there.
"""

import pytest

from tests.core.lives import strategies
from tft.core.policy import STRATEGIES
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
    job.muted = {(1, "load")}
    job.start()
    job.muted = set()
    job.kill(1)
    job.machine._job.seats[1].private = {}  # it had not captured anything
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
    job.muted = {(0, "load"), (1, "load")}
    job.start()
    job.muted = set()
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
