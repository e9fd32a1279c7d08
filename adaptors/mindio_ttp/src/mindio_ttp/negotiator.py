"""
A recovery plugin that lets an orchestrator (the manager of a cluster) take part in a recovery, as
in the library MindIO.

The controller of MindIO sends four reports (`report_fault_ranks`, `report_stop_complete`,
`report_strategies`, `report_result`) to the orchestrator. The orchestrator answers by calling the
controller. In tft the controller decides, and asks its plugins for advice. When the controller asks
this plugin, the plugin sends MindIO's reports. The plugin turns the orchestrator's calls into
advice.
"""

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mindio_ttp import logs
from tft.spi import (
    Advice,
    FaultKind,
    IncidentView,
    Noticed,
    OutsideReport,
    PauseRequested,
    ResumeRequested,
    StopRequested,
    SwitchRequested,
    hookimpl,
)

MEMORY, PROCESS, NETWORK = 0, 1, 2
KIND_TO_TYPE: dict[str, int] = {
    "memory": MEMORY, "numeric": MEMORY, "corruption": MEMORY, "network": NETWORK,
}  # fmt: skip
"""Maps a kind of fault in tft to a type of fault for the orchestrator, which knows only three
types. A kind of fault that is not in this table has the type `PROCESS`."""
TYPE_TO_KIND: dict[int, FaultKind] = {MEMORY: "memory", PROCESS: "process", NETWORK: "network"}
OURS_TO_THEIRS = {
    "exit": "exit", "dump": "dump", "retry": "retry", "recover": "recover",
    "scale_in": "downgrade", "scale_out": "upgrade", "migrate": "migration",
}  # fmt: skip
"""Maps the name of a recovery strategy in tft to its name in MindIO. The strategies that are
possible in an incident are offered to the orchestrator in the order of this table, the best
strategy last."""
TAKEN_AWAY = frozenset({"straggler", "node", "process"})
"""The kinds of fault that tft notices when ranks move to other processes because the cluster needs
the hardware of these ranks. After the cluster has announced such a move, faults of these kinds are
no real faults."""
TAKING_OVER = ("migrate", "recover")
"""The strategies of tft by which a prepared second process of a rank can take the place of the
first process. If the first process has already ended, `recover` has the same effect as
`migrate`."""
GIVE_UP = ("dump", "exit")
"""The strategies that the orchestrator may choose while another strategy is being carried out."""
THEIRS_TO_OURS = {theirs: ours for ours, theirs in OURS_TO_THEIRS.items()}

OK, ISOLATED, NOTHING_THERE, RECOVER_LEFT, DUMP_LEFT, NOTHING_LEFT = 0, 201, 404, 405, 406, 499
"""The result codes in reports to the orchestrator. `OK`: success. `ISOLATED`: ranks leave the job.
`NOTHING_THERE`: no strategy but `exit` is possible. The last three codes say what is still possible
after a strategy has failed: `recover`, `dump` or nothing."""
BLOCK = 25.0
"""The seconds for which one call of the hook `tft_advise` waits for an answer of the orchestrator.
The controller's own time limit for this hook is longer."""
WAIT = 30.0
"""If the orchestrator has not answered, the controller calls the hook `tft_advise` again after this
number of seconds."""
CODE = re.compile(r"device error ([0-9A-Za-z]+)")
"""The pattern that finds the error code of a device in the description of a fault."""

Ranks = dict[int, int]
"""The type of a dict that maps a rank to its type of fault: `MEMORY`, `PROCESS` or `NETWORK`."""

log = logs.get_logger()


class Orchestrator(Protocol):
    """
    The connection to the orchestrator (the manager of a cluster), with the methods that the plugin
    uses.
    """

    def present(self) -> bool:
        """Return whether an orchestrator is connected."""

    def hear(self, name: str, *facts: Any) -> None:  # Any: facts of various types
        """Send the report `name` with its facts to the orchestrator."""


@dataclass
class Negotiator:
    """
    The recovery plugin that asks an orchestrator (the manager of a cluster) which strategy to
    follow in an incident.

    The dialogue about an incident may take several calls of the hook `tft_advise`, so the fields
    store its state. `block` is the time in seconds for which one call of the hook waits for the
    orchestrator. `limit` is the time in seconds that the orchestrator has for an answer over all
    calls.
    """

    orchestrator: Orchestrator
    block: float = BLOCK
    limit: float = 30.0
    report: Callable[[OutsideReport], None] | None = None
    """The function that sends a message to the controller. None until the controller of this
    process leads."""
    faults: Ranks = field(default_factory=dict)
    """Maps each faulty rank of the incident to its type of fault, as last reported to the
    orchestrator."""
    incident: int = 0
    """The number of the incident that the present dialogue with the orchestrator is about."""
    seen_whole: bool = False
    """True if the orchestrator has reported all faults that the cluster knows. The plugin offers
    strategies only after this report."""
    joining: frozenset[int] = frozenset()
    """The ranks with faults that tft had not detected when the orchestrator reported them. These
    faults are now being added to the incident."""
    offered: list[str] = field(default_factory=list)
    """The recovery strategies that were last offered to the orchestrator, by MindIO's names."""
    wanted: str = ""
    """The strategy that the orchestrator has chosen, by MindIO's name, and that the plugin has not
    yet advised. Empty if there is no such strategy."""
    followed: str = ""
    """The strategy, by MindIO's name, that is being carried out because the orchestrator has chosen
    it. Empty if there is no such strategy."""
    switching: frozenset[int] = frozenset()
    """The ranks that are to move to other processes, at the request of the orchestrator."""
    staying: frozenset[int] = frozenset()
    """The ranks whose move to another process the orchestrator has cancelled."""
    fewer: bool = False
    """True if the job continues with fewer ranks, because the orchestrator has chosen the strategy
    `downgrade`."""
    growing: bool = False
    """True if the orchestrator has chosen the strategy `upgrade`, so that the ranks that left the
    job come back as soon as possible."""
    _opened: int = 0
    """The number of the incident whose faults were last reported to the orchestrator. For an
    incident with another number, the dialogue begins anew."""
    _silent: float = 0.0
    """The time in seconds for which the plugin has waited for the orchestrator since the
    orchestrator's last call. The plugin stops waiting when the time reaches `limit` and
    `_granted`."""
    _granted: float = 0.0
    """The time in seconds that the orchestrator has asked for in this incident, if it is longer than
    `limit`."""
    _asked: int = 0
    _turn: threading.Condition = field(
        default_factory=lambda: threading.Condition(threading.RLock())
    )
    _pause_limit: threading.Timer | None = None
    _pauses: int = 0

    def changed(self) -> None:
        """
        Start the dialogue about an open incident again, because another orchestrator decides from
        now on, or because no orchestrator is left.

        The new orchestrator gets the reports about the incident when the controller calls the hook
        `tft_advise` next.
        """
        with self._turn:
            self._opened, self.offered = 0, []
            self._news()

    # ---------------------------------------------------------------- calls of the orchestrator

    def stop_train(self, faults: Ranks) -> None:
        """
        Tell the controller about faults that the cluster has detected. tft itself may not have
        detected these faults yet. `faults` maps a rank to its type of fault.
        """
        with self._turn:
            for rank, kind in faults.items():
                if rank not in self.faults:
                    self._notice(rank, TYPE_TO_KIND[kind], "the cluster has reported this fault")
            self._news()

    def on_global_rank(self, faults: Ranks, seconds: float = 0.0) -> None:
        """
        Handle the orchestrator's report of all faults that the cluster knows. A fault that tft has
        not detected is added to the incident. `faults` maps a rank to its type of fault.

        `seconds` is the time that network links may need until they work again. The orchestrator
        has at least this time to choose a strategy for this incident.
        """
        with self._turn:
            self.seen_whole = True
            self._granted = max(self._granted, seconds)
            new = {rank: kind for rank, kind in faults.items() if rank not in self.faults}
            self.joining = frozenset(new)
            self.stop_train(new)

    def change_strategy(self, strategy: str) -> None:
        """
        Accept the strategy that the orchestrator has chosen. `strategy` is MindIO's name of the
        strategy, or `continue`, which ends a pause.

        While a strategy is being carried out, only `dump` and `exit` are accepted. A choice that is
        not accepted is logged and ignored.
        """
        with self._turn:
            if strategy == "continue":
                self.continue_train()
            elif self.followed and strategy in GIVE_UP:
                # handle the strategy `exit` as `dump`, so that a last checkpoint is saved if
                # possible
                self.followed = "dump"
                self._say(StopRequested(why=f"the cluster chose {strategy}", signal=0, at=0.0))
            elif self.offered and not self.followed:
                self.wanted = strategy
            elif strategy == "upgrade" and self.fewer and not self.followed:
                self.growing = True
            else:
                log.warning("choice_ignored", strategy=strategy, why="no strategy is offered now")
            self._news()

    def prepare_action(self, action: str, ranks: Ranks) -> None:
        """
        Start or cancel the preparation of second processes, which are to take the places of the
        present processes of some ranks.

        With the action `hot switch`, a second process is prepared for each rank in `ranks`, because
        the hardware of the rank is about to fail. With the action `stop switch`, the preparation of
        all ranks is cancelled.
        """
        with self._turn:
            stops = action == "stop switch"
            self.staying = self.switching if stops else frozenset()
            self.switching = frozenset() if stops else frozenset(ranks)
            why = "the cluster has cancelled the move" if stops else "the cluster moves the pod"
            asked = tuple(sorted(self.switching))
            self._say(SwitchRequested(ranks=asked, why=why, at=0.0))
            self._news()

    def pause_train(self, seconds: float | None = None) -> None:
        """
        Pause training between two steps, for at most `seconds` seconds. None means that the pause
        has no time limit.
        """
        with self._turn:
            self._forget_pause()
            self._say(PauseRequested(why="the cluster switches a link", check="", at=0.0))
            if seconds is not None:
                self._pauses += 1
                told = (self._pauses, seconds)
                self._pause_limit = threading.Timer(seconds, self._pause_over, told)
                self._pause_limit.daemon = True
                self._pause_limit.start()

    def continue_train(self) -> None:
        """
        End the pause of training.
        """
        self._forget_pause()
        self._say(ResumeRequested(why="the orchestrator ends the pause of training", at=0.0))

    def dump(self) -> None:
        """
        Make the controller save a last checkpoint and end the job.
        """
        self._say(StopRequested(why="the cluster is drained", signal=0, at=0.0))

    def _pause_over(self, pause: int, seconds: float) -> None:
        why = f"the cluster has not continued the job for {seconds:.0f} s"
        with self._turn:
            if self._pause_limit is None or pause != self._pauses:
                # this pause of training was ended already, while this thread waited for the lock
                return
            self._hear("result", DUMP_LEFT, why, {}, "continue")
            self._say(ResumeRequested(why=why, at=0.0))

    def _forget_pause(self) -> None:
        if self._pause_limit is not None:
            self._pause_limit.cancel()
            self._pause_limit = None

    def _notice(self, rank: int, kind: FaultKind, why: str) -> None:
        self._say(Noticed(rank=rank, kind=kind, evidence=why, at=0.0))

    def _say(self, message: OutsideReport) -> None:
        if self.report is None:
            raise RuntimeError("no controller leads the job yet: call this after `tft_on_leader`")
        self.report(message)

    def _news(self) -> None:
        self._silent = 0.0
        self._turn.notify_all()

    # ---------------------------------------------------------------- hooks

    @hookimpl
    def tft_on_leader(self, report: Callable[[OutsideReport], None]) -> None:
        """
        Store the function `report`, by which this plugin can send a message to the controller at
        any time. tft calls this hook when the controller of this process begins to lead the job.
        """
        self.report = report

    @hookimpl
    def tft_on_event(self, event: str, facts: Mapping[str, object]) -> None:
        """
        Report the progress of the job to the orchestrator, if `event` matters to the orchestrator.
        `facts` has the details of the event.
        """
        with self._turn:
            match event:
                case "paused":
                    self._hear("stop_complete", OK, "paused", {})
                case "released":
                    self._forget_pause()
                    self._hear("result", OK, "ok", {}, "continue")
                case "switch_called_off" if self.switching:
                    self.switching = frozenset()
                    self._hear("result", DUMP_LEFT, facts["why"], {}, "hot switch")
                case "incident_closed":
                    self._hear("result", OK, "ok", self.faults, self.followed)
                    self.staying = frozenset()
                    if self.followed == "migration":
                        self.switching = frozenset()
                    if self.followed in ("downgrade", "upgrade"):
                        self.fewer, self.growing = self.followed == "downgrade", False
                    self._forget()
                case "job_ends" if facts["result"] != "completed":
                    code = OK if facts["result"] == "dumped" else NOTHING_LEFT
                    strategy = self.followed or "dump"
                    self._hear("result", code, facts["why"], self.faults, strategy)
                case _:
                    pass

    @hookimpl
    def tft_advise(self, incident: IncidentView) -> Advice | None:
        """
        Continue the dialogue with the orchestrator about one incident. Return the advice to the
        controller that follows from the orchestrator's answers so far.

        The advice may be to wait and call this hook again. Return None if no orchestrator is
        connected. Also return None if the controller has called this hook again meanwhile, because
        further faults were added to the incident.
        """
        with self._turn:
            self._asked += 1
            asked, left = self._asked, self.block
            while self.orchestrator.present():
                advice = self._consider(incident)
                if not advice.wait:
                    return advice
                rest = max(self.limit, self._granted) - self._silent
                if rest <= 0.0:
                    return Advice(why=f"the cluster has not answered for {self._silent:.0f} s")
                if left <= 0.0:
                    wait = min(advice.wait, rest)
                    self._silent += wait
                    return replace(advice, wait=wait)
                left = min(left, rest)
                if not self._turn.wait(left):
                    self._silent += left
                    left = 0.0
                if self._asked > asked:
                    # give no answer, because the controller has called this hook again, with more
                    # faults
                    return None
        return None

    def _consider(self, incident: IncidentView) -> Advice:
        faults = {
            fault.rank: KIND_TO_TYPE.get(fault.kind, PROCESS)
            for fault in incident.faults
            if fault.rank is not None
        }
        codes = {
            fault.rank: match[1] if (match := CODE.search(fault.evidence)) else ""
            for fault in incident.faults
            if fault.rank is not None
        }
        possible = {o.strategy for o in incident.offers if o.why_not is None}
        if self._is_switch(incident, possible):
            return self._switch(incident, faults, possible)
        if self.growing and not incident.faults and "scale_out" in possible:
            return self._grow(incident)
        before = self.faults
        if incident.number != self._opened:
            self._forget()
            self._forget_pause()
            self.incident, self.faults = incident.number, faults
            self._opened = incident.number
            self._hear("fault_ranks", faults, codes)
            self._hear("stop_complete", NOTHING_THERE if possible == {"exit"} else OK, "", faults)
        elif faults != before:
            self.faults = faults
            # A strategy that was chosen before the new faults were known may be wrong. So forget
            # the chosen strategy, and offer the strategies again.
            self.offered, self.wanted = [], ""
            self._hear("fault_ranks", faults, codes)
        joining, self.joining = self.joining, frozenset()
        if not joining <= faults.keys():
            # wait once only: tft does not add a fault of a rank that has left the job
            return Advice(wait=WAIT, why="faults that the cluster has reported are being added")
        if not self.seen_whole:
            return Advice(wait=WAIT, why="the cluster has not yet reported all faults it knows")
        if self.followed:
            self._failed(possible)
        theirs = [theirs for ours, theirs in OURS_TO_THEIRS.items() if ours in possible]
        return self._settle(incident, theirs)

    # ---------------------------------------------------------------- the dialogue

    def _is_switch(self, incident: IncidentView, possible: set[str]) -> bool:
        """
        Return whether the incident is no real fault, but only a move: prepared second processes are
        to take the places of the first processes of some ranks.

        The result is also True if the orchestrator has cancelled this move meanwhile. The first
        processes may have ended already, because the cluster can end them before it chooses the
        strategy. `possible` are the strategies of tft that are possible in the incident.
        """
        kinds = {fault.kind for fault in incident.faults}
        if "straggler" not in kinds or not kinds <= TAKEN_AWAY:
            return False
        ranks = {fault.rank for fault in incident.faults}
        if not self.switching:
            return ranks <= self.staying
        return ranks <= self.switching and not possible.isdisjoint(TAKING_OVER)

    def _switch(self, incident: IncidentView, faults: Ranks, possible: set[str]) -> Advice:
        """
        Offer the orchestrator the strategy `migration`: the prepared second processes take the
        places of the first processes of their ranks. Return the advice to the controller.

        No fault is reported to the orchestrator, because nothing has failed. If the orchestrator
        has cancelled the move, return advice that forbids the strategy `migrate`.
        """
        if not self.switching:
            return Advice(veto=("migrate",), why="there is no fault, and no rank has to move")
        if incident.number != self.incident:
            self._forget()
            self.incident, self.faults = incident.number, faults
        left = [theirs for ours, theirs in OURS_TO_THEIRS.items() if ours in possible & {*GIVE_UP}]
        advice = self._settle(incident, [*left, "migration"])
        way = next(each for each in TAKING_OVER if each in possible)
        return replace(advice, strategy=way) if advice.strategy == "migrate" else advice

    def _grow(self, incident: IncidentView) -> Advice:
        """
        Return the advice to bring back the ranks that left the job, because these ranks are ready
        now. The orchestrator has chosen the strategy `upgrade` before.
        """
        self._forget()
        self.incident = self._opened = incident.number
        self.followed, self.growing, self.seen_whole = "upgrade", False, True
        return Advice(strategy="scale_out", why="the cluster has chosen upgrade")

    def _settle(self, incident: IncidentView, possible: list[str]) -> Advice:
        if possible != self.offered:
            self.offered, self.wanted = possible, ""
            self._hear("strategies", self.faults, possible)
        if not self.wanted:
            return Advice(wait=WAIT, why="the cluster has not chosen a strategy yet")
        if self.wanted not in possible:
            why = (
                f"the cluster has chosen the recovery strategy {self.wanted}, which is not among "
                "those that the controller has offered"
            )
            self._hear("result", NOTHING_LEFT, why, self.faults, self.wanted)
            return Advice(strategy="exit", why=why)
        self.followed, self.wanted = self.wanted, ""
        ours = THEIRS_TO_OURS[self.followed]
        for offer in incident.offers:
            if offer.strategy == ours == "scale_in":
                isolated = {**dict.fromkeys(offer.leaving, PROCESS), **self.faults}
                self._hear("result", ISOLATED, "", dict(sorted(isolated.items())), self.followed)
        return Advice(strategy=ours, why=f"the cluster has chosen {self.followed}")

    def _failed(self, possible: set[str]) -> None:
        """
        Report to the orchestrator that the strategy that it has chosen has failed. This method is
        called when the controller asks for advice again about the same incident.

        `possible` are the strategies of tft that are still possible.
        """
        code = NOTHING_LEFT
        if self.followed == "retry" and "recover" in possible:
            code = RECOVER_LEFT
        elif "dump" in possible:
            code = DUMP_LEFT
        failed, self.followed, self.offered = self.followed, "", []
        self._hear("result", code, "it did not help", self.faults, failed)

    def _hear(self, name: str, *facts: Any) -> None:  # Any: facts of various types
        self.orchestrator.hear(name, *(dict(f) if isinstance(f, dict) else f for f in facts))

    def _forget(self) -> None:
        self.faults, self.seen_whole, self.offered = {}, False, []
        self.wanted = self.followed = ""
        self._silent = self._granted = 0.0
        self.joining = frozenset()
