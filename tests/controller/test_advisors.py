"""
The check of plugins' messages before they enter the story. With an invalid message no controller
could continue from the story.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from tft.controller.advisors import Advisors
from tft.core.job.commands import Consult
from tft.errors import UsageError
from tft.plugins import add
from tft.protocol.messages import Beat, Noticed, Position, Pulse
from tft.spi.markers import hookimpl
from tft.spi.plugin import PluginSpecs
from tft.spi.types import Advice, CheckResult, IncidentView, RankBeat, Remark

CONSULT = Consult(incident=3, round=2, faults=(), offers=(), ranks=(), until=1.0)


def advisors(*said: object) -> Advisors:
    """
    Return advisors with one plugin for each object in `said`.
    """
    return advisors_of(*(SimpleNamespace(tft_advise=_saying(advice)) for advice in said))


def advisors_of(*plugins: object) -> Advisors:
    """
    Return advisors with these plugins.
    """
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    for number, plugin in enumerate(plugins):
        add(manager, plugin, f"plugin{number}")
    return Advisors(manager)


def _saying(advice: object) -> Callable[[IncidentView], object]:
    @hookimpl
    def tft_advise(incident: IncidentView) -> object:
        return advice

    return tft_advise


@pytest.mark.parametrize(
    "strange",
    [
        "recover",
        7,
        Advice(veto="recover", wait="soon"),  # type: ignore[arg-type] # invalid on purpose
        Advice(veto=None),  # type: ignore[arg-type] # the same
        Advice(veto=(), why=5),  # type: ignore[arg-type] # the same
    ],
)
async def test_invalid_advice_is_ignored(strange: object) -> None:
    """When a plugin returns something other than an `Advice`, or an `Advice` with fields of wrong
    types, then the result is the same as without advice."""
    advised = await advisors(strange).advise(CONSULT)
    assert (advised.incident, advised.round, advised.strategy) == (3, 2, "")
    assert (advised.veto, advised.wait) == ((), 0.0)


async def test_valid_advice_counts_beside_an_invalid_one() -> None:
    """When one of two plugins returns invalid advice, then the advice of the other plugin counts."""
    advised = await advisors("recover", Advice(strategy="dump", why="enough")).advise(CONSULT)
    assert (advised.strategy, advised.why) == ("dump", "enough")


HANGS = """
import asyncio, threading
from types import SimpleNamespace
from tests.controller.test_advisors import CONSULT, advisors_of
from tft.spi.markers import hookimpl

called = threading.Event()

@hookimpl
def tft_advise(incident):
    called.set()
    threading.Event().wait()

async def job():
    advisors_of(SimpleNamespace(tft_advise=tft_advise)).consult(CONSULT, print)
    while not called.is_set():
        await asyncio.sleep(0.01)

asyncio.run(job())
print("ended")
"""


def test_a_plugin_that_never_answers_does_not_keep_the_process_alive() -> None:
    """When a plugin never returns from `tft_advise`, then the process of the controller ends
    nevertheless."""
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=30, check=True
    )
    assert ended.stdout == "ended\n"


@pytest.mark.parametrize(
    "strange",
    ["hello", None, Noticed(rank=1, kind="tired", evidence="", at=0.0)],  # type: ignore[arg-type] # invalid on purpose
)
def test_invalid_report_of_a_plugin_is_refused(strange: Any) -> None:  # Any: no report
    """When a plugin reports something that is not a message, or a message with an invalid field,
    then it gets a `UsageError`. The controller gets only the valid report."""
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


def test_unknown_verdict_of_a_check_is_refused() -> None:
    """When the verdict of a check is not `pass`, `isolate` or `end`, then the error names these
    three values."""
    with pytest.raises(UsageError, match="verdict must be one of pass, isolate, end"):
        CheckResult(verdict="maybe")  # type: ignore[arg-type] # invalid on purpose


def heeding(answer: object) -> Advisors:
    """
    Return advisors with one plugin whose hook `tft_on_beat` returns `answer`.
    """
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)

    @hookimpl
    def tft_on_beat(node: int, ranks: Sequence[RankBeat]) -> object:
        return answer(ranks) if callable(answer) else answer

    add(manager, SimpleNamespace(tft_on_beat=tft_on_beat), "plugin")
    return Advisors(manager)


BEAT = Beat(
    node=1,
    pulses=(
        Pulse(
            rank=3,
            incarnation=2,
            position=Position(step=9, window=True),
            training=True,
            moved=4.5,
        ),
    ),
    at=5.0,
)


def test_a_plugin_sees_where_the_ranks_of_a_beat_are() -> None:
    """When a node sends a heartbeat, then a plugin gets the status of its ranks, and its remark is
    returned."""
    seen: list[RankBeat] = []
    remark = Remark(event="rank_slow", facts={"rank": 3})

    def answer(ranks: Sequence[RankBeat]) -> list[Remark]:
        seen.extend(ranks)
        return [remark]

    assert heeding(answer).beat(BEAT) == [remark]
    assert seen == [RankBeat(rank=3, incarnation=2, step=9, training=True, moved=4.5)]


@pytest.mark.parametrize(
    "strange",
    [
        7,
        ["slow"],
        [Remark(event="Rank slow!", facts={})],
        [Remark(event="slow", facts={"event": 1})],
        [Remark(event="slow", facts={"x": {(1, 2): 3}})],
        [Remark(event="slow", facts={"x": float("nan")})],
    ],
)
def test_an_invalid_remark_is_ignored(strange: object) -> None:
    """When a plugin returns something other than remarks, or a remark with an invalid name, then
    it is left out."""
    assert heeding(strange).beat(BEAT) == []
