"""
The messages by which one node keeps the rank-local state of another: what is sent, what is kept,
and what counts after messages were lost.
"""

from dataclasses import replace

from tft.core.link.local_states import Captures, Keeping, Sending
from tft.core.link.protection import Protection
from tft.protocol.messages import Beat, Capture, LocalStates, LocalStatesKept, Position, Pulse


def captures(
    number: int,
    *steps: tuple[int, bool, bytes],
    changes: bool = False,
    sure: bool = True,
    ended: int = 0,
) -> Captures:
    """
    Return the captures of rank 2: each with its step, whether the window had closed, and content.
    The digest of a content is its text. `ended` is the last step that the rank has ended.
    """
    return Captures(
        rank=2,
        version=(0, number),
        attempt=(1, 4),
        changes=changes,
        captures=tuple(
            Capture(step=s, closed=c, content=text.decode(), sure=sure or c, ended=s <= ended)
            for s, c, text in steps
        ),
        contents={text.decode(): text for _, _, text in steps},
    )


def answered(keeping: Keeping, message: LocalStates) -> LocalStatesKept:
    """
    Return the answer to a message that is not an old one.
    """
    answer = keeping.take(message)
    assert answer is not None
    return answer


def pair() -> tuple[Sending, Keeping]:
    """
    Return the sending half of node 0 and the keeping half of node 1, which keeps for it.
    """
    sending = Sending(0, 77)
    assert sending.send_to(1)
    return sending, Keeping(1)


def test_content_that_is_kept_already_is_not_sent_again() -> None:
    """When two captures have the same content, or the other node has a content, then the content is
    sent once."""
    sending, keeping = pair()
    first = sending.message(captures(1, (5, False, b"a")))
    assert first.contents == {"a": b"a".hex()}
    assert sending.heard(answered(keeping, first)) == (0, 1)
    second = sending.message(captures(2, (5, False, b"a"), (5, True, b"a"), (6, False, b"b")))
    assert second.contents == {"b": b"b".hex()}
    answered(keeping, second)
    assert keeping.report(0, 2, 1.0).local_state == {5: b"a".hex(), 6: b"b".hex()}


def test_captures_count_as_kept_only_when_all_contents_are_there() -> None:
    """When the other node has lost a content, such as another agent that has just come up, then it
    says so, and the content is sent with the next repetition."""
    sending, keeping = pair()
    sending.heard(answered(keeping, sending.message(captures(1, (5, True, b"a")))))
    restarted = Keeping(1)
    told = captures(2, (5, True, b"a"), (6, False, b"b"))
    answer = answered(restarted, sending.message(told))
    assert (answer.complete, answer.contents) == (False, ("b",))
    assert sending.heard(answer) is None
    assert sending.is_sent(2, (0, 2))
    assert not sending.is_kept(2, (0, 2))
    assert sending.heard(answered(restarted, sending.message(told))) == (0, 2)
    assert sending.is_kept(2, (0, 2))


def test_old_message_changes_nothing() -> None:
    """When a message arrives after a newer one of the same agent, then it is dropped."""
    sending, keeping = pair()
    old = sending.message(captures(1, (5, True, b"a")))
    new = sending.message(captures(2, (6, True, b"b")))
    keeping.take(new)
    assert keeping.take(old) is None
    assert keeping.report(0, 2, 1.0).local_state == {6: b"b".hex()}


def test_answer_for_another_node_or_agent_changes_nothing() -> None:
    """When an answer comes from a node that does not keep the captures any more, or was meant for
    an earlier agent, then it does not count."""
    sending, keeping = pair()
    answer = answered(keeping, sending.message(captures(1, (5, True, b"a"))))
    assert sending.heard(replace(answer, keeper=3)) is None
    assert sending.heard(replace(answer, pid=78)) is None
    assert not sending.send_to(1)
    assert sending.send_to(2)
    assert sending.heard(answer) is None
    assert not sending.is_kept(2, (0, 1))


def test_capture_of_the_closed_window_comes_first() -> None:
    """When a step has a capture from before and one from after the end of its window, then the
    later one is reported. A step that has not ended is marked, if captures change late."""
    sending, keeping = pair()
    told = captures(
        3, (5, True, b"late"), (5, False, b"soon"), (6, False, b"next"), changes=True, ended=5
    )
    keeping.take(sending.message(told))
    report = keeping.report(0, 2, 1.0)
    assert report.local_state == {5: b"late".hex(), 6: b"next".hex()}
    assert report.early == (6,)
    assert (report.incident, report.round) == (1, 4)


def test_capture_that_may_still_change_is_kept_and_not_used() -> None:
    """When a capture may still change before the all-reduces of its step, then it is kept, and
    reported only when the rank has said that it is sure. Its content is not sent again for that."""
    sending, keeping = pair()
    told = sending.message(captures(1, (5, True, b"a"), (6, False, b"b"), sure=False))
    sending.heard(answered(keeping, told))
    assert keeping.report(0, 2, 1.0).local_state == {5: b"a".hex()}
    sure = sending.message(captures(2, (5, True, b"a"), (6, False, b"b")))
    assert sure.contents == {}
    keeping.take(sure)
    assert keeping.report(0, 2, 1.0).local_state == {5: b"a".hex(), 6: b"b".hex()}


def test_node_forgets_what_another_node_keeps() -> None:
    """When another node keeps the captures of a node, then they are dropped. Those of a lost node,
    of which no node is named, stay."""
    sending, keeping = pair()
    keeping.take(sending.message(captures(1, (5, True, b"a"))))
    keeping.forget({0: 1, 1: 2})
    keeping.forget({1: 2, 2: 1})
    assert keeping.report(0, 2, 1.0).local_state == {5: b"a".hex()}
    keeping.forget({0: 2})
    report = keeping.report(0, 2, 1.0)
    assert (report.incarnation, report.local_state) == (-1, {})


def test_unprotected_steps_are_those_of_the_rank_with_the_most() -> None:
    """When beats tell how many windows have opened too early, then the highest sum of a rank over
    its nodes is the number of the job."""
    protection = Protection()
    assert protection.steps() == 0
    for node, counts in ((0, {0: 2, 1: 4}), (1, {2: 3}), (0, {0: 3, 1: 4}), (1, {0: 2})):
        pulses = tuple(
            Pulse(
                rank=rank, incarnation=0, position=Position(step=1, window=False), training=True,
                moved=1.0, unprotected=count,
            )
            for rank, count in counts.items()
        )  # fmt: skip
        protection.heard(Beat(node=node, pulses=pulses, at=1.0))
    assert protection.steps() == 5
