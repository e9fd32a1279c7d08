"""
The gate between the two threads of a worker: which update windows the training thread may enter,
what it is told to do meanwhile, and where it stands.

All of that is under one lock. So what the control thread tells the others is what the training
thread acts on: whoever was let into a window is in it, whatever comes a moment later.
"""

import sys
import threading
from collections import deque
from collections.abc import Sequence
from types import FrameType
from typing import Literal

import pluggy

from tft.clock import SystemClock
from tft.core.rank_protocol import (
    Execute,
    Leaving,
    Locked,
    Standing,
    Unlocked,
    Withdrawn,
)
from tft.protocol.messages import Position, Resume

NEVER = sys.maxsize
"""A step no job reaches: no lock, no leaving."""

Word = Literal["in", "out"]
"""Into the window, or out of the loop."""


Place = tuple[int, bool, bool, bool, bool]
"""Where the training thread stands: the last step whose window has closed, whether the window of the next one is
open, whether the state was overwritten in part, whether the tail of that last step has not ended, whether what is called
after it is not over. Published as one, so that nobody is told half of a move; a bare tuple, since it is made three
times a step."""


class Gate:
    """
    Of one worker; made on its training thread. `hook` is the adaptor's.
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
        """The training thread stands before a window, and was not let in yet."""
        self._alone = False
        """Whether the others have come as far is not known: it does not enter unasked."""
        self._inside = False
        self._lock = NEVER
        self._after_lock = NEVER
        """What is called after this step and later ones waits."""
        self._leave_after = NEVER
        self.announce = False
        """The step that is completed next is to be reported."""
        self.abandoned = threading.Event()
        """What the training thread hangs in has become void."""

    # ---------------------------------------------------------------- on the training thread

    @property
    def completed(self) -> int:
        """
        The last step whose update is whole.
        """
        return self._place[0]

    def enter(self) -> None:
        """
        The training thread enters the loop.
        """
        self.announce = self._inside = True

    def leave(self) -> None:
        """
        It has left the loop.
        """
        # an exception may have ended the waiting
        self._inside = self._alone = self._waits = False

    def arrive(self) -> bool:
        """
        The all-reduces of the next step are complete. True when its window may be entered; it counts as
        entered then. Else: `wait`.
        """
        with self._mutex:
            step, _, torn, _, _ = self._place
            self._place = (step, True, torn, False, False)
            self._waits = step >= self._lock
            return not self._waits

    def admits(self) -> bool:
        """
        Whether what is called after the last step may be begun; else `wait`. Who is held back there has the state of
        the end of that step, and calls nothing that others would not take part in.
        """
        with self._mutex:
            self._waits = self._place[0] >= self._after_lock
            return not self._waits

    def stand(self) -> None:
        """
        The all-reduces of the next step are complete, and whether they are so elsewhere is not known: `wait`,
        until those who know say whether it is to be completed.
        """
        with self._mutex:
            self._alone = self._waits = True

    def wait(self, *, window: bool = True) -> Word | Execute:
        """
        Waits before the window, or before what is called after a step, for what comes first: the word to enter it, the
        word to leave the loop, or an order to be carried out from here, after which the waiting goes on.
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
        The update of `step` is whole; with `tail` the step ends later.
        """
        self._place = (step, False, self._place[2], tail, False)

    @property
    def in_tail(self) -> bool:
        """
        Whether the window of a step has closed that has not ended.
        """
        return self._place[3]

    def ended(self, *, after: bool) -> None:
        """
        The step whose window has closed last has ended; with `after` functions are to be called after it.
        """
        step, window, torn, _, _ = self._place
        self._place = (step, window, torn, False, after)

    def leaves(self, step: int) -> bool:
        """
        Whether the loop is to be left after this step.
        """
        return step >= self._leave_after

    def order(self) -> Execute:
        """
        Waits for the next order, out of the loop.
        """
        with self._turn:
            while not self._orders:
                self._turn.wait()
            return self._orders.popleft()

    def tear(self) -> None:
        """
        From now on the state is overwritten.
        """
        step, window, _, tail, after = self._place
        self._place = (step, window, True, tail, after)

    def hold(self, step: int) -> None:
        """
        The state is that of the end of `step`, and whole.
        """
        self._place = (step, False, False, False, False)

    # ---------------------------------------------------------------- on any thread

    def position(self) -> Position:
        """
        Where the training thread stands.
        """
        return _position(self._place)

    def held(self) -> int | None:
        """
        The step whose whole state is in memory; None while it is torn.
        """
        return _held(self._place)

    def backups(self) -> tuple[int, ...]:
        """
        The steps of which the adaptor keeps a whole copy.
        """
        return self._kept(self._place)

    # ---------------------------------------------------------------- on the control thread

    def lock(self) -> Locked:
        """
        No further window opens: whoever reaches one waits there.
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

    def hold_after(self, step: int) -> Standing:
        """
        Windows up to `step` may still be passed; whoever reaches the next one waits there.
        """
        with self._turn:
            self._lock, self._after_lock = (
                step,
                step + 1,
            )  # in what is called after it all take part
            self._turn.notify_all()
        return self.standing()

    def standing(self) -> Standing:
        """
        Where the training thread stands, and whether it waits there to be let into a window. Its
        state is whole while it does.
        """
        with self._mutex:
            place, still = self._place, self._still()
        return Standing(
            at=self._clock.now(),
            position=_position(place),
            held=_held(place, still=still),
            backups=self._kept(place),
            still=still,
        )

    def unlock(self) -> Unlocked:
        """
        Every window may be passed; the next step is announced. Says where the training thread
        stood.
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
        Windows up to `step` may still be passed; when that step has ended, the loop is left.
        """
        with self._turn:
            self._lock = self._after_lock = self._leave_after = step
            place = self._place
            self._turn.notify_all()
        return Leaving(at=self._clock.now(), position=_position(place))

    def execute(self, execute: Execute) -> None:
        """
        Hands an order to the training thread.
        """
        self.abandoned.clear()
        with self._turn:
            if isinstance(execute.order, Resume):
                self._lock = self._after_lock = self._leave_after = NEVER
            self._orders.append(execute)
            self._turn.notify_all()

    def withdraw(self) -> Withdrawn | None:
        """
        Takes back an order that the training thread has not begun; None when it has.
        """
        with self._mutex:
            if not self._orders:
                return None
            self._orders.clear()
            return Withdrawn()

    def abort(self) -> None:
        """
        Brings the training thread out of a collective, a transfer, the forming of a group.
        """
        self.abandoned.set()
        self._hook.tft_quiesce()

    # ---------------------------------------------------------------- what follows from it

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
        # who waits before what is called after a step does not stand: that is still to come
        return self._waits and not self._place[4] and self._word() is None

    def _kept(self, place: Place) -> tuple[int, ...]:
        """
        A copy of a later step than the present was kept before a rollback, and is void.
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
    The step whose whole state is in memory. Who stands still before a window has marked it, but
    changed nothing yet.
    """
    step, window, torn, _, _ = place
    return None if torn or (window and not still) else step
