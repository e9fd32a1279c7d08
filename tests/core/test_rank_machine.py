"""
The rank machine: how one worker carries out its orders.
"""

from dataclasses import (
    asdict,
)
from typing import (
    TypedDict,
)

import pytest

from tft.core.rank.machine import (
    AGAIN,
    RankMachine,
)
from tft.core.rank.protocol import (
    Abort,
    Answer,
    Done,
    Execute,
    HoldAfter,
    LeaveAfter,
    Leaving,
    Left,
    Located,
    Lock,
    Locked,
    Ordered,
    RankCommand,
    Unlock,
    Unlocked,
    Withdraw,
    Withdrawn,
    Woken,
)
from tft.core.rank.transitions import (
    Stage,
)
from tft.protocol.messages import (
    Answered,
    Check,
    Compare,
    End,
    Freeze,
    Hold,
    OrderName,
    Position,
    RankOrder,
    Rebuild,
    Regroup,
    Release,
    Resume,
    SavedFile,
    Stop,
)


class Key(TypedDict):
    """
    The fields that all orders share.
    """

    epoch: int
    incident: int
    round: int


def key(incident: int = 1, round: int = 1, epoch: int = 1) -> Key:
    """
    Return the fields that all orders share. The default is the first round of the first incident.
    """
    return Key(epoch=epoch, incident=incident, round=round)


def freeze(**which: int) -> Freeze:
    """
    Return an order to freeze for rank 0.
    """
    return Freeze(**key(**which), to=(0,), cause="a test")


def stop(finish: int, **which: int) -> Stop:
    """
    Return an order to stop for rank 0 with one second of grace. `finish` is the last step that the
    rank may finish.
    """
    return Stop(**key(**which), to=(0,), finish=finish, grace=1.0)


def regroup(**which: int) -> Regroup:
    """
    Return an order to form process groups for rank 0.
    """
    return Regroup(**key(**which), to=(0,), step=4, name="g", host="h", port=1)


def order(machine: RankMachine, name: OrderName, what: RankOrder, at: float) -> list[RankCommand]:
    """
    Let the machine receive an order, and return its commands.
    """
    return machine.handle(Ordered(at=at, name=name, order=what))


def done(
    machine: RankMachine,
    name: OrderName,
    what: RankOrder,
    at: float,
    *,
    failure: str | None = None,
) -> list[RankCommand]:
    """
    Tell the machine that the training thread has carried out an order, and return its commands.

    `failure` is the reason if the order could not be carried out.
    """
    position = Position(step=3, window=False)
    return machine.handle(
        Done(
            order=what,
            name=name,
            failure=failure,
            position=position,
            held=3,
            files=(),
            began=at,
            at=at,
        )
    )


def training() -> RankMachine:
    """
    Return the machine of a rank that is in its loop at step 4.
    """
    machine = RankMachine(rank=0, incarnation=0)
    resume = Resume(**key(incident=0, round=0), to=(0,), step=1)
    assert order(machine, "resume", resume, 0.0) == [Execute(name="resume", order=resume)]
    done(machine, "resume", resume, 0.0)
    return machine


def names(commands: list[RankCommand]) -> list[str]:
    """
    Return the class names of the commands.
    """
    return [type(command).__name__ for command in commands]


def frozen(machine: RankMachine, *, window: bool) -> list[RankCommand]:
    """
    Freeze the rank, and return the machine's commands. `window` says whether it is in its update
    window.
    """
    assert order(machine, "freeze", freeze(), 1.0) == [Lock()]
    position = Position(step=3, window=window)
    return machine.handle(
        Locked(at=1.0, position=position, held=None if window else 3, waiting=True)
    )


def test_freeze_is_answered_with_the_position_read_after_the_lock() -> None:
    """When a freeze arrives, then the rank sets the lock first, and its answer contains the
    position that it read after the lock."""
    (answer,) = frozen(training(), window=True)
    assert isinstance(answer, Answer)
    assert answer.answer.position == Position(step=3, window=True)
    assert answer.answer.held is None


def test_step_after_the_last_step_to_finish_is_aborted_at_once() -> None:
    """When a stop arrives and its last step to finish is already complete, then the current work of
    the rank is aborted without a wait."""
    machine = training()
    frozen(machine, window=False)
    assert order(machine, "stop", stop(3), 2.0) == [LeaveAfter(step=3)]
    leaving = Leaving(at=2.0, position=Position(step=3, window=False))
    assert machine.handle(leaving) == [Abort()]


def test_rank_in_the_step_to_finish_is_aborted_only_after_its_grace() -> None:
    """When a stop arrives and its last step to finish is the current step of the rank, then the
    rank is aborted only after the grace has passed."""
    machine = training()
    frozen(machine, window=False)
    order(machine, "stop", stop(4), 2.0)
    assert machine.handle(Leaving(at=2.0, position=Position(step=3, window=False))) == []
    assert machine.next_deadline() == 3.0
    assert machine.handle(Woken(at=2.9)) == []
    assert machine.handle(Woken(at=3.0)) == [Abort()]


def test_abort_is_repeated_until_the_training_thread_leaves_the_loop() -> None:
    """When an abort came too early to interrupt the collective, then the abort is repeated until
    the training thread has left the loop."""
    machine = training()
    frozen(machine, window=False)
    order(machine, "stop", stop(3), 2.0)
    machine.handle(Leaving(at=2.0, position=Position(step=3, window=False)))
    assert machine.next_deadline() == 2.05
    assert machine.handle(Woken(at=2.0 + AGAIN)) == [Abort()]
    assert names(machine.handle(Left(at=2.1))) == ["Execute"]
    assert machine.next_deadline() is None


def test_stop_is_answered_after_the_training_thread_has_cleared() -> None:
    """When the training thread has left the loop, then it carries out the stop. Only after that the
    stop is answered and the next order begins."""
    machine = training()
    frozen(machine, window=False)
    order(machine, "stop", stop(3), 2.0)
    (execute,) = machine.handle(Left(at=2.1))
    assert execute == Execute(name="stop", order=stop(3))
    assert (machine.doing, machine.stage) == ("stop", Stage.BUSY)
    assert order(machine, "regroup", regroup(), 2.15) == []
    answer, regroups = done(machine, "stop", stop(3), 2.2)
    assert isinstance(answer, Answer)
    assert (answer.answer.order, answer.answer.began, answer.answer.at) == ("stop", 2.0, 2.2)
    assert regroups == Execute(name="regroup", order=regroup())


def test_rank_past_the_step_to_finish_is_aborted_at_once_in_its_tail() -> None:
    """When the rank is past the last step that a stop lets it finish, then it is aborted at once,
    even in the tail of its step."""
    machine = training()
    order(machine, "stop", stop(3), 2.0)
    beyond = Position(step=4, window=False, tail=True)
    assert machine.handle(Leaving(at=2.0, position=beyond)) == [Abort()]


@pytest.mark.parametrize(
    "where",
    [Position(step=3, window=False, tail=True), Position(step=3, window=False, after=True)],
    ids=["in its tail", "in what is called after it"],
)
def test_rank_in_the_tail_of_the_step_to_finish_gets_its_grace(where: Position) -> None:
    """When the rank has completed the update of the last step to finish, but not the tail of this
    step, then it is not aborted at once. It gets the grace time to complete the tail."""
    machine = training()
    order(machine, "stop", stop(3), 2.0)
    assert machine.handle(Leaving(at=2.0, position=where)) == []
    assert machine.next_deadline() == 3.0


def test_stop_of_an_older_round_neither_aborts_nor_executes() -> None:
    """When a freeze of a newer round arrives before the rank has left its loop, then the older stop
    neither aborts the rank nor is carried out."""
    machine = training()
    order(machine, "stop", stop(4), 2.0)
    machine.handle(Leaving(at=2.0, position=Position(step=3, window=False)))
    assert order(machine, "freeze", freeze(round=2), 2.5) == [Lock()]
    assert machine.next_deadline() is None
    assert machine.handle(Left(at=2.6)) == []


def test_stop_is_carried_out_before_waiting_orders() -> None:
    """When a stop arrives while one order is carried out and another order waits, then the stop is
    carried out next."""
    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "check", check(), 1.0)
    order(machine, "regroup", regroup(), 1.1)
    assert machine.stage is Stage.CHECKING
    assert order(machine, "stop", stop(3), 1.2) == []
    assert names(done(machine, "check", check(), 1.3)) == ["Answer", "Execute"]
    assert machine.doing == "stop"

    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "regroup", regroup(), 1.0)
    order(machine, "check", check(), 1.1)
    assert order(machine, "stop", stop(3), 1.2) == []
    assert names(done(machine, "regroup", regroup(), 1.3)) == ["Answer", "Execute"]
    assert machine.doing == "stop"


def compare(**which: int) -> Compare:
    """
    Return an order to compare for rank 0.
    """
    return Compare(**key(**which), to=(0,))


def test_rank_whose_stop_was_lost_does_not_compare_before_it() -> None:
    """When a rank is out of its loop and the stop of an incident was lost, then the rank does not
    compare: only the stop undoes the step that was not finished. It compares after the stop."""
    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "freeze", freeze(), 1.0)
    assert order(machine, "compare", compare(), 1.1) == []
    assert order(machine, "stop", stop(3), 1.2) == [Execute(name="stop", order=stop(3))]
    assert done(machine, "stop", stop(3), 1.3)[1:] == [Execute(name="compare", order=compare())]


def test_rank_that_joins_after_the_freeze_compares_at_once() -> None:
    """When a rank got no freeze in this round, then it is out of its loop, and compares at once."""
    machine = RankMachine(rank=0, incarnation=0)
    assert order(machine, "compare", compare(), 1.0) == [Execute(name="compare", order=compare())]


def stopped() -> RankMachine:
    """
    Return the machine of a rank that has frozen and stopped in the first round.
    """
    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "freeze", freeze(), 1.0)
    order(machine, "stop", stop(3), 1.1)
    done(machine, "stop", stop(3), 1.2)
    return machine


def test_rank_forms_groups_while_it_compares() -> None:
    """When a rank that has stopped is ordered to compare and to form groups, then it begins both.
    Each is answered when it is done."""
    machine = stopped()
    assert names(order(machine, "compare", compare(), 1.3)) == ["Execute"]
    assert names(order(machine, "regroup", regroup(), 1.3)) == ["Execute"]
    stages = [machine.stage]
    assert the_answer(done(machine, "regroup", regroup(), 1.4)).order == "regroup"
    stages.append(machine.stage)
    assert the_answer(done(machine, "compare", compare(), 1.5)).order == "compare"
    assert [*stages, machine.stage] == [Stage.BUSY, Stage.BUSY, Stage.IDLE]


def test_rank_compares_before_it_forms_groups_although_the_order_came_later() -> None:
    """When the order to compare was lost and comes again after that to form groups, then the rank
    begins to compare first: the forming of groups may wait for other ranks."""
    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "freeze", freeze(), 1.0)
    order(machine, "regroup", regroup(), 1.1)
    order(machine, "compare", compare(), 1.2)
    order(machine, "stop", stop(3), 1.2)
    begun = done(machine, "stop", stop(3), 1.3)[1:]
    assert [each.name for each in begun if isinstance(each, Execute)] == ["compare", "regroup"]


def test_no_order_changes_the_state_while_a_rank_compares() -> None:
    """When a rank compares, then it carries out no order that may change its state, not even a stop
    of the next round. It carries these orders out after the comparison."""
    others: dict[OrderName, RankOrder] = {
        "rebuild": Rebuild(**key(), to=(0,)),
        "stop": stop(3, round=2),
        "compare": compare(round=2),
    }
    for name, what in others.items():
        machine = stopped()
        order(machine, "compare", compare(), 1.3)
        assert "Execute" not in names(order(machine, name, what, 1.4))
        begun = done(machine, "compare", compare(), 1.5)
        assert begun[-1] == Execute(name=name, order=what)


def test_new_round_interrupts_the_forming_of_groups_while_a_rank_compares() -> None:
    """When a new round begins while a rank compares and forms groups, then the rank is interrupted
    until it does neither. Neither is answered, because both belong to the old round."""
    machine = stopped()
    order(machine, "compare", compare(), 1.3)
    order(machine, "regroup", regroup(), 1.3)
    assert names(order(machine, "freeze", freeze(round=2), 1.4)) == ["Abort", "Lock"]
    assert done(machine, "regroup", regroup(), 1.41, failure="called off") == []
    assert machine.handle(Woken(at=1.4 + AGAIN)) == [Abort()]
    assert done(machine, "compare", compare(), 1.5) == []
    assert machine.next_deadline() is None


def test_rank_that_could_not_stop_neither_compares_nor_forms_groups() -> None:
    """When a rank has failed to stop, then its step is not undone and its groups are not dropped.
    So it neither compares nor forms groups."""
    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "freeze", freeze(), 1.0)
    order(machine, "stop", stop(3), 1.1)
    order(machine, "compare", compare(), 1.1)
    order(machine, "regroup", regroup(), 1.1)
    assert names(done(machine, "stop", stop(3), 1.2, failure="it broke")) == ["Answer"]


def test_late_wake_up_does_not_abort_a_rank_that_left_the_loop() -> None:
    """When the rank has left the loop before the wake-up for the next abort, then nothing is
    aborted."""
    machine = training()
    order(machine, "stop", stop(3), 2.0)
    machine.handle(Leaving(at=2.0, position=Position(step=3, window=False)))
    machine.handle(Left(at=2.01))
    assert machine.handle(Woken(at=2.05)) == []


def test_abort_is_not_repeated_when_the_rank_entered_its_loop() -> None:
    """When a freeze of a newer round aborts a resume, but the rank has already entered its loop,
    then the abort is not repeated."""
    machine = RankMachine(rank=0, incarnation=0)
    resume = Resume(**key(), to=(0,), step=1)
    order(machine, "resume", resume, 1.0)
    assert order(machine, "freeze", freeze(round=2), 1.1) == [Abort(), Lock()]
    assert done(machine, "resume", resume, 1.12) == []
    assert machine.next_deadline() is None
    assert machine.stage is Stage.LOOP


def test_rank_that_fails_to_resume_carries_out_orders_outside_the_loop() -> None:
    """When a rank fails to enter its loop, then it carries out further orders outside the loop. A
    failure of any other order does not change its stage."""
    machine = RankMachine(rank=0, incarnation=0)
    resume = Resume(**key(), to=(0,), step=1)
    order(machine, "resume", resume, 1.0)
    failed = the_answer(done(machine, "resume", resume, 1.1, failure="the loader is empty"))
    assert failed.failure == "the loader is empty"
    assert machine.stage is Stage.IDLE
    assert names(order(machine, "regroup", regroup(round=2), 1.2)) == ["Execute"]

    held = checking(training())
    assert the_answer(done(held, "check", check(), 2.5, failure="no lamps")).failure == "no lamps"
    assert held.stage is Stage.HELD


def test_process_obeys_the_first_order_of_any_controller() -> None:
    """When a process has received no order yet, then it obeys the first round of any controller."""
    machine = RankMachine(rank=0, incarnation=0)
    first = freeze(epoch=0, incident=0, round=0)
    assert order(machine, "freeze", first, 1.0) == [Lock()]


def test_order_for_another_process_of_the_rank_is_ignored() -> None:
    """When an order is for the successor of this process, then this process ignores it."""
    machine = RankMachine(rank=0, incarnation=0)
    other = Freeze(**key(), to=(0,), cause="a test", incarnations={0: 1})
    assert order(machine, "freeze", other, 1.0) == []


def test_answer_contains_all_facts_that_the_training_thread_reports() -> None:
    """When the training thread has carried out an order, then the answer contains every fact that
    it reports."""
    facts = Done(
        order=regroup(incident=2, round=3), name="regroup", failure="why", context_lost=True,
        position=Position(step=3, window=True), held=3, backups=(1, 2),
        files=(SavedFile(name="f", size=1, digest="d"),), verdict="isolate", finding="lamps",
        local_state={3: "00"}, digests={"dense": {"model": "d"}}, compared=0.5, line="train.py:7",
        odd={1: "it is away"}, lost="a buffer", inexact=("a metric",), tails=True, began=1.5, at=2.5,
    )  # fmt: skip
    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "regroup", regroup(incident=2, round=3), 1.0)
    answer = asdict(the_answer(machine.handle(facts)))
    expected = {name: fact for name, fact in asdict(facts).items() if name not in ("order", "name")}
    assert {name: answer[name] for name in expected} == expected
    assert (answer["order"], answer["incident"], answer["round"]) == ("regroup", 2, 3)


@pytest.mark.parametrize("waiting", [False, True])
def test_answer_to_freeze_says_if_the_rank_waits_for_others(waiting: bool) -> None:
    """When a rank in its loop answers a freeze, then the answer says whether it waits for other
    ranks and names its kept copies. A rank outside the loop always counts as waiting."""
    position = Position(step=3, window=False)
    locked = Locked(at=1.1, position=position, held=3, backups=(1, 2), waiting=waiting)
    inside = training()
    order(inside, "freeze", freeze(), 1.0)
    answer = the_answer(inside.handle(locked))
    assert (answer.waiting, answer.backups, answer.began) == (waiting, (1, 2), 1.0)

    outside = RankMachine(rank=0, incarnation=0)
    order(outside, "freeze", freeze(), 1.0)
    assert the_answer(outside.handle(locked)).waiting


def test_repeated_order_is_carried_out_once_and_answered_twice() -> None:
    """When an order is repeated while it is carried out, then the repetition is ignored. After that
    it is answered with the stored answer."""
    machine = RankMachine(rank=0, incarnation=0)
    assert names(order(machine, "regroup", regroup(), 1.0)) == ["Execute"]
    assert order(machine, "regroup", regroup(), 1.1) == []
    first = done(machine, "regroup", regroup(), 1.2)
    assert order(machine, "regroup", regroup(), 1.3) == first


def test_newer_round_aborts_the_order_in_progress() -> None:
    """When a freeze of a newer round arrives while process groups are formed, then this work is
    aborted without an answer, and the stop of the new round comes next."""
    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "regroup", regroup(), 1.0)
    assert order(machine, "freeze", freeze(round=2), 1.1) == [Abort(), Lock()]
    order(machine, "stop", stop(3, round=2), 1.2)
    commands = done(machine, "regroup", regroup(), 1.3)
    assert commands == [Execute(name="stop", order=stop(3, round=2))]


def test_orders_of_an_older_round_or_epoch_are_ignored() -> None:
    """When an order comes from an older round or from a replaced controller, then it is ignored."""
    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "freeze", freeze(round=3, epoch=2), 1.0)
    assert order(machine, "regroup", regroup(round=2, epoch=2), 1.1) == []
    assert order(machine, "freeze", freeze(round=4, epoch=1), 1.2) == []


def test_new_controller_gets_the_stored_answer_to_a_repeated_order() -> None:
    """When a new controller repeats an order under its own epoch, then the rank sends the stored
    answer and does not repeat the work."""
    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "regroup", regroup(), 1.0)
    first = done(machine, "regroup", regroup(), 1.2)
    assert order(machine, "regroup", regroup(epoch=2), 1.3) == first


def test_second_order_waits_until_the_first_order_is_done() -> None:
    """When two orders arrive together, then the training thread begins the second order when the
    first one is done."""
    machine = RankMachine(rank=0, incarnation=0)
    order(machine, "regroup", regroup(), 1.0)
    resume = Resume(**key(), to=(0,), step=4)
    assert order(machine, "resume", resume, 1.0) == []
    assert names(done(machine, "regroup", regroup(), 1.1)) == ["Answer", "Execute"]


def test_end_order_aborts_a_training_rank_and_is_carried_out() -> None:
    """When the job ends while the rank trains, then the rank is aborted and leaves its loop, and
    the end order is carried out."""
    machine = training()
    end = End(**key(), to=(0,), code=3, why="a test")
    assert order(machine, "end", end, 2.0) == [LeaveAfter(step=0), Abort()]
    assert machine.handle(Leaving(at=2.0, position=Position(step=3, window=False))) == []
    assert machine.handle(Left(at=2.1)) == [Execute(name="end", order=end)]


# ---------------------------------------------------------------- holds and checks during a pause


def hold(step: int, **which: int) -> Hold:
    """
    Return an order for rank 0 to stand still at the end of `step`.
    """
    return Hold(**key(**which), to=(0,), step=step)


def check(**which: int) -> Check:
    """
    Return an order for rank 0 to run the check `lamps`.
    """
    return Check(**key(**which), to=(0,), name="lamps")


def stands(machine: RankMachine, step: int, *, still: bool = True) -> list[RankCommand]:
    """
    Tell the machine that the training thread is at the end of `step`, and return its commands.

    `still` says whether the thread stands still.
    """
    position = Position(step=step, window=still)
    return machine.handle(
        Located(at=1.5, position=position, held=step, backups=(step - 1,), still=still)
    )


def the_answer(commands: list[RankCommand]) -> Answered:
    """
    Return the only answer among the commands. Fail the test if there is not exactly one.
    """
    (answer,) = [command.answer for command in commands if isinstance(command, Answer)]
    return answer


def paused(machine: RankMachine, step: int = 4) -> RankMachine:
    """
    Order the rank to stand still at the end of `step`, let it do so, and return the machine.
    """
    frozen(machine, window=False)
    assert order(machine, "hold", hold(step), 1.1) == [HoldAfter(step=step)]
    assert stands(machine, 3, still=False) == []
    answer = the_answer(stands(machine, step))
    assert (answer.order, answer.failure, answer.held) == ("hold", None, step)
    return machine


def test_hold_is_answered_when_the_rank_stands_still_at_the_boundary() -> None:
    """When a rank gets a hold for the end of a step, then it answers when it stands still at the
    end of this step. The answer has its position, its kept copies and the time of the order."""
    machine = training()
    frozen(machine, window=False)
    order(machine, "hold", hold(4), 1.1)
    assert stands(machine, 3) == []  # the freeze had held the rank at step 3
    assert stands(machine, 4, still=False) == []
    answer = the_answer(stands(machine, 4))
    assert answer.position == Position(step=4, window=True)
    assert (answer.held, answer.backups, answer.began, answer.at) == (4, (3,), 1.1, 1.5)
    assert stands(machine, 4) == []


def test_hold_is_answered_at_once_when_train_has_returned() -> None:
    """When `train` has returned, before or after the hold arrives, then the hold is answered at
    once."""
    before = training()
    before.handle(Left(at=1.0))
    order(before, "hold", hold(4), 1.1)
    assert the_answer(stands(before, 4, still=False)).failure is None

    after = training()
    order(after, "hold", hold(4), 1.1)
    assert after.handle(Left(at=1.2)) == [HoldAfter(step=4)]
    assert the_answer(stands(after, 4, still=False)).failure is None


def test_hold_fails_when_an_exception_left_the_loop_before_the_boundary() -> None:
    """When an exception takes the training thread out of the loop before the step of a hold ends,
    then the hold fails, and the failure names the step."""
    machine = training()
    order(machine, "hold", hold(4), 1.1)
    machine.handle(Left(at=1.2))
    failure = the_answer(stands(machine, 3, still=False)).failure
    assert failure == "it has left the loop after step 3, before step 4 ended"


def test_check_is_run_in_the_loop_when_the_rank_stands_still() -> None:
    """When a rank stands still in the loop and gets a check, then the training thread runs the
    check in the loop. The answer contains its verdict and its finding."""
    machine = paused(training())
    assert order(machine, "check", check(), 2.0) == [Execute(name="check", order=check())]
    position = Position(step=4, window=True)
    found = Done(
        order=check(), name="check", failure=None, position=position, held=None,
        verdict="isolate", finding="lamp 3 is out", began=2.0, at=2.5,
    )  # fmt: skip
    answer = the_answer(machine.handle(found))
    assert (answer.verdict, answer.finding) == ("isolate", "lamp 3 is out")
    assert machine.inside


def test_order_other_than_a_check_waits_until_the_rank_leaves_the_loop() -> None:
    """When a rank stands still in the loop and gets an order other than a check, then the order
    waits until the rank has left the loop."""
    machine = paused(training())
    rebuild = Rebuild(**key(), to=(0,))
    assert order(machine, "rebuild", rebuild, 2.0) == []
    assert machine.handle(Left(at=2.1)) == [Execute(name="rebuild", order=rebuild)]


def test_each_state_of_the_training_thread_has_its_own_stage() -> None:
    """When a rank trains, stands still, runs a check, and leaves the loop, then the machine is in
    another stage each time. A release during a check does not change the stage until the check is
    done."""
    machine = training()
    stages = [machine.stage, paused(machine).stage]
    order(machine, "check", check(), 2.0)
    stages.append(machine.stage)
    order(machine, "release", Release(**key(round=2), to=(0,)), 3.0)
    stages.append(machine.stage)
    done(machine, "check", check(), 3.5)
    stages.append(machine.stage)
    machine.handle(Left(at=4.0))
    stages.append(machine.stage)
    checking_held = [Stage.CHECKING_HELD, Stage.CHECKING_HELD]
    assert stages == [Stage.LOOP, Stage.HELD, *checking_held, Stage.LOOP, Stage.IDLE]


def test_check_of_a_newer_round_waits_until_the_rank_stands_still_again() -> None:
    """When a newer round begins while a rank stands still, then a check of that round waits until
    the rank stands still again. A check for a rank that has just entered its loop waits too."""
    machine = paused(training())
    order(machine, "freeze", freeze(round=2), 2.0)
    assert order(machine, "check", check(round=2), 2.1) == []
    assert order(training(), "check", check(incident=0, round=0), 2.1) == []


def test_standstill_without_a_hold_sends_no_answer() -> None:
    """When a rank stands still without an order to hold, in the loop or outside it, then it sends
    no answer."""
    machine = training()
    assert stands(machine, 4) == []
    machine.handle(Left(at=2.0))
    assert stands(machine, 4, still=False) == []


def test_check_that_arrives_before_the_standstill_runs_after_it() -> None:
    """When a check arrives before the rank stands still for its hold, then the check runs only
    after the hold is answered, and not while the rank trains."""
    machine = training()
    order(machine, "hold", hold(4), 1.1)
    assert order(machine, "check", check(), 1.2) == []
    assert names(stands(machine, 4)) == ["Answer", "Execute"]


def test_check_is_run_outside_the_loop_when_train_has_returned() -> None:
    """When `train` has returned, then the check is run outside the loop."""
    machine = training()
    machine.handle(Left(at=1.0))
    assert names(order(machine, "check", check(), 2.0)) == ["Execute"]


def test_release_is_answered_at_once_after_windows_open_again() -> None:
    """When a paused rank is released, then update windows open again first, and then the release is
    answered. A check that arrives after the release is not carried out."""
    machine = paused(training())
    release = Release(**key(), to=(0,))
    assert order(machine, "release", release, 3.0) == [Unlock()]
    position = Position(step=4, window=True)
    unlocked = Unlocked(at=3.1, position=position, held=4, backups=(2, 3))
    answer = the_answer(machine.handle(unlocked))
    assert (answer.order, answer.position, answer.backups) == ("release", position, (2, 3))
    assert (answer.began, answer.at) == (3.0, 3.1)
    assert order(machine, "check", check(), 3.1) == []


def test_release_withdraws_a_hold_that_is_not_answered_yet() -> None:
    """When a rank is released before it stands still for a hold, then the hold is not answered."""
    machine = training()
    order(machine, "hold", hold(4), 1.1)
    assert order(machine, "release", Release(**key(), to=(0,)), 1.2) == [Unlock()]
    assert stands(machine, 4) == []


def checking(machine: RankMachine) -> RankMachine:
    """
    Let the rank stand still and start a check, and return the machine.
    """
    paused(machine)
    assert order(machine, "check", check(), 2.0) == [Execute(name="check", order=check())]
    return machine


def test_release_does_not_abort_a_running_check() -> None:
    """When a release arrives while a check runs, then the check is not aborted, so that its process
    groups are kept. A check that has not begun is withdrawn."""
    machine = checking(training())
    release = Release(**key(round=2), to=(0,))
    assert order(machine, "release", release, 3.0) == [Withdraw(), Unlock()]
    assert machine.next_deadline() is None
    assert done(machine, "check", check(), 3.5) == []


def test_withdrawn_check_is_not_answered_and_does_not_block_orders() -> None:
    """When a check is withdrawn from the training thread's queue because its round is over, then it
    is not answered. The next order does not wait for the check."""
    machine = checking(training())
    order(machine, "release", Release(**key(round=2), to=(0,)), 3.0)
    assert machine.handle(Withdrawn()) == []

    order(machine, "freeze", freeze(round=3), 4.0)
    order(machine, "hold", hold(5, round=3), 4.1)
    stands(machine, 5)
    again = check(round=3)
    assert order(machine, "check", again, 4.2) == [Execute(name="check", order=again)]
    assert machine.handle(Withdrawn()) == []
    assert machine.handle(Withdrawn()) == []


def test_freeze_during_a_check_is_answered_and_the_stop_waits_its_grace() -> None:
    """When a freeze of a newer round arrives during a check, then it is answered at once without an
    abort. The stop waits for the check during its grace, and then aborts it."""
    machine = checking(training())
    assert order(machine, "freeze", freeze(incident=2), 2.1) == [Withdraw(), Lock()]
    position = Position(step=4, window=True)
    locked = Locked(at=2.1, position=position, held=None, waiting=True)
    assert the_answer(machine.handle(locked)).order == "freeze"
    assert order(machine, "stop", stop(4, incident=2), 2.2) == [LeaveAfter(step=4)]
    assert machine.handle(Leaving(at=2.2, position=position)) == []
    assert machine.next_deadline() == 3.2
    assert machine.handle(Woken(at=3.2)) == [Abort()]
    assert done(machine, "check", check(), 3.25) == []
    assert machine.next_deadline() is not None  # the deadline for leaving the loop is left
    assert names(machine.handle(Left(at=3.3))) == ["Execute"]


def test_stop_gives_its_grace_to_a_check_outside_the_loop() -> None:
    """When an incident begins while a rank outside the loop runs a check, then the check may run
    for the grace of the stop. After that it is aborted repeatedly until the stop can be carried
    out."""
    machine = training()
    machine.handle(Left(at=1.0))
    order(machine, "check", check(), 2.0)
    assert order(machine, "freeze", freeze(round=2), 2.1) == [Withdraw(), Lock()]
    assert order(machine, "stop", stop(4, round=2), 2.2) == []
    assert machine.next_deadline() == 3.2
    assert machine.handle(Woken(at=3.2)) == [Abort()]
    assert machine.handle(Woken(at=3.2 + AGAIN)) == [Abort()]
    assert names(done(machine, "check", check(), 3.3)) == ["Execute"]
    assert machine.next_deadline() is None


def test_end_order_aborts_a_running_check() -> None:
    """When the job ends while a rank runs a check, in the loop or outside it, then the check is
    aborted."""
    end = End(**key(round=2), to=(0,), code=3, why="a test")
    inside = checking(training())
    assert order(inside, "end", end, 3.0) == [Withdraw(), LeaveAfter(step=0), Abort()]

    outside = training()
    outside.handle(Left(at=1.0))
    order(outside, "check", check(), 2.0)
    assert order(outside, "end", end, 3.0) == [Withdraw(), Abort()]
    assert outside.handle(Withdrawn()) == [Execute(name="end", order=end)]


def test_hold_of_an_older_round_is_not_answered() -> None:
    """When a freeze of a newer round arrives before the rank stands still for a hold, then the
    older hold is not answered."""
    machine = training()
    order(machine, "hold", hold(4), 1.1)
    order(machine, "freeze", freeze(round=2), 1.2)
    assert stands(machine, 4) == []


def test_repeated_hold_is_answered_with_the_stored_answer() -> None:
    """When an order to hold is repeated, then it is ignored until the rank stands still. After that
    the rank machine sends its first answer again."""
    machine = training()
    order(machine, "hold", hold(4), 1.1)
    assert order(machine, "hold", hold(4), 1.2) == []
    first = stands(machine, 4)
    assert order(machine, "hold", hold(4), 1.6) == first
