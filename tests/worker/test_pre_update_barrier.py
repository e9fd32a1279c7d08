"""
The barrier before an update of ranks that hold different parts.

A rank may wait there for a rank that does not arrive. The tests use real processes with the fake
adaptor, and act as the controller.
"""

import pytest

from tests.agent.stage import Stage
from tests.worker.orders import BOTH, done, enter, key
from tft.protocol.messages import Faulted, Freeze, Position, Ready, Stop

SCRIPT = """
import array, threading
import tft
from tft.testing.adaptor import group

session = tft.init()


class Numbers:
    values = array.array("d", [0.0])


def train(session):
    for step in session.steps(100_000):
        total = group().add(1.0)
        if session.rank == 1 and step == 5:
            threading.Event().wait()  # its all-reduces are complete, and it does not come
        with session.update():
            numbers.values[0] += total


numbers = Numbers()
session.adopt(model=numbers, apart=True)
session.run(train)
"""
FIRST = (0,)


@pytest.mark.parametrize("finish", [5, 4])
async def test_rank_that_waits_at_the_barrier_follows_the_other_ranks(
    stage: Stage, finish: int
) -> None:
    """When a rank waits at the barrier for a rank that does not come, then it has not begun the
    update. When it is stopped, it completes the step only if the order says that the others
    completed it."""
    await stage.agent(SCRIPT, nproc=2, adaptor="fake")
    for rank in BOTH:
        await stage.start(rank=rank)
        ready = await stage.report(Ready, rank=rank)
        assert [(each.shard, each.ranks) for each in ready.shards] == [(f"part.{rank}", (rank,))]
    await enter(stage, 0, 0)
    await stage.pulse(lambda pulse: pulse.rank == 0 and pulse.position.step == 4)
    frozen = (await done(stage, Freeze(**key(1, to=FIRST), cause="a test")))[0]
    assert (frozen.position, frozen.held) == (Position(step=4, window=False), 4)
    assert frozen.waiting
    stopped = (await done(stage, Stop(**key(1, to=FIRST), finish=finish, grace=0.2)))[0]
    assert (stopped.position, stopped.held) == (Position(step=finish, window=False), finish)
    fault = await stage.report(Faulted, rank=0)
    assert (fault.kind, fault.step, fault.position.window) == ("network", 5, False)
