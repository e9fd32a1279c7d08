"""
The sentences that the controller sends to consoles (`tft run`, `tft top`), which print them for
people. If there are too many remarks, some remarks are left out.
"""

from collections import deque
from collections.abc import Mapping

from tft.protocol.messages import News, Notice
from tft.sentences import counted, remark_text

SPAN = 600.0
"""The time in seconds to which the limits `OF_ONE` and `OF_ALL` apply."""
OF_ONE = 4
"""The maximum number of remarks about one rank within `SPAN`. Four are enough to say twice that the
rank has become slow and fast again."""
OF_ALL = 20
"""The maximum number of remarks about all ranks within `SPAN`."""
KEPT = 16
"""How many of the newest sentences each message contains, so that a console that has missed a
message, or has just started, gets earlier sentences too."""


class Notices:
    """
    The newest sentences for consoles. This class reads no clock: the caller passes the times
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
        Add `text`, the sentence about an incident that is over. Such sentences are never left out.
        """
        self._add(text, number)

    def remark(self, event: str, facts: Mapping[str, object], at: float) -> bool:
        """
        Add the sentence about a remark. Return False if the sentence is left out, because there
        were too many remarks.
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
