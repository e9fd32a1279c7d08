"""
The places where the steps of a loop end. The tests use real processes with the fake adaptor, and
act as the controller.
"""

import asyncio
import os
from typing import TextIO

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
import array, sys
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


def train_step():
    total = group().add(1.0)
    with session.update():
        numbers.values[0] += total


def wait(place):
    (session.run_dir / f"{place}-{session.rank}").read_text()  # until somebody has written


def says_itself(session):
    while session.step < 100_000:
        train_step()
        wait("tail")
        session.end_step()


def hides(session):
    end = getattr(session, "end_step")
    while session.step < 100_000:
        train_step()
        wait("tail")
        end()


def breaks_off(session):
    for epoch in range(100_000):
        for step in session.steps(100_000):
            if step == 4:
                wait("head")
            train_step()
            if step % 3 == 0:
                break


numbers = Numbers()
session.adopt(model=numbers, data=numbers)
session.run(globals()[sys.argv[1]])
"""


async def reach(stage: Stage, place: str) -> list[TextIO]:
    """
    Wait until both ranks are at the place `place` in the script, and return two open pipes.

    Each rank waits at this place until its pipe is closed.
    """
    doors = [stage.run_dir / f"{place}-{rank}" for rank in BOTH]
    # `open` for writing waits until the pipe has a reader
    return [await asyncio.to_thread(door.open, "w") for door in doors]


async def enter(stage: Stage, function: str, place: str, *, tails: bool = False) -> None:
    """
    Start both ranks, and let them train with the script's loop `function` from step 1.

    `place` names the place at which the ranks will wait. `tails` says whether the loop has tails.
    """
    for rank in BOTH:
        os.mkfifo(stage.run_dir / f"{place}-{rank}")
    await stage.agent(SCRIPT, function, nproc=2, adaptor="fake")
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


async def frozen(stage: Stage) -> list[Position]:
    """
    Freeze both ranks and return their positions.
    """
    return [each.position for each in await done(stage, Freeze(**key(1), cause="a test"))]


@pytest.mark.parametrize(
    ("loop", "tails", "tail"),
    [("hides", False, False), ("hides", True, True), ("says_itself", False, True)],
)
async def test_first_step_has_a_tail_as_soon_as_that_is_known(
    stage: Stage, loop: str, tails: bool, tail: bool
) -> None:
    """When the resume order, or the code of the loop, says that steps have a tail, then each rank
    stands in the tail of its first step after the window. Otherwise the step ends with its window.
    """
    await enter(stage, loop, "tail", tails=tails)
    pipes = await reach(stage, "tail")
    assert await frozen(stage) == [Position(step=1, window=False, tail=tail)] * 2
    for pipe in pipes:
        pipe.close()


async def test_break_out_of_the_loop_ends_the_step_when_the_loop_restarts(
    stage: Stage,
) -> None:
    """When a loop over epochs leaves `session.steps` by `break` and starts it again, then the last
    step has ended."""
    await enter(stage, "breaks_off", "head")
    pipes = await reach(stage, "head")
    assert await frozen(stage) == [Position(step=3, window=False, tail=False)] * 2
    for pipe in pipes:
        pipe.close()
