"""
Prints the sentences that the controller sends for people, in `tft run`, each sentence once.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tft.protocol.messages import News
from tft.sentences import incident_line


class NewsPrinter:
    """
    Prints the sentences of the controller with `say`.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._epoch = 0
        self._number = 0
        self._incidents: set[int] = set()

    def heard(self, news: News) -> None:
        """
        Print what is new in a message. Each message repeats the last sentences, because a message
        may be lost.
        """
        if news.epoch < self._epoch:
            return  # the message is from an earlier controller, which does not lead any more
        if news.epoch > self._epoch:
            self._epoch, self._number = news.epoch, 0
        for notice in news.notices:
            if notice.number <= self._number:
                continue
            self._number = notice.number
            if notice.incident not in self._incidents:
                self._say(notice.text)
            if notice.incident:
                self._incidents.add(notice.incident)

    def rest(self, incidents: Sequence[dict[str, Any]]) -> list[str]:  # Any: parsed JSON
        """
        Return one line for each of the `incidents` (from the report of the job) that was not
        printed before, because no message about it has arrived.
        """
        missing = [each for each in incidents if each["id"] not in self._incidents]
        self._incidents.update(each["id"] for each in missing)
        return [incident_line(each) for each in missing]
