"""
The sentences of the controller for people: which ones there are now, and which remarks are left out
because there are too many. Consoles print them (`tft run`, `tft top`).
"""

from collections import deque
from collections.abc import Mapping

from tft.protocol.messages import News, Notice
from tft.sentences import counted, remark_text

SPAN = 600.0
"""The time in seconds to which the limits `OF_ONE` and `OF_ALL` apply."""
OF_ONE = 4
"""The maximum number of remarks about one rank within `SPAN`. So a rank may become slow and fast
again twice."""
OF_ALL = 20
"""The maximum number of remarks about all ranks within `SPAN`."""
KEPT = 16
"""The number of last sentences that each message contains. So a console that has missed a message,
or has just started, gets them too."""


class Notices:
    """
    The last sentences of this controller. It reads no clock: the caller passes the times
    (CLOCK_MONOTONIC, in seconds).
    """

    def __init__(self) -> None:
        self._kept: deque[Notice] = deque(maxlen=KEPT)
        self._number = 0
        self._shown: deque[tuple[float, object]] = deque()
        """For each remark shown in the last `SPAN` seconds: its time, and the rank that it is
        about."""
        self._left_out = 0

    def incident(self, text: str, number: int) -> None:
        """
        Tell that an incident is over. Incidents are never left out.
        """
        self._add(text, number)

    def remark(self, event: str, facts: Mapping[str, object], at: float) -> bool:
        """
        Tell a remark about the job. Return False if it is left out, because there were too many.
        """
        about = facts.get("rank", event)
        while self._shown and at - self._shown[0][0] > SPAN:
            self._shown.popleft()
        alike = sum(whom == about for _, whom in self._shown)
        if alike >= OF_ONE or len(self._shown) >= OF_ALL:
            self._left_out += 1
            return False
        self._shown.append((at, about))
        text = remark_text(event, facts)
        if self._left_out:
            left_out = counted(self._left_out, "remark")
            text += f" ({left_out} before it were left out here: see remarks.jsonl)"
            self._left_out = 0
        self._add(text, 0)
        return True

    def news(self, epoch: int) -> News | None:
        """
        Return the message with the last sentences, or None if there is none yet. `epoch` is the
        number of this controller.
        """
        return News(epoch=epoch, notices=tuple(self._kept)) if self._kept else None

    def _add(self, text: str, incident: int) -> None:
        self._number += 1
        self._kept.append(Notice(number=self._number, text=text, incident=incident))
