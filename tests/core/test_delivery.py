"""
The delivery of reports: each arrives once and in order, even if the bus loses, repeats or reorders
messages.
"""

from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tft.core.link.delivery import Inbox, Outbox
from tft.protocol.messages import Report, Trained


def trained(step: int) -> Trained:
    return Trained(rank=0, incarnation=0, step=step, at=float(step))


def test_reports_are_numbered_from_one_and_kept_in_order() -> None:
    """When reports are added, then their numbers start at 1, and the reports stay pending in order."""
    outbox = Outbox()

    assert [outbox.add(trained(5)), outbox.add(trained(6))] == [1, 2]
    assert outbox.pending() == [(1, trained(5)), (2, trained(6))]


def test_acknowledgement_covers_all_earlier_reports() -> None:
    """When a number is acknowledged, then the report with that number and all earlier reports are
    not sent again."""
    outbox = Outbox()
    for step in (1, 2, 3):
        outbox.add(trained(step))

    outbox.acknowledge(2)
    outbox.acknowledge(1)  # an older acknowledgement that arrives late

    assert outbox.pending() == [(3, trained(3))]
    assert outbox.add(trained(4)) == 4


def test_only_the_next_report_of_a_sender_is_accepted() -> None:
    """When a report is repeated or arrives before its predecessor, then it is not accepted."""
    inbox = Inbox()

    answers = [inbox.accept("rank.3/0", number) for number in (2, 1, 1, 3, 2, 3)]

    assert answers == [False, True, False, False, True, True]
    assert inbox.heard() == {"rank.3/0": 3}


def test_later_report_is_accepted_where_reports_are_missing() -> None:
    """When accepted reports are not known any more, then a later report of the sender is accepted,
    because the sender does not repeat the missing ones. A repeated report is not accepted."""
    inbox = Inbox({"rank.3/0": 7}, gaps=True)

    answers = [inbox.accept("rank.3/0", number) for number in (7, 9, 8, 9, 10)]

    assert answers == [False, True, False, False, True]
    assert inbox.heard() == {"rank.3/0": 10}


def test_new_incarnation_of_a_rank_starts_its_own_report_count() -> None:
    """When the next process of a rank reports, then its report with number 1 is accepted, and the
    count of the earlier process continues."""
    inbox = Inbox({"rank.3/0": 7})

    assert inbox.accept("rank.3/1", 1)
    assert inbox.accept("rank.3/0", 8)
    assert inbox.heard() == {"rank.3/0": 8, "rank.3/1": 1}


def test_heard_numbers_are_returned_as_a_copy() -> None:
    """When a report is accepted later, then an earlier result of `heard` does not change."""
    inbox = Inbox()
    before = inbox.heard()

    inbox.accept("run", 1)

    assert before == {}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_reports_arrive_once_and_in_order_over_an_unreliable_bus(data: st.DataObject) -> None:
    """When frames are lost, repeated or reordered, acknowledgements come late, and the receiver
    restarts with the numbers that it has accepted so far, then each report is accepted once, in
    order."""
    outbox, inbox = Outbox(), Inbox()
    reports = [trained(step) for step in range(1, data.draw(st.integers(1, 6)) + 1)]
    unsent = list(reports)
    accepted: list[Report] = []

    def pass_on(frames: Sequence[tuple[int, Report]]) -> None:
        accepted.extend(report for number, report in frames if inbox.accept("rank.0/0", number))

    for turn in data.draw(st.lists(st.sampled_from(["add", "send", "restart", "ack"]))):
        if turn == "add" and unsent:
            outbox.add(unsent.pop(0))
        elif turn == "send" and outbox.pending():
            frames = st.lists(st.sampled_from(outbox.pending()), max_size=8)
            pass_on(data.draw(frames))
        elif turn == "restart":
            inbox = Inbox(inbox.heard())
        elif turn == "ack":
            outbox.acknowledge(data.draw(st.integers(0, inbox.heard().get("rank.0/0", 0))))
    for report in unsent:
        outbox.add(report)
    pass_on(outbox.pending())  # the last repetition of all reports arrives completely

    assert accepted == reports
