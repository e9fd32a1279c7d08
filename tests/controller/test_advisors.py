"""
What plugins of a controller say, before it comes into the story: nobody could go on with a story
that cannot be read.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from tft.controller.advisors import Advisors
from tft.core.job.commands import Consult
from tft.errors import UsageError
from tft.plugins import add
from tft.protocol.messages import Noticed
from tft.spi.markers import hookimpl
from tft.spi.plugin import PluginSpecs
from tft.spi.types import Advice, CheckResult, IncidentView

CONSULT = Consult(incident=3, round=2, faults=(), offers=(), ranks=(), until=1.0)


def advisors(*said: object) -> Advisors:
    """
    One plugin for each thing that is said.
    """
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    for number, advice in enumerate(said):
        add(manager, SimpleNamespace(tft_advise=_saying(advice)), f"plugin{number}")
    return Advisors(manager)


def _saying(advice: object) -> Callable[[IncidentView], object]:
    @hookimpl
    def tft_advise(incident: IncidentView) -> object:
        return advice

    return tft_advise


@pytest.mark.parametrize(
    "strange",
    ["recover", 7, Advice(veto="recover", wait="soon")],  # type: ignore[arg-type] # that is the point
)
async def test_what_is_no_advice_is_none(strange: object) -> None:
    """
    When a plugin returns something else than an `Advice`, or one with fields of other types, then
    that is as if it had said nothing.
    """
    advised = await advisors(strange).advise(CONSULT)
    assert (advised.incident, advised.round, advised.strategy) == (3, 2, "")
    assert (advised.veto, advised.wait) == ((), 0.0)


async def test_the_others_are_heard_all_the_same() -> None:
    """
    When one of two plugins returns what is no advice, then the other one's counts.
    """
    advised = await advisors("recover", Advice(strategy="dump", why="enough")).advise(CONSULT)
    assert (advised.strategy, advised.why) == ("dump", "enough")


@pytest.mark.parametrize(
    "strange",
    ["hello", None, Noticed(rank=1, kind="tired", evidence="", at=0.0)],  # type: ignore[arg-type] # that is the point
)
def test_what_is_no_report_is_refused_where_it_is_made(strange: Any) -> None:  # Any: no report
    """
    When a plugin reports what is no message, or one that could not be read, then it is told so
    with a sentence, and nothing comes to the machine.
    """
    heard: list[object] = []
    given: list[Callable[[Any], None]] = []  # Any: as above

    @hookimpl
    def tft_on_leader(report: Callable[[Any], None]) -> None:  # Any: as above
        given.append(report)

    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    add(manager, SimpleNamespace(tft_on_leader=tft_on_leader), "scheduler")
    Advisors(manager).led(heard.append)
    with pytest.raises(UsageError):
        given[0](strange)
    assert heard == []
    sound = Noticed(rank=1, kind="memory", evidence="its card is hot", at=0.0)
    given[0](sound)
    assert heard == [sound]


def test_a_verdict_nobody_knows_is_refused_where_it_is_made() -> None:
    """
    When a check says something else than `pass`, `isolate` or `end`, then it is told so.
    """
    with pytest.raises(UsageError, match="verdict must be one of pass, isolate, end"):
        CheckResult(verdict="maybe")  # type: ignore[arg-type] # that is the point
