"""
The gate between the control thread and the training thread of a worker.

The gate knows which update windows the training thread may enter, which orders wait for it, and its
position. One lock protects all of this. So the position that the control thread reports is never
out of date: a rank that was let into a window is reported in that window.
"""

import sys
import threading
from collections import deque
from collections.abc import Sequence
from types import FrameType
from typing import Literal

import pluggy

from tft.clock import SystemClock
from tft.core.rank.protocol import (
    Execute,
    Leaving,
    Located,
    Locked,
    Unlocked,
    Withdrawn,
)
from tft.protocol.messages import Position, Resume

NEVER = sys.maxsize
"""A step that no job reaches. It stands for "no step": no window is locked, and the loop is not
left."""

Word = Literal["in", "out"]
"""The decision for a waiting training thread: `in` (go on) or `out` (leave the loop)."""


Place = tuple[int, bool, bool, bool, bool]
"""
The position of the training thread: (step, window, torn, tail, after).

`step` is the last step whose window has closed. The flags are True as long as: `window`, the window
of the next step is open; `torn`, the state is partly overwritten; `tail`, the tail of `step` has
not ended; `after`, the functions that are called after `step` have not all ended. The tuple is
always replaced as a whole, so no reader sees half of a change. It is a plain tuple for speed,
because it is made three times a step.
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
        """True if the pre-update barrier failed, so that it is unknown whether the other ranks have
        completed the all-reduces of the step. Then the training thread enters the window only if
        the controller decides so."""
        self._inside = False
        self._lock = NEVER
        self._after_lock = NEVER
        """The functions that are called after this step, and after later steps, must wait."""
        self._leave_after = NEVER
        self.announce = False
        """True if the next completed step must be reported."""
        self.abandoned = threading.Event()
        """Set when the training thread must give up the operation in which it waits."""

    # ---------------------------------------------------------------- on the training thread

    @property
    def completed(self) -> int:
        """
        The last step whose update is complete.
        """
        return self._place[0]

    def enter(self) -> None:
        """
        Record that the training thread enters the loop.
        """
        self.announce = self._inside = True

    def leave(self) -> None:
        """
        Record that the training thread has left the loop.
        """
        # reset `_waits` too: an exception may have ended a wait
        self._inside = self._alone = self._waits = False

    def arrive(self) -> bool:
        """
        Ask to enter the window of the next step, whose all-reduces are complete on this rank.

        Returns True if the training thread may enter. The window then counts as open. If False is
        returned, call `wait` next.
        """
        with self._mutex:
            step, _, torn, _, _ = self._place
            self._place = (step, True, torn, False, False)
            self._waits = step >= self._lock
            return not self._waits

    def admits(self) -> bool:
        """
        Return True if the functions that are called after a step may start. If False is returned,
        call `wait` next.

        A rank that must wait here has the state of the end of that step. It calls no function,
        because other ranks might not take part in the collectives of the function.
        """
        with self._mutex:
            self._waits = self._place[0] >= self._after_lock
            return not self._waits

    def stand(self) -> None:
        """
        Record that the pre-update barrier failed. Call `wait` next.

        The all-reduces of the next step are complete on this rank. Whether they are complete on the
        other ranks is unknown, so the controller decides whether the step is completed.
        """
        with self._mutex:
            self._alone = self._waits = True

    def wait(self, *, window: bool = True) -> Word | Execute:
        """
        Wait at an update window, or with `window` False before the functions that are called after
        a step.

        Returns `in` (continue), `out` (leave the loop), or an order, whichever comes first. The
        caller carries out an order and calls `wait` again.
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
        Record that the update of `step` is complete. `tail` is True if the step ends later, after a
        tail.
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
        Return whether the loop must be left after this step.
        """
        return step >= self._leave_after

    def order(self) -> Execute:
        """
        Wait for the next order while the thread is outside the loop, and return it.
        """
        with self._turn:
            while not self._orders:
                self._turn.wait()
            return self._orders.popleft()

    def tear(self) -> None:
        """
        Record that the state in memory is being overwritten, so that the rank has no complete
        state.
        """
        step, window, _, tail, after = self._place
        self._place = (step, window, True, tail, after)

    def hold(self, step: int) -> None:
        """
        Record that the state in memory is complete, and is that of the end of `step`.
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
        Return the step whose complete state is in memory, or None if the state is not complete.
        """
        return _held(self._place)

    def backups(self) -> tuple[int, ...]:
        """
        Return the steps of which the adaptor keeps a whole copy.
        """
        return self._kept(self._place)

    # ---------------------------------------------------------------- on the control thread

    def lock(self) -> Locked:
        """
        Lock all further windows: the training thread waits when it reaches the next one.
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

    def hold_after(self, step: int) -> Located:
        """
        Allow the windows up to `step`. The training thread waits at the window after that.
        """
        with self._turn:
            self._lock, self._after_lock = (
                step,
                step + 1,
            )  # functions after `step` may run: all ranks take part in them
            self._turn.notify_all()
        return self.standing()

    def standing(self) -> Located:
        """
        Return the position of the training thread, and whether the thread waits at a window that it
        may not enter. A thread that waits there has complete state.
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
        Open all windows. The next completed step is reported to the controller.

        Returns the position that the training thread had before.
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
        Allow the windows up to `step`. The loop is left when that step has ended.
        """
        with self._turn:
            self._lock = self._after_lock = self._leave_after = step
            place = self._place
            self._turn.notify_all()
        return Leaving(at=self._clock.now(), position=_position(place))

    def execute(self, execute: Execute) -> None:
        """
        Pass an order to the training thread.
        """
        self.abandoned.clear()
        with self._turn:
            if isinstance(execute.order, Resume):
                self._lock = self._after_lock = self._leave_after = NEVER
            self._orders.append(execute)
            self._turn.notify_all()

    def withdraw(self) -> Withdrawn | None:
        """
        Take back an order that the training thread has not begun. Return None if the thread has
        begun it.
        """
        with self._mutex:
            if not self._orders:
                return None
            self._orders.clear()
            return Withdrawn()

    def abort(self) -> None:
        """
        Interrupt the training thread in a collective, a transfer or the forming of a group.
        """
        self.abandoned.set()
        self._hook.tft_quiesce()

    # ---------------------------------------------------------------- what the position means

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
        # `_place[4]`: the functions after a step are still to be called, so the thread will go on
        return self._waits and not self._place[4] and self._word() is None

    def _kept(self, place: Place) -> tuple[int, ...]:
        """
        Return the steps of the adaptor's valid copies.

        A copy of a step later than the present one was made before a rollback, and is not valid.
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
    Return the step whose complete state is in memory, or None if the state is not complete.

    With `still`, the rank waits at a window. Its position then shows the window as open, but the
    rank has not changed the state yet.
    """
    step, window, torn, _, _ = place
    return None if torn or (window and not still) else step
