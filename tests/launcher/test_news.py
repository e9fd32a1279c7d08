"""
The sentences of the controller that `tft run` prints while the job runs.
"""

from typing import Any

from tft.launcher.news import NewsPrinter
from tft.protocol.messages import News, Notice


def news(epoch: int, *told: tuple[int, str, int]) -> News:
    """
    Return a message with these notices: number, text and incident.
    """
    notices = [Notice(number=number, text=text, incident=i) for number, text, i in told]
    return News(epoch=epoch, notices=tuple(notices))


def test_each_sentence_is_printed_once() -> None:
    """When messages repeat sentences, then each is printed once. A controller that was started again
    counts from 1, and what an earlier one still says is ignored."""
    said: list[str] = []
    printer = NewsPrinter(said.append)
    printer.heard(news(1, (1, "a", 0)))
    printer.heard(news(1, (1, "a", 0), (2, "b", 1), (4, "d", 0)))
    printer.heard(news(2, (1, "e", 0)))
    printer.heard(news(1, (5, "f", 0)))
    printer.heard(news(2, (1, "e", 0), (2, "b", 1)))
    assert said == ["a", "b", "d", "e"]


def test_incident_without_a_message_is_printed_at_the_end() -> None:
    """When no message about an incident has arrived, then its line is printed from the report."""
    said: list[str] = []
    printer = NewsPrinter(said.append)
    printer.heard(news(1, (1, "incident 3", 3)))
    incident: dict[str, Any] = {  # Any: JSON
        "id": 3, "faults": [], "strategy": "dump", "steps_lost": 0, "seconds": {"total": 1.0},
    }  # fmt: skip
    assert printer.rest([incident, {**incident, "id": 4}]) == [
        "incident 4: the job was asked to end; the job ended with a last checkpoint; no step lost"
    ]
    assert printer.rest([incident, {**incident, "id": 4}]) == []
    assert said == ["incident 3"]
