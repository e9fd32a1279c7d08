"""
The watch over progress: limits that are learnt, silence that is judged.
"""

from tft.core.job.policy import Policy
from tft.core.link.hang_detection import HangDetection
from tft.protocol.messages import Beat, Position, Pulse

POLICY = Policy(stall_floor=1.0, stall_factor=20.0, first_step=600.0)


def beat(at: float, step: int, *, moved: float | None = None, training: bool = True) -> Beat:
    """
    One rank of one node.
    """
    pulse = Pulse(
        rank=0,
        incarnation=0,
        position=Position(step=step, window=False),
        training=training,
        moved=at if moved is None else moved,
    )
    return Beat(node=0, pulses=(pulse,), at=at)


def learnt(seconds: float) -> tuple[HangDetection, float]:
    """
    A watch that has seen steps of this length, and the time now.
    """
    watch, at = HangDetection(POLICY), 0.0
    for step in range(12):
        at = step * seconds
        assert watch.heard(beat(at, step), at) is None
    return watch, at


def test_the_limit_is_learnt_from_the_steps_of_the_job() -> None:
    """
    When steps take half a second, then twenty of them are the limit; short ones have a floor.
    """
    assert learnt(0.5)[0].limit() == 10.0
    assert learnt(0.001)[0].limit() == 1.0


def test_before_step_times_are_known_the_limit_is_that_of_a_first_step() -> None:
    """
    When nothing has been learnt, then compilation gets its time.
    """
    watch = HangDetection(POLICY)
    watch.heard(beat(0.0, 0), 0.0)
    assert watch.limit() == 600.0


def test_silence_beyond_the_limit_is_a_stall() -> None:
    """
    When nobody has moved for longer than the limit, then the silence is returned.
    """
    watch, at = learnt(0.1)
    silences = [
        watch.heard(beat(at + after, 11, moved=at), at + after) for after in (0.5, 1.0, 1.9, 2.5)
    ]
    assert silences[:3] == [None, None, None]
    assert silences[3] is not None
    assert silences[3] > 2.0


def test_a_machine_that_was_paused_is_not_a_rank_that_hangs() -> None:
    """
    When the agent itself was silent, then everyone on its node stood still with it, and the
    silence begins anew.
    """
    watch, at = learnt(0.1)
    assert watch.heard(beat(at + 30.0, 11, moved=at), at + 30.0) is None
    assert watch.heard(beat(at + 30.9, 11, moved=at), at + 30.9) is None


def test_a_beat_that_comes_late_is_not_a_rank_that_hangs() -> None:
    """
    When the broker was away, then what counts is how old the movement was when the beat left.
    """
    watch, at = learnt(0.1)
    assert watch.heard(beat(at + 0.1, 12), at + 500.0) is None


def test_ranks_that_are_out_of_the_loop_cannot_stall() -> None:
    """
    When everyone is parked in an incident, then silence means nothing.
    """
    watch, at = learnt(0.1)
    assert watch.heard(beat(at + 99, 11, moved=at, training=False), at + 99) is None


def test_after_a_resume_silence_counts_from_there() -> None:
    """
    When training goes on after an incident, then the incident is not held against it.
    """
    watch, at = learnt(0.1)
    watch.resumed(at + 50.0)
    assert watch.heard(beat(at + 51.0, 11, moved=at), at + 51.0) is None


def test_a_node_is_lost_only_while_another_one_is_heard() -> None:
    """
    When all nodes are silent, that is the bus; when one is, that is the node.
    """
    watch = HangDetection(POLICY)
    watch.heard(beat(0.0, 1), 0.0)
    assert watch.silent(60.0) == []
    other = Beat(node=1, pulses=(), at=60.0)
    watch.heard(other, 60.0)
    assert watch.silent(60.0) == [0]
    assert watch.silent(60.0) == []


def test_a_node_may_have_a_clock_of_its_own() -> None:
    """
    When a node's clock began at another time than ours, then a hang is noticed as on any other,
    also after training has gone on from a moment of our clock, and after its clock began anew.
    """
    for ours in (1_000_000.0, -1_000_000.0):
        watch = HangDetection(POLICY)
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


def test_whoever_came_first_does_not_hide_who_falls_silent() -> None:
    """
    When of four nodes the first and the last are heard on, then the two between them are named in order,
    whichever of them was heard last.
    """
    watch = HangDetection(Policy(node_silence=10.0))
    for at, nodes in ((0.0, (0, 1, 2, 3)), (1.0, (0, 2, 3)), (2.0, (0, 1, 3)), (12.5, (0, 3))):
        for node in nodes:
            watch.heard(Beat(node=node, pulses=(), at=at), at)
    assert watch.silent(12.5) == [1, 2]
    assert watch.silent(12.5) == []
