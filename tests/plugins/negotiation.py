"""
A scheduler of another make as a recovery plugin: MindIO TFT's negotiation, said in our hooks.

There a controller reports in four ways (`report_fault_ranks`, `report_stop_complete`,
`report_strategies`, `report_result`), and the orchestrator answers with calls of its own. Here the
controller decides and the plugin is asked; that is enough to speak as the other one does.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pluggy

from tests.core.lives import POLICY
from tft.controller.advisors import Advisors
from tft.core.policy import STRATEGIES, Policy
from tft.hooks import Advice, IncidentView, PluginSpecs, hookimpl
from tft.plugins import add
from tft.protocol.messages import (
    FaultKind,
    Noticed,
    OutsideReport,
    PauseRequested,
    ResumeRequested,
    StopRequested,
)
from tft.testing.scripted import ScriptedJob

MEMORY, PROCESS, NETWORK = 0, 1, 2
KIND_TO_TYPE: dict[str, int] = {
    "memory": MEMORY, "numeric": MEMORY, "corruption": MEMORY, "network": NETWORK,
}  # fmt: skip
"""The orchestrator knows three types of fault; all others are `PROCESS`."""
TYPE_TO_KIND: dict[int, FaultKind] = {MEMORY: "memory", PROCESS: "process", NETWORK: "network"}
OURS_TO_THEIRS = {
    "retry": "retry", "recover": "recover", "scale_in": "downgrade", "scale_out": "upgrade",
    "migrate": "migration", "dump": "dump", "exit": "exit",
}  # fmt: skip
THEIRS_TO_OURS = {theirs: ours for ours, theirs in OURS_TO_THEIRS.items()}

OK, ISOLATED, NOTHING_THERE, RECOVER_LEFT, DUMP_LEFT, NOTHING_LEFT = 0, 201, 404, 405, 406, 499
WAIT = 30.0
"""Seconds after which an orchestrator that has not answered is looked at again."""

Ranks = dict[int, int]
"""Rank to type of fault."""
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

    def hear(self, name: str, *facts: Any) -> None:  # Any: as in `Said`
        """
        One report of the controller.
        """
        if self.broken:
            raise ConnectionError("the orchestrator is not there")
        self.heard.append((name, *facts))
        if self.partner is not None and name in self.answers:
            self.answers[name](self.partner)


@dataclass
class Negotiator:
    """
    The plugin. Between two calls of ours it remembers where the dialogue has come to.
    """

    orchestrator: Orchestrator
    report: Callable[[OutsideReport], None] | None = None
    faults: Ranks = field(default_factory=dict)
    incident: int = 0
    seen_whole: bool = False
    """The orchestrator has given its view of all faults of the cluster."""
    joining: bool = False
    """Some of them were news: the incident is about to grow."""
    offered: list[str] = field(default_factory=list)
    wanted: str = ""
    """The strategy it has named, until it is followed."""
    followed: str = ""
    no_switch: bool = False

    def __post_init__(self) -> None:
        self.orchestrator.partner = self

    # ---------------------------------------------------------------- what the orchestrator calls

    def stop_train(self, faults: Ranks) -> None:
        """
        The cluster has seen faults before the job has.
        """
        for rank, kind in faults.items():
            self._notice(rank, TYPE_TO_KIND[kind], "the cluster reports it")

    def on_global_rank(self, faults: Ranks) -> None:
        """
        All faults that the cluster knows of: what the job has not seen becomes a fault of it.
        """
        self.seen_whole = True
        new = {rank: kind for rank, kind in faults.items() if rank not in self.faults}
        self.joining = bool(new)
        self.stop_train(new)

    def change_strategy(self, strategy: str) -> None:
        """
        What is to be done.
        """
        self.wanted = strategy

    def prepare_action(self, action: Literal["hot switch", "stop switch"], ranks: Ranks) -> None:
        """
        Ranks of which the hardware is about to fail get a second process; or they do not.
        """
        self.no_switch = action == "stop switch"
        if not self.no_switch:
            for rank in ranks:
                self._notice(rank, "straggler", "its pod is to be switched")

    def pause_train(self) -> None:
        """
        Stand still at a step boundary.
        """
        self._say(PauseRequested(why="a link is switched over", check="", at=0.0))

    def continue_train(self) -> None:
        """
        Go on.
        """
        self._say(ResumeRequested(why="it is switched", at=0.0))

    def dump(self) -> None:
        """
        Save and end.
        """
        self._say(StopRequested(why="the cluster is drained", signal=0, at=0.0))

    def _notice(self, rank: int, kind: FaultKind, why: str) -> None:
        self._say(Noticed(rank=rank, kind=kind, evidence=why, at=0.0))

    def _say(self, message: OutsideReport) -> None:
        assert self.report is not None, "nobody leads yet"
        self.report(message)

    # ---------------------------------------------------------------- what we call

    @hookimpl
    def tft_led(self, report: Callable[[OutsideReport], None]) -> None:
        """
        This is how it says what it has not been asked.
        """
        self.report = report

    @hookimpl
    def tft_told(self, event: str, facts: Mapping[str, object]) -> None:
        """
        Passes on how far it has come.
        """
        match event:
            case "paused":
                self._hear("stop_complete", OK, "paused", {})
            case "released":
                self._hear("result", OK, "ok", {}, "continue")
            case "rank_straggles" if facts["why_not"]:
                self._hear("result", DUMP_LEFT, facts["why_not"], {}, "hot switch")
            case "incident_closed":
                self._hear("result", OK, "ok", self.faults, self.followed)
                self._forget()
            case "job_ends" if facts["result"] != "completed":
                code = OK if facts["result"] == "dumped" else NOTHING_LEFT
                self._hear("result", code, facts["why"], self.faults, self.followed or "dump")
            case _:
                pass

    @hookimpl
    def tft_advise(self, incident: IncidentView) -> Advice:
        """
        The dialogue about one incident, as far as the orchestrator has answered.
        """
        faults = {
            fault.rank: KIND_TO_TYPE.get(fault.kind, PROCESS)
            for fault in incident.faults
            if fault.rank is not None
        }
        possible = [o.strategy for o in incident.offers if o.why_not is None]
        before = self.faults
        if incident.number != self.incident:
            self._forget()
            self.incident, self.faults = incident.number, faults
            self._hear("fault_ranks", faults)
            self._hear("stop_complete", NOTHING_THERE if possible == ["exit"] else OK, "", faults)
        elif faults != before:
            self.faults = faults
            self._hear("fault_ranks", faults)
        if self.joining:
            self.joining = False
            return Advice(wait=WAIT, why="what the cluster has seen joins")
        if not self.seen_whole:
            return Advice(wait=WAIT, why="the cluster's view of the faults is awaited")
        if self.followed:
            self._failed(possible)
        return self._settle(incident, [OURS_TO_THEIRS[name] for name in possible])

    # ---------------------------------------------------------------- between the two

    def _settle(self, incident: IncidentView, possible: list[str]) -> Advice:
        if possible != self.offered:
            self.offered = possible
            self._hear("strategies", self.faults, possible)
        veto = ("migrate",) if self.no_switch else ()
        if not self.wanted:
            return Advice(wait=WAIT, veto=veto, why="the cluster's choice is awaited")
        if self.wanted not in possible:
            why = f"{self.wanted} was not offered"
            self._hear("result", NOTHING_LEFT, why, self.faults, self.wanted)
            return Advice(strategy="exit", why=why)
        self.followed, self.wanted = self.wanted, ""
        ours = THEIRS_TO_OURS[self.followed]
        for offer in incident.offers:
            if offer.strategy == ours == "scale_in":
                isolated = {**dict.fromkeys(offer.leaving, PROCESS), **self.faults}
                self._hear("result", ISOLATED, "", dict(sorted(isolated.items())), self.followed)
        return Advice(strategy=ours, veto=veto, why=f"the cluster has chosen {self.followed}")

    def _failed(self, possible: list[str]) -> None:
        """
        Asked again: what was followed has not helped.
        """
        code = NOTHING_LEFT
        if self.followed == "retry" and "recover" in possible:
            code = RECOVER_LEFT
        elif "dump" in possible:
            code = DUMP_LEFT
        self._hear("result", code, "it did not help", self.faults, self.followed)
        self.followed, self.offered = "", []

    def _hear(self, name: str, *facts: Any) -> None:  # Any: as in `Said`
        self.orchestrator.hear(name, *(dict(f) if isinstance(f, dict) else f for f in facts))

    def _forget(self) -> None:
        self.faults, self.seen_whole, self.offered = {}, False, []
        self.wanted = self.followed = ""


class Negotiation:
    """
    A scripted job whose real machine asks the real `Advisors`, and they this plugin.
    """

    def __init__(self, **facts: Any) -> None:  # Any: as in `trained`
        self.orchestrator = Orchestrator()
        self.negotiator = Negotiator(self.orchestrator)
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
            job.settle()
            tells, self._told = job.tells[self._told :], len(job.tells)
            for tell in tells:
                self._advisors.told(tell.event, tell.facts)
            consults, self._asked = job.consulted[self._asked :], len(job.consulted)
            for consult in consults:
                job.report(await self._advisors.advise(consult))
            reports, self._reports[:] = list(self._reports), []
            for report in reports:
                job.report(report)
            if not (tells or consults or reports):
                return
