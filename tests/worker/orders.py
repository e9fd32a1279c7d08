"""
A test as the controller of two ranks: the orders it gives them, and their answers.
"""

from typing import TypedDict

from tests.agent.stage import Stage
from tft.protocol.messages import (
    ORDER_NAMES,
    Answered,
    RankOrder,
    Rebuild,
    Regroup,
    Resume,
    Rollback,
    StoreOpened,
    Trained,
)

BOTH = (0, 1)


class Key(TypedDict):
    """
    What every order carries.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]


def key(incident: int, round: int = 1, to: tuple[int, ...] = BOTH) -> Key:
    """
    Of one round of an incident.
    """
    return Key(epoch=1, incident=incident, round=round, to=to)


async def ordered(stage: Stage, order: RankOrder) -> list[Answered]:
    """
    The answers to an order, in the order of the ranks.
    """
    stage.order(order)
    return [
        await stage.report(
            Answered,
            rank=rank,
            incident=order.incident,
            round=order.round,
            order=ORDER_NAMES[type(order)],
        )
        for rank in order.to
    ]


async def done(stage: Stage, order: RankOrder) -> list[Answered]:
    """
    The same, when none of them may have failed.
    """
    answers = await ordered(stage, order)
    assert [answer.failure for answer in answers] == [None] * len(order.to)
    return answers


async def enter(stage: Stage, incident: int, step: int, *, skip: int = 0) -> None:
    """
    Both ranks hold the end of `step`: they form groups, and go on from there.
    """
    store = await stage.report(StoreOpened)
    forming = Regroup(
        **key(incident), step=step + 1, name=f"g{incident}", host=store.host, port=store.port
    )
    await done(stage, forming)
    await done(stage, Rebuild(**key(incident)))
    await done(stage, Rollback(**key(incident), step=step, skip=skip))
    await done(stage, Resume(**key(incident), step=step + 1))
    for rank in BOTH:
        await stage.report(Trained, rank=rank, step=step + 1)
