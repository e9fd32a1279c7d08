"""
Orders that a test sends to two ranks in place of the controller, and the answers of the ranks.
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
    The fields that all orders share.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]


def key(incident: int, round: int = 1, to: tuple[int, ...] = BOTH) -> Key:
    """
    Return the fields that all orders of one round of an incident share.
    """
    return Key(epoch=1, incident=incident, round=round, to=to)


async def ordered(stage: Stage, order: RankOrder) -> list[Answered]:
    """
    Send an order and return the answers of the ranks, in the order of `order.to`.
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
    Send an order, check that no rank failed, and return the answers.
    """
    answers = await ordered(stage, order)
    assert [answer.failure for answer in answers] == [None] * len(order.to)
    return answers


async def enter(stage: Stage, incident: int, step: int, *, skip: int = 0) -> None:
    """
    Let both ranks form groups, roll back to the end of `step`, and train the next step.

    `skip` is the number of batches that the ranks leave out.
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
