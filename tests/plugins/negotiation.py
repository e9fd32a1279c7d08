"""
A scheduler of another make as a recovery plugin: MindIO TFT's negotiation, said in our hooks.

There a controller reports in four ways (`report_fault_ranks`, `report_stop_complete`,
`report_strategies`, `report_result`), and the orchestrator answers with calls of its own. Here the
controller decides and the plugin is asked; that is enough to speak as the other one does.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pluggy
from mindio_ttp.negotiator import Negotiator

from tests.core.lives import POLICY
from tft.controller.advisors import Advisors
from tft.core.job.policy import STRATEGIES, Policy
from tft.plugins import add
from tft.protocol.messages import (
    OutsideReport,
)
from tft.spi.plugin import PluginSpecs
from tft.testing.scripted import ScriptedJob

Said = tuple[Any, ...]  # Any: a name and its arguments


@dataclass
class Orchestrator:
    """
    The other side: keeps what it hears, and answers as a test has it answer.
    """

    heard: list[Said] = field(default_factory=list)
    answers: dict[str, Callable[["Negotiator"], None]] = field(default_factory=dict)
    """What it calls back at once, by the name of what it hears."""
    broken: bool = False
    partner: "Negotiator | None" = None

    def present(self) -> bool:
        """
        It is always there.
        """
        return True

    def hear(self, name: str, *facts: Any) -> None:  # Any: as in `Said`
        """
        One report of the controller.
        """
        if self.broken:
            raise ConnectionError("the orchestrator is not there")
        self.heard.append((name, *facts))
        if self.partner is not None and name in self.answers:
            self.answers[name](self.partner)


class Negotiation:
    """
    A scripted job whose real machine asks the real `Advisors`, and they this plugin.
    """

    def __init__(self, **facts: Any) -> None:  # Any: as in `trained`
        self.orchestrator = Orchestrator()
        self.negotiator = Negotiator(self.orchestrator, block=0.0, limit=1e9)
        self.orchestrator.partner = self.negotiator
        manager = pluggy.PluginManager("tft")
        manager.add_hookspecs(PluginSpecs)
        add(manager, self.negotiator, "negotiator")
        self._advisors = Advisors(manager)
        self._reports: list[OutsideReport] = []
        self._told = self._asked = 0
        limits = {name: value for name, value in facts.items() if name in POLICY}
        rest = {name: value for name, value in facts.items() if name not in POLICY}
        policy = Policy(advised=self._advisors.present(), **limits)
        self.job = ScriptedJob(4, policy, **{"strategies": STRATEGIES, **rest})
        self._advisors.led(self._reports.append)
        self.job.start()
        self.job.train(3)

    def news(self) -> list[Said]:
        """
        What the orchestrator has heard since it was looked at last.
        """
        heard, self.orchestrator.heard = self.orchestrator.heard, []
        return heard

    def on(self, name: str, answer: Callable[[Negotiator], None]) -> None:
        """
        What the orchestrator calls when it hears this.
        """
        self.orchestrator.answers[name] = answer

    def settle(self) -> None:
        """
        Everyone does and says what they have to, until nothing is left.
        """
        asyncio.run(self._settle())

    def until(self, state: str) -> None:
        """
        Everyone does what they have to, as far as it takes to come to a state.
        """
        while self.job.doing != state:
            self._deliver()
            if self.job.doing != state:
                self.job.obey_next()

    def train(self) -> None:
        """
        A step, and what follows from it.
        """
        self.job.train()
        self.settle()

    def wait(self) -> None:
        """
        Until the next limit.
        """
        self.job.wait()
        self.settle()

    async def _settle(self) -> None:
        job = self.job
        while True:
            delivered = self._deliver()
            job.settle()
            tells, self._told = job.tells[self._told :], len(job.tells)
            for tell in tells:
                self._advisors.told(tell.event, tell.facts)
            consults, self._asked = job.consulted[self._asked :], len(job.consulted)
            for consult in consults:
                job.report(await self._advisors.advise(consult))
            if not (delivered or tells or consults or self._reports):
                return

    def _deliver(self) -> bool:
        """
        What the orchestrator has asked for comes in; whether there was anything.
        """
        reports, self._reports[:] = list(self._reports), []
        for report in reports:
            self.job.report(report)
        return bool(reports)
