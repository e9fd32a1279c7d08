"""
The two tables of the rank machine. `TRANSITIONS` lists the stages that may follow each stage of a
training thread. `REACTIONS` lists the reaction to each order in each stage.
`docs/reference/machine.md` shows both tables.
"""

from collections.abc import Mapping
from enum import StrEnum

from tft.protocol.messages import OrderName


class Stage(StrEnum):
    """
    Where the training thread of a rank is, and whether it carries out an order.
    """

    IDLE = "idle"
    """Out of the loop, waiting for orders."""
    BUSY = "busy"
    """Out of the loop, carrying out an order."""
    CHECKING = "checking"
    """Out of the loop, running a check."""
    LOOP = "in the loop"
    """In the user's loop, or on its way into the loop."""
    HELD = "held"
    """In the loop, standing still at a step boundary, as a `Hold` order demands."""
    CHECKING_HELD = "checking while held"
    """In the loop, at a step boundary, running a check of links and devices."""


S = Stage
INSIDE = frozenset({S.LOOP, S.HELD, S.CHECKING_HELD})
"""The stages in which the training thread is in the loop."""

TRANSITIONS: Mapping[Stage, frozenset[Stage]] = {
    S.IDLE: frozenset({S.BUSY, S.CHECKING, S.LOOP}),
    S.BUSY: frozenset({S.IDLE, S.BUSY, S.CHECKING, S.LOOP}),
    S.CHECKING: frozenset({S.IDLE, S.BUSY, S.CHECKING, S.LOOP}),
    S.LOOP: frozenset({S.IDLE, S.BUSY, S.CHECKING, S.LOOP, S.HELD}),
    S.HELD: frozenset({S.IDLE, S.BUSY, S.CHECKING, S.LOOP, S.CHECKING_HELD}),
    S.CHECKING_HELD: frozenset({S.HELD, S.LOOP, S.CHECKING}),
}
"""The stages that may follow each stage. A stage in which an order is carried out may follow
itself, because the next order may begin at once."""


class Reaction(StrEnum):
    """
    What the rank machine does about an order.
    """

    LOCK = "lock"
    """The training thread enters no update window any more. The answer carries its position."""
    HOLD = "hold"
    """The training thread stands still at the end of the step that the order names."""
    UNLOCK = "unlock"
    """The training thread may enter update windows again."""
    STOP = "stop"
    """The training thread, which is out of the loop, drops the broken process groups as soon as it
    carries out no other order."""
    LEAVE = "leave"
    """The training thread leaves the loop at the end of the step that the order names. If it takes
    longer than the grace time of the order, it is interrupted."""
    GRACE = "grace"
    """A check runs outside the loop. It is interrupted if it takes longer than the grace time of
    the `Stop` order."""
    ABORT = "abort"
    """The training thread is interrupted at once, because the job is over for this rank. The order
    is carried out when the thread is out of the loop."""
    QUEUE = "queue"
    """The order is carried out after the orders that came before it."""


R = Reaction
_ALL = dict.fromkeys(Stage, R.QUEUE)
_OVER = {**dict.fromkeys(INSIDE | {S.CHECKING}, R.ABORT), S.IDLE: R.QUEUE, S.BUSY: R.QUEUE}

REACTIONS: Mapping[OrderName, Mapping[Stage, Reaction]] = {
    "freeze": dict.fromkeys(Stage, R.LOCK),
    "stop": {
        **dict.fromkeys(INSIDE, R.LEAVE),
        S.CHECKING: R.GRACE,
        S.IDLE: R.STOP,
        S.BUSY: R.STOP,
    },
    "hold": dict.fromkeys(Stage, R.HOLD),
    "release": dict.fromkeys(Stage, R.UNLOCK),
    "complete": _OVER,
    "end": _OVER,
    **dict.fromkeys(
        (
            "compare", "load", "fetch", "restore", "regroup", "reload", "rebuild", "rollback",
            "resume", "check", "save", "commit",
        ),
        _ALL,
    ),
}  # fmt: skip
"""The reaction to each order in each stage."""
