"""
The words between a rank machine and its shell: what the machine is told, and what it says is to be
done. `Left`: the training thread is out of the user's loop; `Standing`: it may stand still inside,
at the edge of an update window.
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
    An order for this rank was heard, maybe not for the first time.
    """

    at: float
    name: OrderName
    order: RankOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """
    No update window opens any more; this is where the training thread stands.
    """

    at: float
    position: Position
    held: int | None
    backups: tuple[int, ...] = ()
    waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """
    Where the training thread stands, and whether it stands still there: it does when it waits at
    the edge of an update window with its all-reduces complete, until somebody lets it in.
    """

    at: float
    position: Position
    held: int | None
    backups: tuple[int, ...] = ()
    still: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlocked:
    """
    Update windows open again; this is where the training thread stood.
    """

    at: float
    position: Position
    held: int | None
    backups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """
    From now on the training thread leaves the loop at the next end of a step; this is where it
    stands.
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
    The training thread has carried out an order, or failed to.
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
    private: dict[int, str] = field(default_factory=dict)
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
    The order the training thread had not begun was taken back from it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken:
    """
    The moment named by `next_deadline` has come.
    """

    at: float


RankEvent = Ordered | Locked | Standing | Unlocked | Leaving | Left | Done | Withdrawn | Woken

# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """
    Hold the training thread back from its next update window, and say where it stands.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldAfter:
    """
    Let the training thread finish step `step`, hold it back from the window after that, and say
    whether it stands there. When it comes there later, that is to be said then.
    """

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlock:
    """
    Hold the training thread back no longer, and announce the step it completes next.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAfter:
    """
    Let the training thread finish step `step` with its tail if it has not; then it leaves the loop.
    """

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """
    Bring the training thread out of whatever it may hang in.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Execute:
    """
    Hand this order to the training thread.
    """

    name: OrderName
    order: RankOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """
    Take back the order that the training thread was handed, if it has not begun with it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """
    Report this.
    """

    answer: Answered


RankCommand = Lock | HoldAfter | Unlock | LeaveAfter | Abort | Execute | Withdraw | Answer
