"""
Define the events and commands of the rank machine, the state machine that decides what the process
of one rank does. The machine receives events from this process, and returns commands to it.
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

# ---------------------------------------------------------------- events for the rank machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """
    An order for this rank was received. The same order may have been received before, because the
    controller repeats an order until it is answered.
    """

    at: float
    name: OrderName
    order: RankOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """
    The command `Lock` was carried out: from now on the training thread enters no update window
    (`with session.update():`). The event carries the position of the training thread.
    """

    at: float
    position: Position
    held: int | None
    backups: tuple[int, ...] = ()
    waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """
    The position of the training thread. `still` is True if the thread stands still at this
    position: it waits before an update window, and all its all-reduces of the step are complete.
    """

    at: float
    position: Position
    held: int | None
    backups: tuple[int, ...] = ()
    still: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlocked:
    """
    The command `Unlock` was carried out: the training thread may enter update windows again. The
    event carries the position at which the thread stood still.
    """

    at: float
    position: Position
    held: int | None
    backups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """
    The command `LeaveAfter` was passed to the training thread, which will leave the training loop
    at the end of the step that the command names. The event carries the present position of the
    thread.
    """

    at: float
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """
    The training thread has left the user's training loop and waits for an order to carry out.
    """

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """
    The training thread has carried out an order, or the order has failed. `failure` is None on
    success, and otherwise says why the order has failed.
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
    lost: str = ""
    inexact: tuple[str, ...] = ()
    tails: bool = False
    began: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """
    The command `Withdraw` was successful: the training thread had not begun the order that it was
    given, and will not carry it out.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken:
    """
    The time for which the rank machine has asked (`RankMachine.next_deadline`) has come.
    """

    at: float


RankEvent = Ordered | Locked | Located | Unlocked | Leaving | Left | Done | Withdrawn | Woken

# ---------------------------------------------------------------- commands of the rank machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """
    Keep the training thread out of its next update window, and report the position of the thread
    (`Locked`).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldAfter:
    """
    Let the training thread finish step `step`, and keep it out of the next update window. Report
    the position of the thread (`Located`) at once, and a second time when the thread stands still
    before that window.
    """

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlock:
    """
    Let the training thread enter update windows again, and report to the controller when the thread
    completes its next step.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAfter:
    """
    Let the training thread finish step `step`, including its tail (the code between the update and
    the end of the step), and then leave the loop. If the step is finished already, the thread
    leaves the loop before it enters another update window.
    """

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """
    Interrupt the training thread if the thread is in a call that may hang, such as a collective.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Execute:
    """
    Pass this order of the controller to the training thread, which carries it out.
    """

    name: OrderName
    order: RankOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """
    Take back the order that was passed to the training thread, if the thread has not begun the
    order.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """
    Send the answer to an order to the controller.
    """

    answer: Answered


RankCommand = Lock | HoldAfter | Unlock | LeaveAfter | Abort | Execute | Withdraw | Answer
