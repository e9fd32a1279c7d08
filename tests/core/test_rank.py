"""
The rank machine: what one worker makes of its orders.
"""

from tft.core.rank import (
    AGAIN,
    Abort,
    Answer,
    Done,
    Execute,
    LeaveAfter,
    Leaving,
    Left,
    Lock,
    Locked,
    Ordered,
    RankCommand,
    RankMachine,
    Woken,
)
from tft.protocol.messages import (
    End,
    Freeze,
    OrderName,
    Position,
    RankOrder,
    Regroup,
    Resume,
    Stop,
)


def key(incident: int = 1, round: int = 1, epoch: int = 1) -> dict[str, int]:
    """
    What every order carries.
    """
    return {"epoch": epoch, "incident": incident, "round": round}


def freeze(**which: int) -> Freeze:
    """
    A freeze for rank 0.
    """
    return Freeze(**key(**which), to=(0,), cause="a test")


def stop(finish: int, **which: int) -> Stop:
    """
    A stop for rank 0 with one second of grace.
    """
    return Stop(**key(**which), to=(0,), finish=finish, grace=1.0)


def regroup(**which: int) -> Regroup:
    """
    A regroup for rank 0.
    """
    return Regroup(**key(**which), to=(0,), step=4, name="g", host="h", port=1)


def order(machine: RankMachine, name: OrderName, what: RankOrder, at: float) -> list[RankCommand]:
    """
    An order is heard.
    """
    return machine.handle(Ordered(at=at, name=name, order=what))


def done(machine: RankMachine, name: OrderName, what: RankOrder, at: float) -> list[RankCommand]:
    """
    The training thread has carried an order out.
    """
    position = Position(step=3, window=False)
    return machine.handle(
        Done(
            order=what,
            name=name,
            failure=None,
            position=position,
            held=3,
            files=(),
            began=at,
            at=at,
        )
    )


def training() -> RankMachine:
    """
    A rank that is in the loop at step 4.
    """
    machine = RankMachine(rank=0, incarnation=0)
    resume = Resume(**key(incident=0, round=0), to=(0,), step=1)
    assert order(machine, "resume", resume, 0.0) == [Execute(name="resume", order=resume)]
    done(machine, "resume", resume, 0.0)
    return machine


def names(commands: list[RankCommand]) -> list[str]:
    """
    The kinds of some commands.
    """
    return [type(command).__name__ for command in commands]


def frozen(machine: RankMachine, *, window: bool) -> list[RankCommand]:
    """
    The rank is frozen where it stands.
    """
    assert order(machine, "freeze", freeze(), 1.0) == [Lock()]
    position = Position(step=3, window=window)
    return machine.handle(
        Locked(at=1.0, position=position, held=None if window else 3, waiting=True)
    )


def test_a_freeze_is_answered_at_once_with_the_position_after_the_lock() -> None:
    """
    When a freeze comes, the lock is set first and what is answered is what was read after it.
    """
    (answer,) = frozen(training(), window=True)
    assert isinstance(answer, Answer)
    assert answer.answer.position == Position(step=3, window=True)
    assert answer.answer.held is None


def test_a_step_that_nobody_can_finish_is_aborted_at_once() -> None:
    """
    When the step to finish is done already, then what the rank computes now is void: it is
    brought out without waiting.
    """
    machine = training()
    frozen(machine, window=False)
    assert order(machine, "stop", stop(3), 2.0) == [LeaveAfter(step=3)]
    leaving = Leaving(at=2.0, position=Position(step=3, window=False))
    assert machine.handle(leaving) == [Abort()]


def test_a_step_that_others_have_begun_to_apply_may_be_finished() -> None:
    """
    When the step to finish is the one this rank is in, then it gets its grace, and is brought
    out only when that has passed.
    """
    machine = training()
    frozen(machine, window=False)
    order(machine, "stop", stop(4), 2.0)
    assert machine.handle(Leaving(at=2.0, position=Position(step=3, window=False))) == []
    assert machine.next_deadline() == 3.0
    assert machine.handle(Woken(at=2.9)) == []
    assert machine.handle(Woken(at=3.0)) == [Abort()]


def test_an_abort_is_repeated_until_the_training_thread_is_out() -> None:
    """
    When an abort came just too early to find the collective, then the next one finds it.
    """
    machine = training()
    frozen(machine, window=False)
    order(machine, "stop", stop(3), 2.0)
    machine.handle(Leaving(at=2.0, position=Position(step=3, window=False)))
    assert machine.next_deadline() == 2.0 + AGAIN
    assert machine.handle(Woken(at=2.0 + AGAIN)) == [Abort()]
    assert names(machine.handle(Left(at=2.1))) == ["Execute"]
    assert machine.next_deadline() is None


def test_the_clearing_is_answered_when_the_training_thread_has_done_it() -> None:
    """
    When the loop is left, the training thread clears, and only then is the stop answered.
    """
    machine = training()
    frozen(machine, window=False)
    order(machine, "stop", stop(3), 2.0)
    (execute,) = machine.handle(Left(at=2.1))
    assert execute == Execute(name="stop", order=stop(3))
    (answer,) = done(machine, "stop", stop(3), 2.2)
    assert isinstance(answer, Answer)
    assert (answer.answer.order, answer.answer.began, answer.answer.at) == ("stop", 2.0, 2.2)


def test_an_order_heard_twice_is_carried_out_once_and_answered_twice() -> None:
    """
    When an order is repeated, then it is absorbed while it is under way, and answered with the
    stored answer afterwards.
    """
    machine = RankMachine(rank=0, incarnation=0)
    assert names(order(machine, "regroup", regroup(), 1.0)) == ["Execute"]
    assert order(machine, "regroup", regroup(), 1.1) == []
    first = done(machine, "regroup", regroup(), 1.2)
    assert order(machine, "regroup", regroup(), 1.3) == first


def test_a_newer_round_makes_what_is_under_way_void() -> None:
    """
    When a freeze of a newer round comes while groups are formed, then that is aborted, its
    answer is not given, and the new round's stop comes next.
    """
    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "regroup", regroup(), 1.0)
    assert order(machine, "freeze", freeze(round=2), 1.1) == [Abort(), Lock()]
    order(machine, "stop", stop(3, round=2), 1.2)
    commands = done(machine, "regroup", regroup(), 1.3)
    assert commands == [Execute(name="stop", order=stop(3, round=2))]


def test_orders_of_an_older_round_or_epoch_are_absorbed() -> None:
    """
    When something of a round that is over comes late, or a deposed controller still speaks,
    then nothing happens.
    """
    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "freeze", freeze(round=3, epoch=2), 1.0)
    assert order(machine, "regroup", regroup(round=2, epoch=2), 1.1) == []
    assert order(machine, "freeze", freeze(round=4, epoch=1), 1.2) == []


def test_a_new_controller_asking_the_same_gets_the_stored_answer() -> None:
    """
    When a controller takes over and repeats an order under its own epoch, then the work is not
    done a second time.
    """
    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "regroup", regroup(), 1.0)
    first = done(machine, "regroup", regroup(), 1.2)
    assert order(machine, "regroup", regroup(epoch=2), 1.3) == first


def test_orders_wait_for_one_another_on_the_training_thread() -> None:
    """
    When two orders come at once, then the second is begun when the first is done.
    """
    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "regroup", regroup(), 1.0)
    resume = Resume(**key(), to=(0,), step=4)
    assert order(machine, "resume", resume, 1.0) == []
    assert names(done(machine, "regroup", regroup(), 1.1)) == ["Answer", "Execute"]


def test_the_end_of_the_job_brings_a_rank_out_of_its_loop() -> None:
    """
    When the job ends while this rank trains, then it is brought out and the end is carried out.
    """
    machine = training()
    end = End(**key(), to=(0,), code=3, why="a test")
    assert order(machine, "end", end, 2.0) == [LeaveAfter(step=0), Abort()]
    assert machine.handle(Left(at=2.1)) == [Execute(name="end", order=end)]
