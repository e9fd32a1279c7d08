"""
Deadlines: how long the job waits for answers, and for functions that scripts call after a step.
"""

import pytest

from tests.core.lives import (
    strategies,
    trained,
    tried,
)
from tft.core.job.attempts import (
    ALONE,
)
from tft.core.job.policy import (
    STRATEGIES,
    Policy,
)
from tft.core.job.transitions import (
    State,
)
from tft.protocol.messages import (
    EndNode,
    Freeze,
    Kill,
    OrderName,
    Ready,
    Resume,
    ShardCopies,
)
from tft.testing.scripted import (
    ScriptedJob,
)

# ---------------------------------------------------------------- limits of orders and starts


@pytest.mark.parametrize(
    "order", ["freeze", "stop", "regroup", "fetch", "rebuild", "rollback", "resume"]
)
def test_deadline_event_before_the_limit_changes_nothing(order: OrderName) -> None:
    """When the machine gets `DeadlinePassed` before a limit is over, then it issues no command, and
    its deadline stays the same."""
    job = trained()
    job.script.muted = {(1, order)}
    job.fault(1, "memory")
    job.settle()
    state, orders, deadline = job.state, len(job.said), job.machine.next_deadline()
    job.let_pass(1.0)
    assert (job.state, len(job.said)) == (state, orders)
    assert job.machine.next_deadline() == deadline


@pytest.mark.parametrize(
    ("promises", "repair", "limit"),
    [(False, 300.0, 120.0), (True, 300.0, 300.0), (True, 30.0, 120.0)],
)
def test_rebuild_that_brings_state_has_the_limit_of_a_repair(
    promises: bool, repair: float, limit: float
) -> None:
    """When a rank gets its state only in the rebuild, then the rebuild has the limit of a repair,
    or the limit for building wrappers if this is longer. Otherwise it has the limit for building
    wrappers."""
    job = trained(promises=promises, repair=repair)
    job.script.muted = {(1, "rebuild")}
    job.fault(1, "memory")
    job.settle()
    assert job.state is State.REBUILDING
    deadline = job.machine.next_deadline()
    assert deadline is not None
    # the messages take up to 0.1 s
    assert deadline - job.now == pytest.approx(limit, abs=0.1)


def test_pause_continues_before_its_deadline() -> None:
    """When the machine gets `DeadlinePassed` before a pause is over, then the pause continues."""
    job = trained()
    job.pause()
    job.settle()
    deadline = job.machine.next_deadline()
    job.let_pass(3500.0)
    assert (job.state, job.machine.next_deadline()) == (State.PAUSED, deadline)


def test_late_ranks_are_listed_in_order() -> None:
    """When several ranks do not answer an order, then they are listed and ended in rank order, so
    that the same events always give the same orders."""
    job = trained(10)
    job.script.muted = {(1, "fetch"), (8, "fetch")}
    job.fault(8, "memory")
    job.fault(1, "memory")
    job.settle()
    job.wait()
    assert job.facts("order_overdue") == [{"order": "fetch", "ranks": [1, 8]}]
    assert [kill.rank for kill in job.orders(Kill)] == [1, 8]


def test_ranks_that_do_not_finish_open_an_incident() -> None:
    """When all ranks but two have finished, and these two do not finish in time, then an incident
    opens. Its order to freeze names the two ranks."""
    job = trained(10, max_incidents=1)
    job.finish(*(rank for rank in range(10) if rank not in (1, 8)))
    job.wait()
    (freeze,) = job.orders(Freeze)
    assert freeze.incident == 1
    assert freeze.cause == "ranks [1, 8] have not finished training 3600 s after the first rank"


def test_second_late_order_is_dropped_when_a_new_round_begins() -> None:
    """When the limits of two orders are over at the same time and the first begins a new round,
    then no rank is ended for not answering the second order."""
    job = trained(repair=60.0)
    job.script.muted = {(1, "regroup"), (1, "fetch")}
    job.fault(1, "memory")
    job.settle()
    job.wait()
    assert job.state is State.FREEZING
    assert job.facts("order_overdue") == [{"order": "regroup", "ranks": [1]}]
    assert job.orders(Kill) == []


def test_reason_names_the_rank_that_never_answers_regroup() -> None:
    """When the same rank does not answer `regroup` in three attempts, then `retry` has failed, and
    the reason names this rank."""
    job = trained()
    job.script.muted = {(2, "regroup")}
    job.fault(1, "memory")
    job.settle()
    for _ in range(2):
        job.wait()
        job.settle()
    job.wait()  # the two seconds before the third attempt
    job.settle()
    job.wait()
    job.script.muted = set()
    job.settle()
    job.train()
    assert tried(job)["retry"] == "ranks [2]: no answer to the order regroup in time"


def test_computing_rank_is_not_suspected_for_another_silent_rank() -> None:
    """When one rank does not answer the order to resume and another rank computes, then no rank is
    ended in the freeze that follows."""
    job = trained()
    job.script.muted = {(3, "resume")}
    job.ranks[0].loop.waiting = False
    job.fault(1, "network")
    job.settle()
    job.wait()
    job.script.muted = set()
    job.settle()
    assert len(job.orders(Resume)) == 2
    assert job.orders(Kill) == []


@pytest.mark.parametrize("order", ["load", "restore"])
def test_rank_that_loads_or_restores_for_too_long_is_replaced(order: OrderName) -> None:
    """When a rank does not finish loading a checkpoint, or restoring its own copy, within the
    limit, then it is ended with a hang fault and replaced."""
    if order == "load":
        job = ScriptedJob(4, Policy(), resume=("/old/step-7", 7))
        job.script.muted = {(1, order)}
        job.start()
    else:
        job = trained(steps=6, keeps=2)
        job.script.muted = {(1, order)}
        job.fault(2, "numeric", polluted=True)
        job.settle()
    job.wait()
    job.script.muted = set()
    job.settle()
    job.train()
    (incident,) = job.reports()
    hang = incident["faults"][-1]
    assert (hang["kind"], hang["rank"]) == ("hang", 1)
    assert f"no answer to the order {order} in time" in hang["evidence"]
    assert incident["strategy"] == "recover"


def test_choice_waits_for_terminating_processes_before_advice() -> None:
    """When the time for advice is over while a process is being ended, then the machine first waits
    for the end of this process, within the limit of that end. It then decides without advice."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, advised=True)
    job.fault(1, "network")
    job.settle()
    job.script.deaf = {1}
    job.now += 25.0
    job.notice(3, "process", "its card is gone")
    assert job.machine.next_deadline() == pytest.approx(job.now + 10.0)
    job.let_pass(6.0)
    assert job.state is State.CHOOSING
    assert job.machine.next_deadline() == pytest.approx(job.now + 4.0)
    job.wait()
    assert [facts["rank"] for facts in job.facts("rank_not_ended")] == [3]


def test_ending_job_has_no_other_deadlines() -> None:
    """When a job ends while processes start and other processes cannot be ended, then only the
    limits for leaving the job count. No other limit ends a process, and the job is over in time."""
    groups = {"a": (0, 1), "b": (2, 3)}
    job = trained(placement={0: (0, 1), 1: (2, 3)}, groups=groups, join=8.0, leave=5.0)
    job.script.slow, job.script.deaf = {1}, {1}
    job.kill(1)
    job.script.muted = {(rank, order) for rank in range(4) for order in ("save", "end")}
    job.settle()
    job.stop(0)
    job.settle()
    job.notice(2, "process", "its card is gone")
    job.notice(3, "process", "its card is gone")
    assert job.state is State.EXITING
    ends = job.now + 15.0
    killed = len(job.orders(Kill))
    while job.over is None:
        assert job.machine.next_deadline() in (pytest.approx(ends - 10.0), pytest.approx(ends))
        job.let_pass(1.0)
    assert job.now == pytest.approx(ends, abs=1.0)
    assert (len(job.orders(Kill)), job.facts("rank_not_ended")) == (killed, [])
    assert [type(order) for order in job.said][-1] is EndNode
    assert job.over.result == "failed"


def test_start_limit_begins_when_the_first_rank_has_joined() -> None:
    """When no rank has called `tft.init`, then no start limit counts, because the script may never
    call it. After the first call the other ranks have to join in time."""
    job = ScriptedJob(2, Policy(join=300.0))
    job.script.slow = {0, 1}
    job.start()
    assert job.machine.next_deadline() is None
    job.let_pass(1000.0)
    assert job.orders(Kill) == []
    job.arrive(0)
    job.wait()
    assert [kill.rank for kill in job.orders(Kill)] == [1]


def test_last_holder_of_a_shard_has_more_time_to_stop() -> None:
    """When the only holder of a shard does not leave its loop in time, then it gets the time limit
    of a repair in addition, because ending it would lose the shard."""
    job = trained(2, steps=3, strategies=("retry", "recover", "dump"))
    job.script.muted = {(1, "stop")}
    job.fault(0, "memory")
    job.settle()
    job.let_pass(10.5)
    assert job.orders(Kill) == []
    assert job.facts("stop_waits") == [{"ranks": [1], "shards": ["dense"]}]
    job.let_pass(299.0)
    assert job.orders(Kill) == []
    job.let_pass(1.5)
    assert [kill.rank for kill in job.orders(Kill)] == [1]


def test_rank_with_replicas_is_ended_for_a_late_stop() -> None:
    """When a rank does not leave its loop in time and other ranks hold all of its shards, then it
    is ended at once."""
    job = trained(3, steps=3, strategies=("retry", "recover", "dump"))
    job.script.muted = {(1, "stop")}
    job.fault(0, "memory")
    job.settle()
    job.let_pass(10.5)
    assert [kill.rank for kill in job.orders(Kill)] == [1]
    assert (
        job.machine.incident.faults[-1].evidence == f"no answer to the order stop in time. {ALONE}"
    )


def test_last_holder_is_ended_for_a_late_stop_when_a_checkpoint_exists() -> None:
    """When the only holder of a shard does not leave its loop in time and there is a checkpoint,
    then the rank is ended at once."""
    job = trained(2, steps=3, strategies=("retry", "recover", "dump"))
    job.checkpointed(2)
    job.script.muted = {(1, "stop")}
    job.fault(0, "memory")
    job.settle()
    job.let_pass(10.5)
    assert [kill.rank for kill in job.orders(Kill)] == [1]


def test_late_replacement_adds_evidence_to_the_known_fault() -> None:
    """When the process that replaces a lost one is not ready in time, then it is replaced too. No
    new fault is added; the known fault gets more evidence."""
    job = trained(join=8.0)
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    job.wait()
    job.script.slow = set()
    job.settle()
    job.train()
    (incident,) = job.reports()
    (fault,) = incident["faults"]
    assert (fault["kind"], fault["rank"]) == ("process", 1)
    assert (
        "was ended by signal 9\nthe process has not called session.run 8 s after its start"
        in fault["evidence"]
    )


def again(job: ScriptedJob) -> list[bool]:
    """
    Return, for each order to resume, whether all ranks were to repeat the function that they call
    after a step.
    """
    return [order.again for order in job.orders(Resume)]


# ------------------------------------------------------------ time limits of functions after a step


def test_rank_that_evaluates_is_not_treated_as_hung() -> None:
    """When a rank is lost while another rank evaluates, then the job waits for the evaluation as
    long as that rank has announced. The evaluating rank then keeps its process."""
    job = trained(after=3600.0)
    job.ranks[0].loop.after = True
    job.script.muted = {(0, "stop")}
    job.kill(3)
    job.settle()
    job.wait()
    job.settle()
    assert job.orders(Kill) == []
    assert job.doing == "clearing"
    why = "a function after a step is still running"
    assert job.facts("stop_waits") == [{"ranks": [0], "why": why}]
    assert job.facts("order_overdue") == []
    job.script.muted = set()
    job.ranks[0].orders.names.discard("stop")
    job.repeat()
    job.settle()
    job.train()
    assert job.orders(Kill) == []
    assert strategies(job) == ["recover"]


def test_hung_rank_is_ended_in_time_while_another_rank_evaluates() -> None:
    """When one rank evaluates and another rank does not leave its loop, then the other rank is
    ended within the usual time."""
    job = trained(after=3600.0)
    job.ranks[0].loop.after = True
    job.script.muted = {(0, "stop"), (2, "stop")}
    job.kill(3)
    job.settle()
    job.wait()
    assert [order.rank for order in job.orders(Kill)] == [2]


def test_rank_is_ended_when_its_evaluation_exceeds_the_announced_time() -> None:
    """When a rank evaluates for longer than the 100 s that it has announced, then its process is
    ended."""
    job = trained(after=100.0)
    job.ranks[0].loop.after = True
    job.script.muted = {(0, "stop")}
    job.kill(3)
    job.settle()
    began = job.now
    while not job.orders(Kill):
        job.wait()
    assert [order.rank for order in job.orders(Kill)] == [0]
    assert job.now - began > 99.9


def test_ranks_that_evaluate_together_get_the_longest_announced_time() -> None:
    """When two ranks evaluate and have announced 1000 s and 100 s, then the job waits 1000 s for
    both, because one may wait for the other."""
    job = ScriptedJob(4, Policy(), strategies=STRATEGIES, after=100.0)
    job.script.slow = {0}
    job.start()
    slow = job.ranks[0]
    job.join(slow)
    slow.state.shards = ("dense",)
    shards = (ShardCopies(shard="dense", ranks=(0, 1, 2, 3)),)
    job.report(Ready(rank=0, incarnation=0, shards=shards, after=1000.0, at=job.now))
    job.settle()
    job.train(3)
    for rank in (0, 1):
        job.ranks[rank].loop.after = True
    job.script.muted = {(0, "stop"), (1, "stop")}
    job.kill(3)
    job.settle()
    began = job.now
    while not job.orders(Kill):
        job.wait()
    assert job.now - began > 999.9
    assert [order.rank for order in job.orders(Kill)] == [0, 1]


# --------------------------------------------------------- repeated calls of functions after a step


def test_after_step_function_is_not_repeated_when_all_ranks_completed_it() -> None:
    """When a rank is lost in the next step, then the function after the step is not called again."""
    job = trained(after=60.0)
    job.kill(3)
    job.settle()
    assert again(job) == [False]


def test_after_step_function_is_repeated_when_the_lost_rank_was_in_it() -> None:
    """When a rank is lost inside the function after the step and the others have completed it, then
    all ranks call the function again."""
    job = trained(after=60.0)
    job.ranks[3].loop.after = True
    job.kill(3)
    job.settle()
    assert again(job) == [True]


def test_after_step_function_is_repeated_when_a_remaining_rank_was_cut_off() -> None:
    """When a rank is lost and another rank was cut off in the function after the step or in the
    tail, then all ranks call the function again. A later fault does not change this."""
    for cut in ("after", "tail"):
        job = trained(after=60.0)
        setattr(job.ranks[1].loop, cut, True)
        job.ranks[1].loop.cut = True
        job.kill(3)
        job.settle()
        assert again(job) == [True], cut
        job.kill(2)  # the incident is still open, and rank 1 has rolled back by now
        job.settle()
        assert again(job) == [True, True], cut


def test_after_step_function_is_repeated_when_a_rank_stopped_before_it() -> None:
    """When a rank is lost while another rank is in the tail, then the other rank stops at the end
    of the tail. All ranks call the function after the step again."""
    job = trained(after=60.0)
    job.ranks[1].loop.tail = True
    job.kill(3)
    job.settle()
    assert not job.ranks[1].loop.tail
    assert again(job) == [True]


def test_new_process_without_state_does_not_cause_a_repeated_call() -> None:
    """When a second fault comes before the new process of a lost rank has its state, then the
    function that all ranks had completed is not called again."""
    job = trained(after=60.0)
    job.script.muted = {(3, "fetch")}
    job.kill(3)
    job.settle()
    job.script.muted = set()
    job.fault(2, "network")
    job.settle()
    assert len(job.orders(Freeze)) == 2
    assert again(job) == [False]


def test_after_step_function_is_repeated_when_a_node_is_lost() -> None:
    """When a node is lost, then the progress of its ranks is unknown, and all ranks call the
    function after the step again."""
    job = trained(placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1}, after=60.0)
    job.lose_node(1)
    job.settle()
    assert again(job) == [True]


def test_after_step_function_is_not_repeated_for_ranks_that_leave() -> None:
    """When the ranks of a lost node are restarted, lost again and leave the job, then the members,
    which have completed the function, do not call it again."""
    places = {0: (0, 1), 1: (2, 3), 2: ()}
    pairs = {rank: (rank // 2 * 2, rank // 2 * 2 + 1) for rank in range(4)}
    job = trained(placement=places, spare={2: 2}, columns=pairs, after=60.0)
    job.script.slow = {2, 3}
    job.lose_node(1)
    job.settle()
    job.lose_node(2)
    job.settle()
    assert job.machine.members == {0, 1}
    assert again(job) == [False]


@pytest.mark.parametrize("steps", [0, 1])
def test_after_step_function_is_repeated_only_after_the_first_step(steps: int) -> None:
    """When a rank is lost with its node before the first step, then no function is called again.
    After the first step, all ranks call the function again."""
    job = ScriptedJob(
        4,
        Policy(),
        strategies=STRATEGIES,
        placement={0: (0, 1, 2), 1: (3,)},
        spare={0: 1},
        after=60.0,
    )
    job.start()
    job.train(steps)
    job.said.clear()
    job.lose_node(1)
    job.settle()
    assert again(job) == [bool(steps)]


def test_after_step_function_of_one_rank_is_repeated() -> None:
    """When only one rank has a function after its steps and another rank is lost with its node,
    then the function is called again."""
    job = ScriptedJob(
        4, Policy(), strategies=STRATEGIES, placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1}
    )
    job.script.slow = {0}
    job.start()
    job.join(job.ranks[0])
    dense = ShardCopies(shard="dense", ranks=(0, 1, 2, 3))
    job.ranks[0].state.shards = ("dense",)
    job.report(Ready(rank=0, incarnation=0, shards=(dense,), after=60.0, at=job.now))
    job.settle()
    job.train(2)
    job.said.clear()
    job.lose_node(1)
    job.settle()
    assert again(job) == [True]


def test_job_without_an_after_step_function_has_no_repeated_call() -> None:
    """When no rank has a function after its steps, then a rank that was cut off in the tail causes
    no repeated call."""
    job = trained()
    job.ranks[1].loop.tail = job.ranks[1].loop.cut = True
    job.kill(3)
    job.settle()
    assert again(job) == [False]


def test_resumed_job_calls_the_after_step_function_of_its_checkpoint() -> None:
    """When a job resumes from a checkpoint, then all ranks call the function after that step,
    because the earlier run may not have called it. A fault before the next step does not change
    this."""
    job = ScriptedJob(
        4, Policy(), strategies=STRATEGIES, resume=("/checkpoints/step-7", 7), after=60.0
    )
    job.start()
    job.kill(3)
    job.settle()
    job.train()
    job.train()
    job.kill(2)
    job.settle()
    job.train()
    assert again(job) == [True, True, False]
