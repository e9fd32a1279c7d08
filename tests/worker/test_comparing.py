"""
How a rank digests its copies for the comparison, while it forms process groups, and how it drops
groups that were formed too early. The tests use real processes with the fake adaptor, and act as the
controller.
"""

import asyncio
import os
from dataclasses import replace

from tests.agent.stage import Stage
from tests.worker.orders import BOTH, done, key, ordered
from tft.protocol.messages import Answered, Compare, Ready, Regroup, Save, StoreOpened

SCRIPT = """
import array, sys, threading
import tft
from tft.testing.adaptor import Group

start, close = threading.Thread.start, Group.close


def closes(group):
    with (session.run_dir / f"closed-{session.rank}").open("a") as closed:
        closed.write("closed ")
    close(group)


Group.close = closes


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


async def test_unused_groups_are_dropped_before_other_work(stage: Stage) -> None:
    """When ranks have formed groups and then form others or save, without a stop in between, then
    they drop the unused groups first. So a save has no process groups."""
    regroup = await forming(stage, "quickly")
    await done(stage, regroup)
    assert not any((stage.run_dir / f"closed-{rank}").exists() for rank in BOTH)
    await done(stage, replace(regroup, round=2, name="g1"))
    assert [(stage.run_dir / f"closed-{rank}").read_text() for rank in BOTH] == ["closed "] * 2
    directory = str(stage.run_dir / "checkpoints" / "step-1")
    save = Save(
        **key(0, round=3), directory=directory, step=1, shards=(), writes_own=False, local_state={}
    )
    await done(stage, save)
    assert [(stage.run_dir / f"closed-{rank}").read_text() for rank in BOTH] == [
        "closed closed "
    ] * 2
