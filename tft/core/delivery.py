"""
Reports that arrive once and in order over a bus that promises neither.

The sender numbers its reports and repeats them until they are acknowledged (`Outbox`); the
receiver takes from each sender exactly the next number (`Inbox`), and says with `Lead.heard` how
far it has come. What is lost is repeated, what is doubled or early is absorbed.
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
        Keep a report until it is acknowledged; the number to send it under, from 1.
        """
        self._last += 1
        self._pending[self._last] = report
        return self._last

    def acknowledge(self, number: int) -> None:
        """
        Everything up to `number` was heard. An older acknowledgement that comes late changes
        nothing.
        """
        for heard in [kept for kept in self._pending if kept <= number]:
            del self._pending[heard]

    def pending(self) -> list[tuple[int, Report]]:
        """
        What is to be sent again, in order.
        """
        return list(self._pending.items())


class Inbox:
    """
    How far each sender has been heard.
    """

    def __init__(self, heard: Mapping[str, int] | None = None) -> None:
        self._heard = dict(heard or {})

    def accept(self, sender: str, number: int) -> bool:
        """
        True for exactly the next report of `sender`, which is then heard.

        False for a repeated one, and for one whose predecessor was lost: that one is sent again,
        and this one after it.
        """
        if number != self._heard.get(sender, 0) + 1:
            return False
        self._heard[sender] = number
        return True

    def heard(self) -> dict[str, int]:
        """
        Sender to the highest number accepted: the content of `Lead.heard`, and of the next
        `Inbox` should this one's process be lost.
        """
        return dict(self._heard)
