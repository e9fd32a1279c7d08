"""
Define the events that the rank machine receives from the process around it, and the commands that
it returns. `Left` means that the training thread is out of the user's loop. `Located` reports
whether it stands still inside the loop, at the edge of an update window.
"""

from dataclasses import dataclass, field

from tft.protocol.messages import (
    Answered,
    OrderName,
    Position,
    RankOrder,
    SavedFile,
    Verdict,
)

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """
    An order for this rank was received. It may be a repetition.
    """

    at: float
    name: OrderName
    order: RankOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """
    From now on the training thread enters no update window. The event carries its position.
    """

    at: float
    position: Position
    held: int | None
    backups: tuple[int, ...] = ()
    waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """
    The position of the training thread, and whether it stands still there. It stands still while it
    waits at the edge of an update window, with its all-reduces complete.
    """

    at: float
    position: Position
    held: int | None
    backups: tuple[int, ...] = ()
    still: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlocked:
    """
    The training thread may enter update windows again. The event carries the position at which it
    stood still.
    """

    at: float
    position: Position
    held: int | None
    backups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """
    From now on the training thread leaves the loop at the next end of a step. The event carries its
    present position.
    """

    at: float
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """
    The training thread has left the loop and waits for orders.
    """

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """
    The training thread has carried out an order, or the order has failed.
    """

    order: RankOrder
    name: OrderName
    failure: str | None
    context_lost: bool = False
    position: Position
    held: int | None
    backups: tuple[int, ...] = ()
    files: tuple[SavedFile, ...] = ()
    verdict: Verdict = "pass"
    finding: str = ""
    local_state: dict[int, str] = field(default_factory=dict)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    compared: float = 0.0
    line: str = ""
    odd: dict[int, str] = field(default_factory=dict)
    inexact: tuple[str, ...] = ()
    tails: bool = False
    began: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """
    An order was taken back before the training thread had begun it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken:
    """
    The time returned by `next_deadline` has come.
    """

    at: float


RankEvent = Ordered | Locked | Located | Unlocked | Leaving | Left | Done | Withdrawn | Woken

# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """
    Keep the training thread out of its next update window, and report its position.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldAfter:
    """
    Let the training thread finish step `step`, keep it out of the next update window, and report
    whether it stands still there. If it reaches that place later, report that then.
    """

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlock:
    """
    Let the training thread enter update windows again, and report the step that it completes next.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAfter:
    """
    Let the training thread finish step `step` with its tail, if it has not done so. Then it leaves
    the loop.
    """

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """
    Interrupt the training thread in any call that may hang, such as a collective.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Execute:
    """
    Pass this order to the training thread.
    """

    name: OrderName
    order: RankOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """
    Take back the order that was passed to the training thread, if the thread has not begun it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """
    Send this answer to the controller.
    """

    answer: Answered


RankCommand = Lock | HoldAfter | Unlock | LeaveAfter | Abort | Execute | Withdraw | Answer
