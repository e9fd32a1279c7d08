"""
The gate: who is let into an update window, and that what is told of it is what happens.
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
    An adaptor without copies, whose training thread is in no collective.
    """

    @hookimpl
    def tft_backups(self) -> Sequence[int]:
        return ()

    @hookimpl
    def tft_waiting(self, frame: FrameType) -> bool:
        return False


def training(step: int) -> Gate:
    """
    The training thread is in its loop and has done `step`.
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
    It stands before the window of the step after `step`.
    """
    gate = training(step)
    gate.lock()
    assert not gate.arrive()
    return gate


@contextmanager
def turns(gate: Gate, windows: int) -> Iterator[None]:
    """
    Another thread goes through so many windows meanwhile, and hands over as often as it can.
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


def test_who_was_let_into_a_window_is_in_it_whatever_comes_next() -> None:
    """
    When a hold lets the training thread into its window and a freeze follows before it has moved,
    then it goes in all the same, and is told to be there: it neither waits nor leaves the loop
    with its all-reduces complete while others do the step.
    """
    gate = held(10)
    gate.hold_after(12)
    word = gate.wait()
    locked = gate.lock()
    assert word == "in"
    assert (locked.position, locked.held) == (Position(step=10, window=True), None)
    assert not gate.standing().still
    gate.passed(11, tail=False)
    assert not gate.leaves(11)
    assert not gate.arrive()  # held by the freeze, one window later


def test_a_freeze_before_it_was_let_in_keeps_it_where_it_stands() -> None:
    """
    When a hold would have let the training thread in and a freeze comes before it has taken
    notice, then it stands still; and what is told when it is let out of the loop is that it did
    not begin.
    """
    gate = held(10)
    gate.hold_after(12)
    gate.lock()
    standing = gate.standing()
    assert (standing.still, standing.held) == (True, 10)
    gate.leave_after(10)
    assert gate.wait() == "out"
    assert gate.position() == Position(step=10, window=False)
    assert gate.held() == 10


def test_a_step_that_is_to_be_finished_is_entered_before_the_loop_is_left() -> None:
    """
    When a rank before a window is to leave after that step, then it is let in, and leaves at the
    end of it.
    """
    gate = held(10)
    assert gate.leave_after(11).position == Position(step=10, window=True)
    assert gate.wait() == "in"
    gate.passed(11, tail=False)
    assert gate.leaves(11)


def test_a_pause_lets_what_is_called_after_its_step_be_called() -> None:
    """
    When all are to stand still after a step, and functions are called after it, then these are called: a freeze before
    that keeps the training thread out of them, and it does not count as standing still until it is before the next window.
    """
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


def test_who_is_to_leave_calls_nothing_after_its_step() -> None:
    """
    When the loop is to be left after a step after which functions are called, then none is called.
    """
    gate = training(12)
    gate.lock()
    gate.ended(after=True)
    assert not gate.admits()
    gate.leave_after(12)
    assert gate.wait(window=False) == "out"
    assert gate.position() == Position(step=12, window=False, after=True)


def test_no_half_of_a_move_is_told() -> None:
    """
    When positions are asked for while windows open and close as fast as they can, then none is
    told that lies before an earlier one, and what is held goes with where it stands.
    """
    gate = training(0)
    told = []
    with turns(gate, 20_000):
        while gate.completed < 20_000:
            told.append(gate.standing())
    places = [(one.position.step, one.position.window) for one in told]
    assert places == sorted(places)
    for one in told:
        assert one.held == (None if one.position.window else one.position.step)


def test_windows_pass_only_as_far_as_the_lock_that_was_told() -> None:
    """
    When a freeze comes while windows open and close, then the window after the one that was told
    is not entered.
    """
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


def test_an_order_that_was_not_begun_is_taken_back() -> None:
    """
    When a check was handed over and its round is over before the training thread has seen it,
    then it is not run, neither before the window nor out of the loop later; one that was begun
    cannot be taken back.
    """
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


def test_a_rank_that_runs_a_check_stands_still() -> None:
    """
    When the training thread carries out an order from where it stands, then it counts as standing
    there with its state whole, and as waiting for the others.
    """
    gate = held(10)
    gate.execute(CHECK)
    assert gate.wait() == CHECK
    standing = gate.standing()
    assert (standing.still, standing.held) == (True, 10)
    assert gate.lock().waiting


def test_who_is_in_a_window_does_not_wait_for_others() -> None:
    """
    When all stand still and somebody asks who waits, then a rank before its window does, and so
    does one out of the loop; one that is in its window hangs there by itself.
    """
    assert held(10).lock().waiting
    inside = training(10)
    assert inside.arrive()
    assert not inside.lock().waiting
    inside.leave()
    assert inside.lock().waiting


def test_the_step_after_a_release_is_announced_by_who_trains() -> None:
    """
    When windows open again, then where the training thread stood is told, and the step that comes
    next is announced, but not by a rank whose training is over.
    """
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


def test_a_torn_state_is_not_held_wherever_the_rank_stands() -> None:
    """
    When a state is being overwritten, then nothing is held until it is whole again.
    """
    gate = training(10)
    gate.tear()
    assert (gate.held(), gate.standing().held) == (None, None)
    gate.hold(9)
    assert (gate.held(), gate.position()) == (9, Position(step=9, window=False))


def test_who_does_not_know_of_the_others_waits_though_nothing_is_locked() -> None:
    """
    When the all-reduces of the training thread are complete and whether others' are is not known, then it stands
    before its window, having begun nothing, until it is told how far those who know have come.
    """
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


def test_a_step_that_nobody_has_begun_is_left() -> None:
    """
    When nobody has begun the step that the training thread stands before, then it is told to leave, and
    the next time it is in the loop it enters windows as ever.
    """
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


def test_who_stood_alone_when_its_loop_ended_is_let_in_the_next_time() -> None:
    """
    When an exception has ended the waiting, then the next window is entered as ever.
    """
    gate = training(10)
    gate.stand()
    gate.leave()
    gate.enter()
    assert gate.arrive()
    gate.lock()
    gate.passed(11, tail=False)
    assert not gate.arrive()
