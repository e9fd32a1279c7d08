"""
Hang detection: learnt limits, silence of nodes, and the choice of the rank that hangs.
"""

from dataclasses import (
    replace,
)
from typing import Any

import pytest

from tests.core.lives import (
    strategies,
    trained,
)
from tft.core.job.policy import (
    Policy,
)
from tft.core.link.hang_detection import (
    HangDetection,
)
from tft.core.link.step_times import StepTimes
from tft.protocol.messages import (
    Beat,
    Kill,
    Position,
    Pulse,
)

# ---------------------------------------------------------------- limits and silence


POLICY = Policy(stall_floor=1.0, stall_factor=20.0, first_step=600.0)


def beat(
    at: float, step: int, *, moved: float | None = None, training: bool = True, incarnation: int = 0
) -> Beat:
    """
    Return the heartbeat of a node with one rank.

    `moved` is the time of the rank's last progress. The default is `at`.
    """
    pulse = Pulse(
        rank=0,
        incarnation=incarnation,
        position=Position(step=step, window=False),
        training=training,
        moved=at if moved is None else moved,
    )
    return Beat(node=0, pulses=(pulse,), at=at)


class Watch:
    """
    A hang detection with its step times.
    """

    def __init__(self, policy: Policy) -> None:
        self.times = StepTimes()
        self.detection = HangDetection(policy, self.times)

    def __getattr__(self, name: str) -> Any:  # Any: an attribute of the hang detection
        return getattr(self.detection, name)

    def heard(self, beat: Beat, at: float) -> float | None:
        """
        Let both hear a beat.
        """
        return self.detection.heard(beat, self.times.heard(beat), at)


def learnt(seconds: float) -> tuple[Watch, float]:
    """
    Return a hang detection that has seen 12 steps of this length, and the current time.
    """
    watch, at = Watch(POLICY), 0.0
    for step in range(12):
        at = step * seconds
        assert watch.heard(beat(at, step), at) is None
    return watch, at


def test_limit_is_learnt_from_the_step_times() -> None:
    """When steps take half a second, then a stall is reported after the time of twenty steps. For
    short steps this limit has a minimum."""
    assert learnt(0.5)[0].limit() == 10.0
    assert learnt(0.001)[0].limit() == 1.0


def test_limit_is_three_times_the_longest_recent_step() -> None:
    """When one of the last 64 steps was long, then the limit for a stall is three times its length.
    After 64 more steps the long step no longer counts."""
    watch = Watch(POLICY)
    watch.heard(beat(0.0, 0), 0.0)
    for step in range(1, 65):
        at = 10.0 + (step - 1) * 0.1
        watch.heard(beat(at, step), at)
    assert watch.limit() == 30.0
    watch.heard(beat(at + 0.1, 65), at + 0.1)
    assert round(watch.limit(), 6) == 2.0


def test_several_steps_between_two_beats_share_the_time() -> None:
    """When ten steps end within 0.5 s between two beats, then a step time of 0.05 s is learnt."""
    watch = Watch(POLICY)
    for count in range(8):
        watch.heard(beat(count * 0.5, count * 10), count * 0.5)
    assert watch.limit() == 1.0


def test_movement_within_a_step_does_not_shorten_the_step_time() -> None:
    """When a rank moves twice in each step of half a second, then a step time of half a second is
    learnt."""
    watch = Watch(POLICY)
    for count in range(20):
        watch.heard(beat(count * 0.25, count // 2), count * 0.25)
    assert watch.limit() == 10.0


def test_limit_is_learnt_after_five_steps() -> None:
    """When four steps are done, then the limit is the limit of a first step. After five steps the
    learnt limit applies."""
    watch = Watch(POLICY)
    for step in range(5):
        watch.heard(beat(step * 0.5, step), step * 0.5)
    assert watch.limit() == 600.0
    watch.heard(beat(2.5, 5), 2.5)
    assert watch.limit() == 10.0


def test_time_of_a_replacement_is_not_learnt_as_a_step_time() -> None:
    """When a rank continues in another process after 50 s, then these 50 s are not learnt as a step
    time. The next step of the new process is learnt."""
    watch = Watch(POLICY)
    for step in range(5):
        watch.heard(beat(step * 0.5, step), step * 0.5)
    watch.heard(beat(52.0, 4, incarnation=1), 52.0)
    watch.heard(beat(52.5, 5, incarnation=1), 52.5)
    assert watch.limit() == 10.0
    watch.heard(beat(102.5, 6, incarnation=2), 102.5)
    assert watch.limit() == 10.0


def test_limit_before_any_step_allows_compilation() -> None:
    """When no step time is known, then the limit is the limit of a first step, which may include
    compilation."""
    watch = Watch(POLICY)
    watch.heard(beat(0.0, 0), 0.0)
    assert watch.limit() == 600.0


def test_silence_beyond_the_limit_is_a_stall() -> None:
    """When no rank has moved for longer than the limit, then the seconds of silence are returned."""
    watch, at = learnt(0.1)
    silences = [
        watch.heard(beat(at + after, 11, moved=at), at + after) for after in (0.5, 1.0, 1.9, 2.5)
    ]
    assert silences[:3] == [None, None, None]
    assert silences[3] is not None
    assert silences[3] > 2.0


def test_no_hang_is_reported_when_the_node_was_paused() -> None:
    """When the agent sent no beat for 30 s, then its whole node was paused. No hang is reported,
    and the silence is counted from the next beat."""
    watch, at = learnt(0.1)
    assert watch.heard(beat(at + 30.0, 11, moved=at), at + 30.0) is None
    assert watch.heard(beat(at + 30.9, 11, moved=at), at + 30.9) is None


def test_silence_begins_anew_after_two_seconds_without_a_beat() -> None:
    """When two beats of a node are two seconds apart, then the silence of its ranks counts from the
    second beat. The result is the same for any node clock."""
    for ours in (0.0, 1_000_000.0, -1_000_000.0):
        watch = Watch(POLICY)
        for step in range(100, 112):
            watch.heard(beat(step * 0.05, step), ours + step * 0.05)
        assert watch.limit() == 1.0
        silences = [
            watch.heard(beat(at, 111, moved=5.55), ours + at) for at in (6.5, 8.5, 9.4, 9.6)
        ]
        assert [silence is not None for silence in silences] == [False, False, False, True]


def test_late_or_repeated_beat_does_not_hide_a_hang() -> None:
    """When a beat arrives 500 s after it was sent, or the same beat arrives again after 30 s, then
    a hang that follows is still detected at the usual limit."""
    late, at = learnt(0.1)
    assert late.heard(beat(at + 0.5, 11, moved=at), at + 500.0) is None
    twice, at = learnt(0.1)
    assert twice.heard(beat(at, 11), at + 30.0) is None
    for watch in (late, twice):
        assert watch.heard(beat(at + 1.0, 11, moved=at), at + 1.0) is None
        assert watch.heard(beat(at + 1.9, 11, moved=at), at + 1.9) is None
        assert watch.heard(beat(at + 2.5, 11, moved=at), at + 2.5) is not None


def test_hang_on_a_restarted_node_is_detected() -> None:
    """When a node and its clock start again, then a hang that follows is detected."""
    watch, at = learnt(0.1)
    for sent in (0.2, 1.0, 1.9):
        assert watch.heard(beat(sent, 11, moved=0.2), at + 30.0 + sent) is None
    assert watch.heard(beat(2.5, 11, moved=0.2), at + 32.5) is not None


def test_late_beat_with_recent_movement_is_not_a_hang() -> None:
    """When a beat arrives 500 s late because the broker was away, then the silence is measured up
    to the time the beat was sent. No hang is reported."""
    watch, at = learnt(0.1)
    assert watch.heard(beat(at + 0.1, 12), at + 500.0) is None


def test_silence_of_ranks_out_of_their_loops_counts_from_the_last_that_left() -> None:
    """When all ranks have left their loops, also those of a second node, then the silence counts from
    the heartbeat after the last one left. A node without ranks does not begin it anew."""
    watch, at = learnt(0.1)
    (pulse,) = beat(at, 11).pulses
    other = Beat(node=1, pulses=(replace(pulse, rank=1),), at=at)
    watch.heard(other, at)
    gone = beat(at + 0.8, 11, moved=at, training=False)
    assert watch.heard(gone, at + 0.8) is None
    left = replace(other, pulses=(replace(pulse, rank=1, training=False),), at=at + 1.6)
    assert not watch.out
    assert watch.heard(left, at + 1.6) is None
    assert watch.out
    silences = [
        watch.heard(Beat(node=node, pulses=(), at=at + after), at + after)
        for after in (1.7, 2.5, 3.2, 4.0)
        for node in (2, 3)
    ]
    assert [None if each is None else round(each, 6) for each in silences[-4:]] == (
        [1.6, 1.6, 2.4, 2.4]
    )


def test_limit_does_not_depend_on_step_times_when_all_ranks_are_out() -> None:
    """When all ranks have left their loops, then the limit is the shortest one, whether step times are
    known or not, and longer before the first step after a resume."""
    for watch in (Watch(POLICY), learnt(0.5)[0]):
        watch.heard(beat(10.0, 11), 10.0)
        watch.heard(beat(10.1, 11, training=False), 10.1)
        assert watch.limit() == 1.0
        watch.resumed(10.2)
        assert watch.limit() == 10.0


def test_ranks_are_not_out_of_their_loops_while_a_node_was_not_heard() -> None:
    """When a new controller has heard only a node without ranks, then it does not know whether the
    ranks of the other nodes train. When they are heard, or their node is lost, then it knows."""
    watch = Watch(POLICY)
    for node in (0, 1, 2):
        watch.expect(node, 50.0)
    for at in (50.0, 53.5):
        assert watch.heard(Beat(node=2, pulses=(), at=at), at) is None
    watch.heard(beat(53.6, 11, moved=1.0, training=False), 53.6)
    assert not watch.out
    watch.forget(1)
    assert watch.out


def test_new_controller_counts_silence_from_the_first_heartbeat() -> None:
    """When a controller that has just started hears only ranks that are out of their loops, then
    the time before its first heartbeat does not count."""
    watch = Watch(replace(POLICY, stall_floor=3.0))
    silences = [watch.heard(beat(at, 11, moved=1.0, training=False), at) for at in (50.0, 50.9)]
    assert silences == [None, None]
    for at in (51.8, 52.7, 53.6):
        silence = watch.heard(beat(at, 11, moved=1.0, training=False), at)
    assert silence is not None
    assert round(silence, 6) == 3.6


def test_rank_that_leaves_the_loop_does_not_hide_a_hang() -> None:
    """When one rank leaves the loop and another one stands still inside the loop, then the silence
    of the second rank is a stall."""
    watch, at = learnt(0.1)
    for after in (0.5, 1.0, 1.5, 2.0, 2.5):
        (hangs,) = beat(at + after, 11, moved=at).pulses
        out = replace(hangs, rank=1, moved=at + after, training=False)
        silence = watch.heard(Beat(node=0, pulses=(hangs, out), at=at + after), at + after)
    assert silence is not None


def test_silence_counts_from_the_resume() -> None:
    """When training continues after an incident, then the time of the incident does not count as
    silence."""
    watch, at = learnt(0.1)
    watch.resumed(at + 50.0)
    assert watch.heard(beat(at + 51.0, 11, moved=at), at + 51.0) is None


def test_silence_counts_from_the_resume_with_any_node_clock() -> None:
    """When no rank moves after an incident of ten seconds, then the stall is detected once the
    limit has passed since the resume. The result is the same for any node clock."""
    for ours in (0.0, 1_000_000.0, -1_000_000.0):
        watch = Watch(POLICY)
        for step in range(100, 112):
            watch.heard(beat(step * 0.125, step), ours + step * 0.125)
        for count in range(20):
            at = 14.0 + count * 0.5
            watch.heard(beat(at, 111, moved=13.875, training=False), ours + at)
        watch.resumed(ours + 24.0)
        moments = [24.5 + count * 0.5 for count in range(51)]
        silences = [watch.heard(beat(at, 111, moved=13.875), ours + at) for at in moments]
        assert watch.limit() == 25.0
        assert silences == [None] * 50 + [25.5]


def test_silence_counts_from_a_movement_after_the_resume() -> None:
    """When a rank has moved after the time of the resume, then silence counts from that movement."""
    watch, at = learnt(0.1)
    watch.resumed(at - 1.0)
    assert watch.heard(beat(at + 0.5, 12), at + 0.5) is None
    watch.resumed(at - 1.0)
    silences = [
        watch.heard(beat(at + after, 12, moved=at + 0.5), at + after)
        for after in (0.5 + 0.9 * count for count in range(1, 23))
    ]
    assert silences == [None] * 22


def test_an_announced_phase_that_ends_early_hides_no_hang() -> None:
    """When a rank has announced that it makes no progress for an hour, and goes on after a second,
    then silence counts from there. The announced time is no step time."""
    watch, at = learnt(0.1)
    assert watch.heard(beat(at + 0.1, 12, moved=at + 3600.0), at + 0.1) is None
    assert watch.heard(beat(at + 30.0, 12, moved=at + 3600.0), at + 30.0) is None
    assert watch.heard(beat(at + 30.1, 13), at + 30.1) is None
    assert watch.limit() == pytest.approx(90.0)
    at += 30.1
    silent = [watch.heard(beat(at + n, 13, moved=at), at + n) for n in range(1, 100)]
    assert [each is not None for each in silent] == [False] * 90 + [True] * 9


def announced() -> tuple[Watch, float]:
    """
    Return a watch in which a rank of node 1 has announced a phase of an hour, and the time since when
    the rank of node 0 makes no progress. No hang was found in the 49 s since then.
    """
    watch, at = learnt(0.1)
    pulse = Pulse(
        rank=1, incarnation=0, position=Position(step=11, window=False), training=True, moved=at + 3600,
    )  # fmt: skip
    watch.heard(Beat(node=1, pulses=(pulse,), at=at), at)
    hangs = [watch.heard(beat(at + n, 11, moved=at), at + n) for n in range(1, 50)]
    assert hangs == [None] * 49
    return watch, at


def test_a_lost_node_that_had_announced_a_phase_hides_no_hang() -> None:
    """When a node is lost whose rank had announced a long phase, then the others still count."""
    watch, at = announced()
    watch.forget(1)
    assert watch.heard(beat(at + 50, 11, moved=at), at + 50) is not None


def test_a_silent_node_that_had_announced_a_phase_hides_no_hang() -> None:
    """When a node falls silent whose rank had announced a long phase, then the others still count as
    soon as the node counts as lost."""
    watch, at = announced()
    assert watch.silent(at + 49) == [1]
    assert watch.heard(beat(at + 50, 11, moved=at), at + 50) is not None


def test_a_controller_that_was_blocked_gives_up_no_node() -> None:
    """When the controller has not looked for longer than a heartbeat may take, then nodes whose
    heartbeats it has not read yet are not lost."""
    watch = Watch(POLICY)
    for node in (0, 1):
        watch.heard(Beat(node=node, pulses=(), at=0.0), 0.0)
    assert watch.silent(0.1) == []
    watch.heard(Beat(node=0, pulses=(), at=30.0), 30.0)
    assert watch.silent(30.0) == []
    for tenths in range(301, 420):
        watch.heard(Beat(node=0, pulses=(), at=tenths / 10), tenths / 10)
        lost = watch.silent(tenths / 10)
        if lost:
            break
    assert (lost, round(tenths / 10)) == ([1], 40)


def test_first_step_after_a_resume_has_ten_times_the_limit() -> None:
    """When training has just continued, then the limit is ten times the learnt limit until a step
    is done. The time of the incident is not learnt."""
    watch, at = learnt(0.5)
    watch.resumed(at + 100.0)
    assert watch.limit() == 100.0
    watch.heard(beat(at + 100.0, 12), at + 100.0)
    assert watch.limit() == 100.0
    watch.heard(beat(at + 100.5, 13), at + 100.5)
    assert watch.limit() == 10.0


def test_node_is_lost_only_while_another_node_is_heard() -> None:
    """When all nodes are silent, then the bus is the cause and no node is lost. When one node is
    silent, then that node is lost."""
    watch = Watch(POLICY)
    watch.heard(beat(0.0, 1), 0.0)
    assert watch.silent(60.0) == []
    other = Beat(node=1, pulses=(), at=60.0)
    watch.heard(other, 60.0)
    assert watch.silent(60.0) == [0]
    assert watch.silent(60.0) == []


def test_no_node_is_lost_before_the_first_beat() -> None:
    """When no node has sent a beat, then no node is lost."""
    assert Watch(POLICY).silent(60.0) == []


def test_limit_for_a_silent_node_comes_from_the_policy() -> None:
    """When the policy sets the limit for a silent node, then the hang detection gives this limit to
    callers. The report of a lost node states it."""
    assert Watch(Policy(node_silence=7.0)).node_silence == 7.0


def test_node_that_never_sends_a_beat_is_lost() -> None:
    """When three nodes have joined and one of them sends no beat for more than ten seconds, then
    only this node is lost."""
    watch = Watch(Policy(node_silence=10.0))
    for node in (0, 1, 2):
        watch.expect(node, 0.0)
    watch.heard(Beat(node=1, pulses=(), at=5.0), 5.0)
    watch.expect(1, 5.5)
    watch.heard(Beat(node=0, pulses=(), at=10.0), 10.0)
    assert watch.silent(10.0) == []
    assert watch.silent(10.5) == [2]


def test_no_node_is_lost_when_all_beats_stopped_over_a_second_ago() -> None:
    """When the last beat of any node is at most one second old, then a silent node is lost. When it
    is older, then no node is lost."""
    watch = Watch(Policy(node_silence=10.0))
    for node, at in ((0, 0.0), (1, 60.0)):
        watch.heard(Beat(node=node, pulses=(), at=at), at)
    assert watch.silent(61.5) == []
    assert watch.silent(61.0) == [0]


def test_hang_is_detected_with_any_node_clock() -> None:
    """When the clock of a node differs from the controller's clock, then a hang is detected at the
    usual limit, before and after a resume. A reset of the node's clock is no hang."""
    for ours in (1_000_000.0, -1_000_000.0):
        watch = Watch(POLICY)
        for step in range(12):
            assert watch.heard(beat(step * 0.5, step), ours + step * 0.5) is None
        watch.resumed(ours + 5.5)
        for step in range(12, 24):
            assert watch.heard(beat(step * 0.5, step), ours + step * 0.5) is None
        hangs = [watch.heard(beat(11.5 + s, 23, moved=11.5), ours + 11.5 + s) for s in range(12)]
        assert [silence is not None for silence in hangs] == [False] * 11 + [True]
        assert watch.heard(beat(1.0, 1, moved=1.0), ours + 30.0) is None
        hang = watch.heard(beat(1.9, 1, moved=1.0), ours + 30.9)
        assert hang is None


def test_all_silent_nodes_are_found_in_order() -> None:
    """When only the first and the last of four nodes are still heard, then the two nodes between
    them are returned in order."""
    watch = Watch(Policy(node_silence=10.0))
    for at, nodes in ((0.0, (0, 1, 2, 3)), (1.0, (0, 2, 3)), (2.0, (0, 1, 3)), (12.5, (0, 3))):
        for node in nodes:
            watch.heard(Beat(node=node, pulses=(), at=at), at)
    assert watch.silent(12.5) == [1, 2]
    assert watch.silent(12.5) == []


# ---------------------------------------------------------------- which rank is suspected


def test_computing_rank_is_ended_together_with_a_silent_rank() -> None:
    """When no rank makes progress, one rank is silent and only one other rank computes instead of
    waiting, then both are ended. The silent rank does not count as a waiting rank."""
    job = trained(3)
    job.ranks[2].hung = True
    job.ranks[0].loop.waiting = False
    job.stall()
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [2, 0]
    assert job.doing == "healthy"


def test_hang_counts_from_the_stall_and_in_the_step_of_the_others() -> None:
    """When a rank hangs that does not answer the order to freeze, then its fault has the time at which
    the stall was seen, not the time at which the answer was overdue, and the step that all compute."""
    job = trained(3, steps=9)
    job.ranks[2].hung = True
    job.stall()
    stalled = job.now
    job.settle()
    job.wait()
    job.settle()
    job.train()
    (fault,) = job.machine.incidents[-1].faults
    assert (fault.kind, fault.rank, fault.step, fault.seen) == ("hang", 2, 10, stalled)


def test_only_the_silent_rank_is_ended_when_no_other_rank_waits() -> None:
    """When no rank makes progress, one rank is silent and none of the other ranks waits for another
    rank, then only the silent rank is ended."""
    job = trained(3)
    job.ranks[2].hung = True
    for rank in (0, 1):
        job.ranks[rank].loop.waiting = False
    job.stall()
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [2]
    assert job.doing == "healthy"


def test_earlier_stall_of_all_ranks_does_not_affect_the_next_suspicion() -> None:
    """When no rank makes progress and none waits for another, then no rank is ended. When in the
    next stall only one rank does not wait, then this rank is ended."""
    job = trained(3)
    for rank in range(3):
        job.ranks[rank].loop.waiting = False
    job.stall()
    job.settle()
    assert job.orders(Kill) == []
    for rank in (0, 1):
        job.ranks[rank].loop.waiting = True
    job.stall()
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [2]


@pytest.mark.parametrize(("window", "step"), [(False, 4), (True, 5)])
def test_stall_without_a_suspect_is_reported_as_a_network_fault(*, window: bool, step: int) -> None:
    """When no rank makes progress and all ranks wait, then the report has a network fault without a
    rank. Its step is the one after the last updated step, and its evidence is the time of silence.
    """
    job = trained(3)
    if window:
        job.window(1)
    job.stall(5.0)
    job.settle()
    job.train()
    (incident,) = job.reports()
    (fault,) = incident["faults"]
    assert (fault["kind"], fault["rank"], fault["step"]) == ("network", None, step)
    assert "5" in fault["evidence"]
    assert job.orders(Kill) == []


def test_ranks_that_all_leave_without_a_fault_are_brought_back() -> None:
    """When all ranks have left their loops and no fault was reported, then all go back into them.
    The report says what was seen. When a rank has finished, then nothing is done: there is a
    deadline for the others."""
    job = trained(3)
    for one in job.ranks.values():
        one.training = one.loop.waiting = False
    job.stall(2.0, out=True)
    assert job.machine.incidents == []
    job.stall(5.0, out=True)
    job.settle()
    job.train()
    (incident,) = job.reports()
    (fault,) = incident["faults"]
    assert (fault["kind"], fault["rank"], incident["strategy"]) == ("network", None, "retry")
    assert fault["evidence"].startswith("all ranks have left their training loops without a fault")
    assert job.orders(Kill) == []
    job.finish(0)
    job.stall(5.0, out=True)
    assert len(job.machine.incidents) == 1
    assert job.doing == "healthy"


def test_no_rank_is_suspected_when_only_a_lost_rank_could_have_waited() -> None:
    """When no rank makes progress, one rank is lost and none of the other ranks waits for another
    rank, then no rank is ended as hung."""
    job = trained(3)
    job.script.slow = {2}
    for rank in (0, 1):
        job.ranks[rank].loop.waiting = False
    job.stall()
    job.kill(2)
    job.settle()
    job.arrive(2)
    job.settle()
    job.train()
    assert job.orders(Kill) == []
    assert strategies(job) == ["recover"]
