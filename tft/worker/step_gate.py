"""
The gate between the control thread and the training thread of a worker.

The gate knows which update windows the training thread may enter, which orders wait for the
training thread, and the position of the training thread. The training thread gets the permission to
enter a window, and the new position, under one lock. So the control thread never reports a position
that is out of date: a rank that was let into a window is reported in that window.
"""

import sys
import threading
from collections import deque
from collections.abc import Sequence
from types import FrameType
from typing import Literal

import pluggy
import structlog

from tft.clock import SystemClock
from tft.core.rank.protocol import (
    Execute,
    Leaving,
    Located,
    Locked,
    Unlocked,
    Withdrawn,
)
from tft.protocol.messages import GroupStanding, Position, Resume, Whereabouts
from tft.worker.whereabouts import stack_of

log = structlog.get_logger()

NEVER = sys.maxsize
"""A step number that no job reaches. As the last step before a lock, it means that no window is
locked; as the last step before the loop is left, that the loop is not left."""

Word = Literal["in", "out"]
"""The decision for a training thread that waits at the gate: `in` (go on) or `out` (leave the
loop)."""


Place = tuple[int, bool, bool, bool, bool]
"""
The position of the training thread: (step, window, torn, tail, after).

`step` is the last step whose window has closed. `window`: the window of the next step is open.
`torn`: the state was partly overwritten. `tail`: the tail of `step` has not ended. `after`: the
functions that are called after `step` have not ended. The tuple is always replaced as a whole, so
no reader sees half of a change. It is a plain tuple and no class for speed, because it is created
three times in each step.
"""


class Gate:
    """
    The gate of one worker. It must be created on the training thread.

    `hook` has the adaptor's hooks.
    """

    def __init__(self, hook: pluggy.HookRelay) -> None:
        self._hook = hook
        self._clock = SystemClock()
        self._thread = threading.get_ident()
        self._mutex = threading.Lock()
        self._turn = threading.Condition(self._mutex)
        self._place: Place = (0, False, False, False, False)
        self._orders: deque[Execute] = deque()
        self._waits = False
        """True while the training thread waits to enter a window, or to call the functions after a
        step."""
        self._alone = False
        """True if the barrier before the update window failed, so that this rank does not know
        whether the other ranks can complete the step. The training thread then enters the window
        only after a decision of the controller."""
        self._inside = False
        self._lock = NEVER
        self._after_lock = NEVER
        """A step number: the functions that are called after this step, or after a later step, must
        wait."""
        self._leave_after = NEVER
        self.announce = False
        """True if the next step that is completed must be reported to the controller
        (`Trained`)."""
        self.abandoned = threading.Event()
        """Set when the training thread must stop waiting, for example for a transfer or for the
        disk, because it must take part in an incident."""

    # ---------------------------------------------------------------- on the training thread

    @property
    def completed(self) -> int:
        """
        The last step whose update is complete; 0 before the first.
        """
        return self._place[0]

    @property
    def aborted(self) -> bool:
        """
        True if the training thread is in the loop, and its collectives were aborted.
        """
        return self._inside and self.abandoned.is_set()

    def enter(self) -> None:
        """
        Record that the training thread enters the loop.
        """
        self.announce = self._inside = True

    def leave(self) -> None:
        """
        Record that the training thread has left the loop.
        """
        # also reset `_waits` and `_alone`: an exception may have interrupted the thread while it
        # waited at the gate
        self._inside = self._alone = self._waits = False

    def arrive(self) -> bool:
        """
        Ask to enter the update window of the next step. The all-reduces of that step are complete
        on this rank.

        Return True if the training thread may enter. If False is returned, the caller must call
        `wait`. The position shows the window as open in both cases.
        """
        with self._mutex:
            step, _, torn, _, _ = self._place
            self._place = (step, True, torn, False, False)
            self._waits = step >= self._lock
            return not self._waits

    def admits(self) -> bool:
        """
        Return True if the functions that are called after a step may start. If False is returned,
        the caller must call `wait`.

        A rank that must wait has the state of the end of that step. The rank does not call the
        functions yet, because other ranks might not take part in the collectives of these
        functions.
        """
        with self._mutex:
            self._waits = self._place[0] >= self._after_lock
            return not self._waits

    def stand(self) -> None:
        """
        Record that the barrier before the update window failed on this rank. The caller must call
        `wait` next.

        The all-reduces of the next step are complete on this rank. It is unknown whether they are
        complete on the other ranks, so the controller decides whether the ranks complete the step.
        """
        with self._mutex:
            self._alone = self._waits = True

    def wait(self, *, window: bool = True) -> Word | Execute:
        """
        Wait at an update window, or with `window` False before the functions that are called after
        a step.

        Return `in` (continue), `out` (leave the loop), or an order, whichever comes first. If it is
        an order, the caller carries it out and calls `wait` again.
        """
        with self._turn:
            while True:
                word = self._word(window=window)
                if word is not None:
                    self._alone = self._waits = False
                    step, _, torn, _, after = self._place
                    self._place = (step, window and word == "in", torn, False, after)
                    return word
                if self._orders:
                    return self._orders.popleft()
                self._turn.wait()

    def passed(self, step: int, *, tail: bool) -> None:
        """
        Record that the update of `step` is complete. `tail` is True if further code of the loop
        (the tail) belongs to the step, so that the step ends later.
        """
        self._place = (step, False, self._place[2], tail, False)

    @property
    def in_tail(self) -> bool:
        """
        Return True from the close of an update window until the end of that step.
        """
        return self._place[3]

    def ended(self, *, after: bool) -> None:
        """
        Record the end of the step whose window closed last. `after` is True if user functions are
        called next.
        """
        step, window, torn, _, _ = self._place
        self._place = (step, window, torn, False, after)

    def leaves(self, step: int) -> bool:
        """
        Return True if the loop must be left after this step.
        """
        return step >= self._leave_after

    def order(self) -> Execute:
        """
        Wait for the next order, and return it. Called on the training thread when it is outside the
        training loop.
        """
        with self._turn:
            while not self._orders:
                self._turn.wait()
            return self._orders.popleft()

    def tear(self) -> None:
        """
        Record that the state in memory is about to be overwritten, so that the rank has no complete
        state until `hold` is called.
        """
        step, window, _, tail, after = self._place
        self._place = (step, window, True, tail, after)

    def hold(self, step: int) -> None:
        """
        Record that the state in memory is complete: it is the state of the end of `step`.
        """
        self._place = (step, False, False, False, False)

    # ---------------------------------------------------------------- on any thread

    def position(self) -> Position:
        """
        Return the position of the training thread.
        """
        return _position(self._place)

    def held(self) -> int | None:
        """
        Return the step whose complete state is in memory, or None while the state is being changed.
        """
        return _held(self._place)

    def backups(self) -> tuple[int, ...]:
        """
        Return the steps of which the adaptor keeps a complete copy of the state (`--backup-every`).
        """
        return self._kept(self._place)

    # ---------------------------------------------------------------- on the control thread

    def lock(self) -> Locked:
        """
        Lock all further update windows: the training thread waits when it reaches the next window.
        Return the position of the training thread.
        """
        with self._mutex:
            place = self._place
            self._lock = self._after_lock = place[0]
            waiting = self._waits or not self._inside
        return Locked(
            at=self._clock.now(),
            position=_position(place),
            held=_held(place),
            backups=self._kept(place),
            waiting=waiting or self._waits_for_others(),
        )

    def whereabouts(self, rank: int, incarnation: int, inquiry: int) -> Whereabouts:
        """
        Return where the training thread stands: in the user's code, and in the process groups.
        Changes nothing.
        """
        with self._mutex:
            place = self._place
            waiting = self._waits or not self._inside
        line, stack = stack_of(self._thread)
        return Whereabouts(
            rank=rank,
            incarnation=incarnation,
            inquiry=inquiry,
            position=_position(place),
            waiting=waiting or self._waits_for_others(),
            line=line,
            stack=stack,
            groups=self._groups(),
            at=self._clock.now(),
        )

    def _groups(self) -> tuple[GroupStanding, ...]:
        try:
            return tuple(self._hook.tft_collectives() or ())
        except Exception:
            # the answer is for the log only: an error of the adaptor must not end the rank
            log.exception("collectives_unknown")
            return ()

    def hold_after(self, step: int) -> Located:
        """
        Allow the update windows up to the window of `step`. The training thread waits when it
        reaches the window of the next step.
        """
        with self._turn:
            self._lock, self._after_lock = (
                step,
                step + 1,
            )  # all ranks complete `step`, so the functions that are called after it may run
            self._turn.notify_all()
        return self.standing()

    def standing(self) -> Located:
        """
        Return the position of the training thread, and whether the thread waits at a locked update
        window.

        While the training thread waits at a locked window, its state is complete, although its
        position shows the window as open.
        """
        with self._mutex:
            place, still = self._place, self._still()
        return Located(
            at=self._clock.now(),
            position=_position(place),
            held=_held(place, still=still),
            backups=self._kept(place),
            still=still,
        )

    def unlock(self) -> Unlocked:
        """
        Unlock all update windows. The step that is completed next is reported to the controller.

        Returns the position that the training thread had before the windows were unlocked.
        """
        with self._turn:
            place, still = self._place, self._still()
            self.announce = self._inside
            self._lock = self._after_lock = NEVER
            self._turn.notify_all()
        return Unlocked(
            at=self._clock.now(),
            position=_position(place),
            held=_held(place, still=still),
            backups=self._kept(place),
        )

    def leave_after(self, step: int) -> Leaving:
        """
        Allow the update windows up to the window of `step`. The training thread leaves the loop
        when `step` has ended, tail included.
        """
        with self._turn:
            self._lock = self._after_lock = self._leave_after = step
            place = self._place
            self._turn.notify_all()
        return Leaving(at=self._clock.now(), position=_position(place))

    def execute(self, execute: Execute) -> None:
        """
        Pass an order to the training thread. The order to resume also unlocks all update windows.
        """
        self.abandoned.clear()
        with self._turn:
            if isinstance(execute.order, Resume):
                self._lock = self._after_lock = self._leave_after = NEVER
            self._orders.append(execute)
            self._turn.notify_all()

    def withdraw(self) -> Withdrawn | None:
        """
        Take back the order that was passed to the training thread. Return None if the thread has
        already begun to carry out the order.
        """
        with self._mutex:
            if not self._orders:
                return None
            self._orders.clear()
            return Withdrawn()

    def abort(self) -> None:
        """
        Interrupt the training thread if it waits in a collective, in a transfer, or while a process
        group is formed.
        """
        self.abandoned.set()
        self._hook.tft_quiesce()

    # ---------------------------------------------------------------- conclusions from the position

    def _word(self, *, window: bool = True) -> Word | None:
        step = self._place[0] + 1
        if not window:
            if step <= self._after_lock:
                return "in"
            return "out" if step > self._leave_after else None
        if self._alone and self._leave_after == NEVER:
            return None
        if step <= self._lock:
            return "in"
        return "out" if step > self._leave_after else None

    def _still(self) -> bool:
        # only a rank that waits at an update window counts as standing still: before the functions
        # that are called after a step, it still has these functions to run
        return self._waits and not self._place[4] and self._word() is None

    def _kept(self, place: Place) -> tuple[int, ...]:
        """
        Return the steps of which the adaptor keeps a valid copy of the state.

        A copy of a step later than the present step was made before a rollback, and is not valid.
        """
        kept: Sequence[int] = self._hook.tft_backups() or ()
        return tuple(step for step in kept if step <= place[0])

    def _waits_for_others(self) -> bool:
        frame: FrameType | None = sys._current_frames().get(self._thread)
        return frame is None or bool(self._hook.tft_waiting(frame=frame))


def _position(place: Place) -> Position:
    step, window, _, tail, after = place
    return Position(step=step, window=window, tail=tail, after=after)


def _held(place: Place, *, still: bool = False) -> int | None:
    """
    Return the step whose complete state is in memory, or None if the state is being changed.

    `still` means that the rank waits at a locked window. Its position then shows the window as
    open, but the rank has not changed the state yet.
    """
    step, window, torn, _, _ = place
    return None if torn or (window and not still) else step
