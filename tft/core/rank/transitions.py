"""
The two tables of the rank machine (the state machine that decides what the process of one rank
does). A stage says where the training thread is and what it does. `TRANSITIONS` lists the stages
that may follow each stage. `REACTIONS` lists the reaction to each order of the controller in each
stage. `docs/reference/machine.md` shows both tables.
"""

from collections.abc import Mapping
from enum import StrEnum

from tft.protocol.messages import OrderName


class Stage(StrEnum):
    """
    The stages of the training thread of a rank: whether it is in the training loop, and whether it
    carries out an order.
    """

    IDLE = "idle"
    """Out of the user's training loop, waiting for orders."""
    BUSY = "busy"
    """Out of the user's training loop, carrying out an order that is not a check. For the order
    `compare`, another thread reads the state of the rank."""
    CHECKING = "checking"
    """Out of the user's training loop, running a check of links and devices."""
    LOOP = "in the loop"
    """In the user's training loop, or on its way into the loop."""
    HELD = "held"
    """In the loop, standing still at the boundary between two steps, as a `Hold` order demands."""
    CHECKING_HELD = "checking while held"
    """In the loop, at the boundary between two steps, running a check of links and devices."""


S = Stage
INSIDE = frozenset({S.LOOP, S.HELD, S.CHECKING_HELD})
"""The stages in which the training thread is in the user's training loop."""

TRANSITIONS: Mapping[Stage, frozenset[Stage]] = {
    S.IDLE: frozenset({S.BUSY, S.CHECKING, S.LOOP}),
    S.BUSY: frozenset({S.IDLE, S.BUSY, S.CHECKING, S.LOOP}),
    S.CHECKING: frozenset({S.IDLE, S.BUSY, S.CHECKING, S.LOOP}),
    S.LOOP: frozenset({S.IDLE, S.BUSY, S.CHECKING, S.LOOP, S.HELD}),
    S.HELD: frozenset({S.IDLE, S.BUSY, S.CHECKING, S.LOOP, S.CHECKING_HELD}),
    S.CHECKING_HELD: frozenset({S.HELD, S.LOOP, S.CHECKING}),
}
"""By stage of the training thread: the stages that may follow. A stage in which an order is carried
out may follow itself, because the next order may begin at once."""


class Reaction(StrEnum):
    """
    What the rank machine (the state machine of a rank's process) does about an order.
    """

    LOCK = "lock"
    """The training thread enters no update window any more. The answer to the order carries the
    position of the thread."""
    HOLD = "hold"
    """The training thread stands still at the end of the step that the order names."""
    UNLOCK = "unlock"
    """The training thread may enter update windows again."""
    STOP = "stop"
    """The training thread, which is out of the loop, drops the broken process groups as soon as it
    carries out no other order."""
    LEAVE = "leave"
    """The training thread leaves the loop at the end of the step that the order names. If this
    takes longer than the grace time of the order, the thread is interrupted."""
    GRACE = "grace"
    """A `Stop` order has come while a check of links and devices runs outside the loop. The check
    is interrupted if it takes longer than the grace time of the order."""
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
"""By order and stage of the training thread: the reaction to the order."""
