"""
How a rank digests its copies for the comparison, while it forms process groups. The tests use real
processes with the fake adaptor, and act as the controller.
"""

import asyncio
import os

from tests.agent.stage import Stage
from tests.worker.orders import BOTH, done, key, ordered
from tft.protocol.messages import Answered, Compare, Ready, Regroup, StoreOpened

SCRIPT = """
import array, sys, threading
import tft

start = threading.Thread.start


class Slow(array.array):
    def tobytes(self):
        (session.run_dir / f"digest-{session.rank}").read_text()  # until somebody has written
        return super().tobytes()


def refuse(thread):
    if thread.name == "tft-compare":
        raise RuntimeError("can't start new thread")
    start(thread)


class Numbers:
    def __init__(self):
        self.values = (Slow if sys.argv[1] == "slowly" else array.array)("d", [0.0])

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


if sys.argv[1] == "without threads":
    threading.Thread.start = refuse
session = tft.init()
numbers = Numbers()
session.adopt(model=numbers, data=numbers)
session.run(lambda session: None)
"""


async def forming(stage: Stage, how: str) -> Regroup:
    """
    Start both ranks, and return an order to form groups. `how` says how the ranks compare.
    """
    await stage.agent(SCRIPT, how, nproc=2, adaptor="fake")
    for rank in BOTH:
        await stage.start(rank=rank)
        await stage.report(Ready, rank=rank)
    store = await stage.report(StoreOpened)
    return Regroup(**key(0), step=1, name="g0", host=store.host, port=store.port)


async def test_groups_are_formed_while_a_rank_still_digests_its_copies(stage: Stage) -> None:
    """When ranks are ordered to compare and to form groups, then the groups are formed before the
    digests are complete."""
    doors = [stage.run_dir / f"digest-{rank}" for rank in BOTH]
    for door in doors:
        os.mkfifo(door)
    regroup = await forming(stage, "slowly")
    stage.order(Compare(**key(0)))
    pipes = [await asyncio.to_thread(door.open, "w") for door in doors]  # both ranks digest now
    await done(stage, regroup)
    for pipe in pipes:
        pipe.close()
    answers = [await stage.report(Answered, rank=rank, order="compare") for rank in BOTH]
    assert all(answer.digests for answer in answers)


async def test_rank_without_threads_digests_its_copies_nevertheless(stage: Stage) -> None:
    """When the system has no more threads, then the training thread digests the copies, and forms
    the groups after that."""
    regroup = await forming(stage, "without threads")
    answers = await ordered(stage, Compare(**key(0)))
    assert all(answer.digests and answer.failure is None for answer in answers)
    await done(stage, regroup)
