"""
The first step of a process whose loop says where its steps end, and has not said so yet: with real processes and the
fake adaptor, with the test as controller.
"""

import asyncio
import os

import pytest

from tests.agent.stage import Stage
from tests.worker.orders import BOTH, done, key
from tft.protocol.messages import (
    Freeze,
    Position,
    Ready,
    Rebuild,
    Regroup,
    Resume,
    Rollback,
    StoreOpened,
    Trained,
)

SCRIPT = """
import array
import tft
from tft.testing.adaptor import group

session = tft.init()


class Numbers:
    def __init__(self):
        self.values = array.array("d", [0.0])

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def train(session):
    while session.step < 100_000:
        total = group().add(1.0)
        with session.update():
            numbers.values[0] += total
        (session.run_dir / f"tail-{session.rank}").read_text()  # until somebody has written
        session.end_step()


numbers = Numbers()
session.adopt(model=numbers, data=numbers)
session.run(train)
"""


@pytest.mark.parametrize("tails", [False, True])
async def test_a_first_step_ends_where_others_have_said(stage: Stage, tails: bool) -> None:
    """
    When processes enter their loop, and are told that steps end behind their windows there, then each stands in the tail
    of its first step when that window has closed; otherwise that step is taken to end with its window.
    """
    doors = [stage.run_dir / f"tail-{rank}" for rank in BOTH]
    for door in doors:
        os.mkfifo(door)
    await stage.agent(SCRIPT, nproc=2, adaptor="fake")
    for rank in BOTH:
        await stage.start(rank=rank)
        await stage.report(Ready, rank=rank)
    store = await stage.report(StoreOpened)
    forming = Regroup(**key(0), step=1, name="g0", host=store.host, port=store.port)
    await done(stage, forming)
    await done(stage, Rebuild(**key(0)))
    await done(stage, Rollback(**key(0), step=0))
    await done(stage, Resume(**key(0), step=1, tails=tails))
    for rank in BOTH:
        await stage.report(Trained, rank=rank, step=1)
    # a pipe can be opened for writing when its reader is there: both have come to their tails
    pipes = [await asyncio.to_thread(door.open, "w") for door in doors]
    answers = await done(stage, Freeze(**key(1), cause="a test"))
    assert [answer.position for answer in answers] == [
        Position(step=1, window=False, tail=tails)
    ] * 2
    for pipe in pipes:
        pipe.close()
