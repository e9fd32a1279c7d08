"""
Make reports arrive once and in order over a bus that guarantees neither.

The sender numbers its reports and repeats each one until it is acknowledged (`Outbox`). The
receiver accepts from each sender exactly the next number (`Inbox`). It acknowledges the highest
number that it has accepted, in the field `heard` of its `Lead` messages. A lost report is sent
again; a repeated or early report is ignored.
"""

from collections.abc import Mapping

from tft.protocol.messages import Report


class Outbox:
    """
    The reports of one sender that have not been acknowledged.
    """

    def __init__(self) -> None:
        self._last = 0
        self._pending: dict[int, Report] = {}

    def add(self, report: Report) -> int:
        """
        Keep a report until it is acknowledged. Return the number to send it under; the first number
        is 1.
        """
        self._last += 1
        self._pending[self._last] = report
        return self._last

    def acknowledge(self, number: int) -> None:
        """
        Drop all reports up to `number`, because the receiver has them. A late acknowledgement with
        a lower number changes nothing.
        """
        for heard in [kept for kept in self._pending if kept <= number]:
            del self._pending[heard]

    def pending(self) -> list[tuple[int, Report]]:
        """
        Return the reports that are not acknowledged and must be sent again, each with its number,
        in the order of the numbers.
        """
        return list(self._pending.items())


class Inbox:
    """
    Decides which received reports are accepted. It keeps the highest number accepted from each
    sender.

    Set `gaps` if the receiver has forgotten some of the numbers that it had accepted. Their senders
    will not repeat these reports, so any higher number is then accepted, not only the next one.
    """

    def __init__(self, heard: Mapping[str, int] | None = None, *, gaps: bool = False) -> None:
        self._heard = dict(heard or {})
        self._gaps = gaps

    def accept(self, sender: str, number: int) -> bool:
        """
        Return True for exactly the next report of `sender`, and count it as accepted.

        Return False for a repeated report, and for a report whose predecessor was lost: the sender
        will repeat first the predecessor and then this report.
        """
        expected = self._heard.get(sender, 0) + 1
        if number < expected or (number > expected and not self._gaps):
            return False
        self._heard[sender] = number
        return True

    def heard(self) -> dict[str, int]:
        """
        Return the highest accepted number of each sender. The controller sends these numbers as
        `Lead.heard`. If the process of the controller is lost, the next one creates its `Inbox`
        with them.
        """
        return dict(self._heard)
