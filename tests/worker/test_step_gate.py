"""
The step gate, which lets the training thread into an update window or holds it back.

The tests check that the reported position is the true one.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import pluggy

from tft.core.rank.protocol import Execute, Withdrawn
from tft.plugins import add
from tft.protocol.messages import Check, Position, Resume
from tft.spi.adaptor import AdaptorSpecs
from tft.spi.markers import hookimpl
from tft.worker.step_gate import Gate

CHECK = Execute(name="check", order=Check(epoch=1, incident=1, round=1, to=(0,), name="lamps"))
RESUME = Execute(name="resume", order=Resume(epoch=1, incident=1, round=2, to=(0,), step=11))


class Nothing:
    """
    An adaptor without backup copies, whose training thread is never in a collective.
    """

    @hookimpl
    def tft_backups(self) -> Sequence[int]:
        return ()

    @hookimpl
    def tft_waiting(self, frame: FrameType) -> bool:
        return False


def training(step: int) -> Gate:
    """
    Return the gate of a training thread that is in its loop and has completed `step`.
    """
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(AdaptorSpecs)
    add(manager, Nothing(), "nothing")
    gate = Gate(manager.hook)
    gate.hold(step)
    gate.enter()
    return gate


def held(step: int) -> Gate:
    """
    Return the gate of a training thread that is stopped before the window of the step after `step`.
    """
    gate = training(step)
    gate.lock()
    assert not gate.arrive()
    return gate


@contextmanager
def turns(gate: Gate, windows: int) -> Iterator[None]:
    """
    Pass `windows` update windows on another thread during the `with` block.

    The interpreter switches between threads as often as possible.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def train() -> None:
        for _ in range(windows):
            assert gate.arrive()
            gate.passed(gate.completed + 1, tail=False)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        sys.setswitchinterval(before)


def test_rank_that_was_admitted_to_a_window_completes_it() -> None:
    """When a hold admits the training thread to its window and a freeze follows at once, then the
    thread enters the window and its position says so. It stops only before the next window."""
    gate = held(10)
    gate.hold_after(12)
    word = gate.wait()
    locked = gate.lock()
    assert word == "in"
    assert (locked.position, locked.held) == (Position(step=10, window=True), None)
    assert not gate.standing().still
    gate.passed(11, tail=False)
    assert not gate.leaves(11)
    assert not gate.arrive()  # the freeze holds the rank before its next window


def test_freeze_before_admission_keeps_the_rank_before_its_window() -> None:
    """When a hold would admit the training thread and a freeze comes before the thread has noticed,
    then the thread stands still. When it leaves the loop, its position says that it did not begin
    the step."""
    gate = held(10)
    gate.hold_after(12)
    gate.lock()
    standing = gate.standing()
    assert (standing.still, standing.held) == (True, 10)
    gate.leave_after(10)
    assert gate.wait() == "out"
    assert gate.position() == Position(step=10, window=False)
    assert gate.held() == 10


def test_rank_finishes_the_ordered_step_before_it_leaves_the_loop() -> None:
    """When a rank before a window is ordered to leave after that step, then it enters the window
    and leaves at the end of the step."""
    gate = held(10)
    assert gate.leave_after(11).position == Position(step=10, window=True)
    assert gate.wait() == "in"
    gate.passed(11, tail=False)
    assert gate.leaves(11)


def test_pause_lets_the_functions_after_its_step_run() -> None:
    """When a freeze comes, then the functions after the step do not start. When a hold then lets
    the ranks stand still after this step, then the functions run, and the thread stands still
    before the next window."""
    gate = training(12)
    gate.lock()
    gate.ended(after=True)
    assert not gate.admits()
    assert not gate.standing().still
    gate.hold_after(12)
    assert gate.wait(window=False) == "in"
    gate.ended(after=False)
    assert not gate.arrive()
    assert gate.standing().still


def test_functions_after_a_step_are_not_called_when_the_rank_leaves() -> None:
    """When the rank is to leave the loop after a step, then the functions after this step are not
    called."""
    gate = training(12)
    gate.lock()
    gate.ended(after=True)
    assert not gate.admits()
    gate.leave_after(12)
    assert gate.wait(window=False) == "out"
    assert gate.position() == Position(step=12, window=False, after=True)


def test_reported_position_and_held_step_are_consistent() -> None:
    """When positions are read while windows open and close very fast, then no position is before an
    earlier one. The held step always matches the position."""
    gate = training(0)
    told = []
    with turns(gate, 20_000):
        while gate.completed < 20_000:
            told.append(gate.standing())
    places = [(one.position.step, one.position.window) for one in told]
    assert places == sorted(places)
    for one in told:
        assert one.held == (None if one.position.window else one.position.step)


def test_no_window_is_entered_after_the_position_of_the_freeze() -> None:
    """When a freeze comes while windows open and close, then no window after the reported position
    is entered."""
    for _ in range(50):
        gate = training(0)
        refused = threading.Event()

        def train(gate: Gate = gate, refused: threading.Event = refused) -> None:
            while gate.arrive():
                gate.passed(gate.completed + 1, tail=False)
            refused.set()

        threading.Thread(target=train, daemon=True).start()
        told = gate.lock().position
        assert refused.wait(10.0)
        assert gate.position() == Position(step=told.step + told.window, window=True)


def test_check_that_has_not_begun_can_be_withdrawn() -> None:
    """When the round of a check is over before the training thread has begun it, then the check
    never runs. A check that has begun cannot be withdrawn."""
    gate = held(10)
    gate.execute(CHECK)
    assert gate.withdraw() == Withdrawn()
    gate.unlock()
    assert gate.wait() == "in"
    gate.execute(RESUME)
    assert gate.order() == RESUME

    begun = held(10)
    begun.execute(CHECK)
    assert begun.wait() == CHECK
    assert begun.withdraw() is None
    begun.unlock()
    assert begun.wait() == "in"


def test_rank_that_runs_a_check_counts_as_standing_still() -> None:
    """When the training thread runs a check before its window, then the rank counts as standing
    still with its complete state, and as waiting for the others."""
    gate = held(10)
    gate.execute(CHECK)
    assert gate.wait() == CHECK
    standing = gate.standing()
    assert (standing.still, standing.held) == (True, 10)
    assert gate.lock().waiting


def test_rank_in_a_window_does_not_count_as_waiting() -> None:
    """When the gate is locked, then a rank before its window or out of the loop counts as waiting
    for the others. A rank in its window does not."""
    assert held(10).lock().waiting
    inside = training(10)
    assert inside.arrive()
    assert not inside.lock().waiting
    inside.leave()
    assert inside.lock().waiting


def test_next_step_after_a_release_is_announced_by_training_ranks() -> None:
    """When windows open again, then the position of the training thread is reported and the next
    step is announced. A rank whose training is over announces nothing."""
    gate = held(10)
    gate.announce = False
    unlocked = gate.unlock()
    assert (unlocked.position, unlocked.held) == (Position(step=10, window=True), 10)
    assert gate.announce

    over = training(10)
    over.leave()
    over.announce = False
    over.unlock()
    assert not over.announce


def test_partly_overwritten_state_is_not_held() -> None:
    """When a state is being overwritten, then the rank holds no step until the state is complete
    again."""
    gate = training(10)
    gate.tear()
    assert (gate.held(), gate.standing().held) == (None, None)
    gate.hold(9)
    assert (gate.held(), gate.position()) == (9, Position(step=9, window=False))


def test_rank_waits_before_its_window_while_the_others_are_unknown() -> None:
    """When the all-reduces of a rank are complete but the progress of the other ranks is unknown,
    then the rank waits before its window. It begins the step only after an order to finish it."""
    gate = training(10)
    gate.stand()
    standing = gate.standing()
    assert (standing.still, standing.held) == (True, 10)
    assert standing.position == Position(step=10, window=False)
    locked = gate.lock()
    assert (locked.waiting, locked.position.window) == (True, False)
    assert gate.standing().still
    gate.leave_after(11)
    assert gate.wait() == "in"
    assert gate.position() == Position(step=10, window=True)
    gate.passed(11, tail=False)
    assert gate.leaves(11)


def test_rank_leaves_the_loop_before_a_step_that_no_rank_has_begun() -> None:
    """When no rank has begun the step before which the training thread waits, then the thread
    leaves the loop. After it enters the loop again, it can enter windows as before."""
    gate = training(10)
    gate.stand()
    gate.lock()
    gate.leave_after(10)
    assert gate.wait() == "out"
    assert gate.position() == Position(step=10, window=False)
    gate.leave()
    gate.execute(RESUME)
    gate.enter()
    assert gate.arrive()


def test_window_is_open_again_after_an_exception_ended_the_wait() -> None:
    """When an exception has ended the wait before a window, then the next window is open as before."""
    gate = training(10)
    gate.stand()
    gate.leave()
    gate.enter()
    assert gate.arrive()
    gate.lock()
    gate.passed(11, tail=False)
    assert not gate.arrive()
