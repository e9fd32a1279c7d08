"""
Make reports arrive once and in order over a bus that guarantees neither.

The sender numbers its reports and repeats each one until it is acknowledged (`Outbox`). The
receiver, which is the controller, accepts from each sender only the report with the next number
(`Inbox`). The controller acknowledges the highest accepted number in the field `heard` of its
`Lead` messages, which announce that it leads. A lost report is sent again; a repeated or early
report is ignored.
"""

from collections.abc import Mapping

from tft.protocol.messages import Report


class Outbox:
    """
    The reports of one sender that the receiver has not acknowledged yet.
    """

    def __init__(self) -> None:
        self._last = 0
        self._pending: dict[int, Report] = {}

    def add(self, report: Report) -> int:
        """
        Keep a report until the receiver acknowledges it. Return the number of the report, which
        must be sent with it. The first report has the number 1.
        """
        self._last += 1
        self._pending[self._last] = report
        return self._last

    def acknowledge(self, number: int) -> None:
        """
        Drop all reports whose numbers are not higher than `number`, because the receiver has
        accepted these reports. A late acknowledgement with a lower number changes nothing.
        """
        for heard in [kept for kept in self._pending if kept <= number]:
            del self._pending[heard]

    def pending(self) -> list[tuple[int, Report]]:
        """
        Return the reports that the receiver has not acknowledged, so that they must be sent again.
        Each report comes with its number, and the list is in the order of the numbers.
        """
        return list(self._pending.items())


class Inbox:
    """
    Decides which received reports are accepted. For this it keeps the highest number that was
    accepted from each sender.

    Set the parameter `gaps` if the receiver has lost its record of some reports that it had
    accepted. The senders do not repeat acknowledged reports, so the numbers of the lost reports may
    never come again. With `gaps`, any report with a higher number than the last is accepted, not
    only the next one.
    """

    def __init__(self, heard: Mapping[str, int] | None = None, *, gaps: bool = False) -> None:
        self._heard = dict(heard or {})
        self._gaps = gaps

    def accept(self, sender: str, number: int) -> bool:
        """
        Return True for the next report of `sender` (with `gaps`: for any later report), and count
        the report as accepted.

        Return False for a repeated report. Without `gaps`, also return False for a report that
        arrives although the report before it was lost. The sender repeats both reports, in order.
        """
        expected = self._heard.get(sender, 0) + 1
        if number < expected or (number > expected and not self._gaps):
            return False
        self._heard[sender] = number
        return True

    def heard(self) -> dict[str, int]:
        """
        Return the highest accepted number of each sender. The controller sends these numbers in the
        field `heard` of its `Lead` messages.
        """
        return dict(self._heard)
