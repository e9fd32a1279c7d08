"""
An external scheduler as a recovery plugin: MindIO TFT's negotiation, carried out with the hooks of
tft.

MindIO's controller sends four reports (`report_fault_ranks`, `report_stop_complete`,
`report_strategies`, `report_result`), and the orchestrator answers with calls of its own. The
controller of tft decides and asks the plugin, which is enough for the same dialogue.
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

Said = tuple[Any, ...]  # Any: the name of a call and its arguments


@dataclass
class Orchestrator:
    """
    The external scheduler: records the reports, and answers as the test specifies.
    """

    heard: list[Said] = field(default_factory=list)
    answers: dict[str, Callable[["Negotiator"], None]] = field(default_factory=dict)
    """The call with which the orchestrator answers a report at once, by the name of the report."""
    broken: bool = False
    partner: "Negotiator | None" = None

    def present(self) -> bool:
        """
        Return True: the scheduler is always connected.
        """
        return True

    def hear(self, name: str, *facts: Any) -> None:  # Any: as in `Said`
        """
        Receive one report of the controller.
        """
        if self.broken:
            raise ConnectionError("the orchestrator is not there")
        self.heard.append((name, *facts))
        if self.partner is not None and name in self.answers:
            self.answers[name](self.partner)


class Negotiation:
    """
    A scripted job whose real machine asks the real `Advisors`, which ask this plugin.
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
        Return the reports that the orchestrator has received since the last call.
        """
        heard, self.orchestrator.heard = self.orchestrator.heard, []
        return heard

    def on(self, name: str, answer: Callable[[Negotiator], None]) -> None:
        """
        Set the call that the orchestrator makes when it receives the report `name`.
        """
        self.orchestrator.answers[name] = answer

    def settle(self) -> None:
        """
        Carry out all orders and requests until none is left.
        """
        asyncio.run(self._settle())

    def until(self, state: str) -> None:
        """
        Carry out orders until the job is in this state.
        """
        while self.job.doing != state:
            self._deliver()
            if self.job.doing != state:
                self.job.obey_next()

    def train(self) -> None:
        """
        Train a step, and carry out the orders that follow.
        """
        self.job.train()
        self.settle()

    def wait(self) -> None:
        """
        Advance the time to the next deadline.
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
        Deliver the requests of the orchestrator. Return True if there were any.
        """
        reports, self._reports[:] = list(self._reports), []
        for report in reports:
            self.job.report(report)
        return bool(reports)
