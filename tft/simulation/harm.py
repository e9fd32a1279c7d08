"""
The effects of the mishaps of a schedule. A mishap is an injected fault of a process, a node, the
network or a controller, or a request of a person or a plugin.
"""

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from tft.core.job.commands import Consult
from tft.core.job.policy import STRATEGIES
from tft.protocol.messages import (
    Advised,
    FaultKind,
    NodeLost,
    Noticed,
    PauseRequested,
    ResumeRequested,
    StopRequested,
    SwitchRequested,
    Verdict,
)
from tft.simulation import loop
from tft.simulation.leader import start_controller
from tft.simulation.page import Page
from tft.simulation.process import Process
from tft.simulation.schedule import Mishap
from tft.simulation.stage import LeaderPart, NodePart, ProcessPart, Stage

BOOT = 0.7
"""The time in seconds from the end of a controller to the start of the next controller, if there is
no standby controller."""
STANDING_BY = 10.0
"""The time in seconds, after the leading controller is gone, within which a standby controller has
certainly taken over."""
RESTART = 0.3
"""The time in seconds after which an agent that has ended is started again."""
IN_LOOP = ("forward", "all-reduce", "window", "tail", "average")
"""The phases in which a training thread works in its training loop, or waits there for other ranks.
The phase `gate`, in which an order holds the rank before an update, is not one of them."""


FINDS: Mapping[str, Verdict] = {"isolate": "isolate", "end": "end"}
"""By the `kind` of a requested pause (mishap `pause`): the verdict of the health check in that
pause. For other kinds the verdict is `pass`."""
Done = Literal["done", "later", "nobody"]
"""The result of injecting a mishap (a fault or a request). `done`: the mishap has happened.
`later`: the mishap will happen when its condition is met. `nobody`: the mishap had no target."""


class Armed(Protocol):
    """
    The mishaps (injected faults and requests) that wait for their moment, and the methods to record
    those that have happened.
    """

    failures: dict[tuple[int, str], list[Mishap]]
    slow: dict[tuple[int, str], Mishap]
    late: dict[int, Mishap]
    unkillable: dict[int, Mishap]
    verdicts: dict[int, Verdict]
    bad: dict[tuple[int, int], Mishap]
    poison: dict[int, Mishap]

    def back(self, mishap: Mishap, come_back: Callable[[], None]) -> None:
        """
        Call the function `come_back` when the effect of a mishap (an injected fault) is over.
        """

    def came(self, mishap: Mishap) -> None:
        """
        Record that a mishap (an injected fault or a request) has happened.
        """

    def expect(self, seconds: float) -> None:
        """
        Record that the effect of a mishap (an injected fault or a request) lasts for `seconds` from
        now on.
        """


class Harm:
    """
    Carries out the mishaps of a schedule: injects the faults into the simulated cluster, and sends
    the requests.
    """

    def __init__(self, stage: Stage, mishaps: Armed) -> None:
        self._stage = stage
        self._mishaps = mishaps
        self.meddled = False
        """True when a recovery plugin has asked for a strategy other than `retry` and `recover`
        (such as a strategy of its own), or has ruled out a strategy."""

    def does(self, mishap: Mishap) -> Done:
        """
        Inject the fault of a mishap, or send its request. Return `done`, `later` or `nobody` (see
        `Done`).
        """
        stage, mishaps = self._stage, self._mishaps
        match mishap.what:
            case "request" | "pause" | "resume" | "switch" | "notice" | "advise":
                self._asks(mishap)
                return "done"
            case "come":
                stage.cluster.nodes[mishap.target].start()
                return "done"
            case "node" | "partition" | "agent" | "beats":
                return self._node(mishap)
            case "unreadable":
                return self._unreadable()
            case "broker":
                stage.network.away = True
                stage.clock.after(mishap.lasting, self._broker_back)
                return "done"
            case "controller" | "deposed":
                return self._controller(mishap)
            case "store":
                node = stage.cluster.nodes[mishap.target % stage.schedule.nodes]
                node.open_store()
                return "done" if node.alive else "nobody"
            case "fail":
                key = (mishap.target, mishap.name)
                mishaps.failures[key] = [mishap] * (4 if mishap.lasting > 2 else 1)
                return "later"
            case "slow":
                mishaps.slow[mishap.target, mishap.name] = mishap
                return "later"
            case "late":
                mishaps.late[mishap.target] = mishap
                return "later"
            case "unkillable":
                mishaps.unkillable[mishap.target] = mishap
                return "later"
            case _:
                process = self._process(mishap.target)
                if process is None or process.thread.stuck:
                    return "nobody"
                return self._process_mishap(mishap, process)

    # ---------------------------------------------------------------- processes

    def _process(self, rank: int) -> ProcessPart | None:
        for node in self._stage.cluster.nodes.values():
            process = node.process(rank)
            if process is not None and process.life.alive:
                return process
        return None

    def _process_mishap(self, mishap: Mishap, process: ProcessPart) -> Done:
        stage = self._stage
        match mishap.what:
            case "kill":
                process.node.ended(process, -9)
            case "hang" | "stop":
                if all(other.life.joined is None for other in stage.cluster.processes):
                    # while no process has called tft.init, the controller ends no process for a
                    # hang, because a script may run for any time before that call
                    return "nobody"
                process.hang(wholly=mishap.what == "stop")
            case "impostor":
                return self._impostor(process)
            case "flip":
                return self._flip(mishap, process)
            case "context":
                process.collectives.context_lost = True
                # outside the training loop, the rank notices the lost device context at its next
                # order
                if process.thread.phase in IN_LOOP:
                    loop.fault(process, "process", "Boom: the context is lost")
            case _ if process.thread.phase not in IN_LOOP:
                return "nobody"
            case "pollute":
                process.collectives.poison = True
                self._mishaps.poison[process.rank] = mishap
                return "later"
            case "bad batch":
                self._mishaps.bad[process.rank, process.memory.data + 1] = mishap
                return "later"
            case "memory" | "corruption" | "numeric" | "network" | "software":
                if mishap.what in ("memory", "corruption"):
                    for name in process.memory.content:
                        process.memory.content[name] = stage.truth.wrong()
                loop.fault(process, mishap.what, f"Boom: {mishap.what}")
            case _:
                raise ValueError(f"{mishap.what} does not happen to a process")
        return "done"

    def _flip(self, mishap: Mishap, process: ProcessPart) -> Done:
        """
        Change the content of a shard of a rank, without a report or an exception. If the rank is
        fetching, change the fetched content later.
        """
        if (
            process.thread.phase == "working"
            and process.thread.task is not None
            and process.thread.task.name == "fetch"
        ):
            process.memory.miscopies = mishap
            return "later"
        if process.held() is None or process.thread.phase == "starting" or not self._stage.begun:
            return "nobody"
        self._touch(mishap, process, list(process.memory.content))
        return "done"

    def miscopied(self, process: ProcessPart) -> None:
        """
        If a silent corruption waits for the end of this rank's fetch, apply it now.
        """
        mishap, process.memory.miscopies = process.memory.miscopies, None
        if mishap is not None:
            self._touch(mishap, process, list(process.memory.content))
            self._mishaps.came(mishap)

    def _touch(self, mishap: Mishap, process: ProcessPart, shards: list[str]) -> None:
        # `lasting` is a random number of the schedule. A corruption has no duration, so the number
        # is used to select the shard and the slice.
        name = shards[int(1000 * mishap.lasting) % len(shards)]
        number = int(mishap.lasting) % max(1, self._stage.schedule.slices)
        settings = mishap.kind == "settings"
        process.memory.content[name] = self._stage.truth.flipped(
            process.memory.content[name], settings=settings, number=number
        )
        process.memory.unsaid = True

    def _impostor(self, process: ProcessPart) -> Done:
        """
        Start a second process of a rank's script, with the environment of the first process. No
        order asked for the second process.
        """
        if process.thread.phase == "starting":
            # The process that the controller has ordered has not joined yet. The controller would
            # accept the second process as the holder of the rank, so start none now.
            return "nobody"
        node = process.node
        stranger = Process(self._stage, node, process.rank, process.incarnation, Page(_nothing))
        node.admit(stranger)
        self._stage.cluster.processes.append(stranger)
        stranger.join()
        return "done"

    # ---------------------------------------------------------------- nodes and controllers

    def _node(self, mishap: Mishap) -> Done:
        stage, back = self._stage, self._mishaps.back
        node = stage.cluster.nodes[mishap.target]
        if not node.alive:
            return "nobody"
        match mishap.what:
            case "partition":
                node.connection.link.mute, node.connection.link.deaf = (
                    mishap.kind != "deaf",
                    mishap.kind != "mute",
                )
                back(mishap, node.connected)
                return "done"
            case "beats":
                node.connection.beats = False
                back(mishap, node.beats_again)
                return "done"
            case "agent":
                node.vanish()
                stage.clock.after(RESTART, node.comes_back)
                return "done"
            case _:
                return self._lost(mishap, node)

    def _lost(self, mishap: Mishap, node: NodePart) -> Done:
        stage = self._stage
        # `seen` is True if the launcher reports that the node is lost. The launcher always reports
        # the end of an agent that has not sent its first report yet.
        seen = mishap.loud or stage.schedule.nodes == 1 or not node.started
        node.vanish()
        if mishap.lasting > 1:
            self._mishaps.back(mishap, node.comes_back)
        if seen:
            why = "its agent has ended"
            lost = NodeLost(node=node.number, pid=node.pid, why=why, at=stage.clock.now)
            stage.clock.after(stage.rng.choice((0.0, 0.05)), stage.outside.report, lost)
        return "done"

    def _unreadable(self) -> Done:
        """
        Make the checkpoint that was written last on the shared file system unreadable.
        """
        disk = self._stage.disk
        if not disk.whole:
            return "nobody"
        disk.unreadable.add(next(reversed(disk.whole)))
        return "done"

    def _broker_back(self) -> None:
        self._stage.network.away = False

    def _controller(self, mishap: Mishap) -> Done:
        stage = self._stage
        leader = self._leader()
        if leader is None:
            return "nobody"
        self._mishaps.expect(STANDING_BY)
        others = any(each is not leader for each in stage.cluster.leaders)
        if mishap.what == "controller":
            leader.die()
        else:
            leader.muffled = True
            leader.link.deaf = mishap.kind == "deaf"
        if not others:
            stage.clock.after(BOOT, start_controller, stage)
        return "done"

    def _leader(self) -> LeaderPart | None:
        return next((each for each in self._stage.cluster.leaders if each.leads), None)

    # ---------------------------------------------------------------- requests of people and plugins

    def _asks(self, mishap: Mishap) -> None:
        stage, kind = self._stage, mishap.kind
        report, now = stage.outside.report, stage.clock.now
        match mishap.what:
            case "request":
                report(StopRequested(why="asked to", signal=mishap.target, at=now))
            case "pause":
                self._mishaps.verdicts[mishap.target] = FINDS.get(kind, "pass")
                report(PauseRequested(why="asked to", check="links" if kind else "", at=now))
                if not kind:
                    resume = ResumeRequested(why="asked to", at=now)
                    stage.clock.after(mishap.lasting, report, resume)
            case "resume":
                report(ResumeRequested(why="asked to", at=now))
            case "switch":
                self._switch(mishap)
            case "advise":
                leader = self._leader()
                if leader is not None:
                    leader.advise(self._unasked(leader, kind))
            case _:
                self._notice(mishap)

    def _switch(self, mishap: Mishap) -> None:
        """
        Request that a rank moves to another node. If the mishap has a `kind`, request the same for
        the next rank. If the mishap has a `number`, withdraw the request after `lasting` seconds.
        """
        stage = self._stage
        report, last = stage.outside.report, stage.schedule.world - 1
        ranks = {mishap.target, min(mishap.target + 1, last)} if mishap.kind else {mishap.target}
        asked = tuple(sorted(ranks))
        report(SwitchRequested(ranks=asked, why="asked to", at=stage.clock.now))
        if mishap.number:
            over = SwitchRequested(ranks=(), why="asked to", at=stage.clock.now)
            stage.clock.after(mishap.lasting, report, over)

    def _notice(self, mishap: Mishap) -> None:
        """
        Report a fault of a rank as an observer outside the job. With `lasting` above 1, a `numeric`
        or `corruption` report says that all ranks may have wrong numbers (`polluted`).
        """
        kind: FaultKind = mishap.kind  # type: ignore[assignment] # the kind is one of NOTICED
        now = self._stage.clock.now
        polluted = kind in ("numeric", "corruption") and mishap.lasting > 1
        self._stage.outside.report(
            Noticed(
                rank=mishap.target, kind=kind, evidence=f"it looks like {kind}", polluted=polluted,
                at=now,
            )
        )  # fmt: skip

    def _unasked(self, leader: LeaderPart, strategy: str) -> Advised:
        incident = leader.machine.incident
        return self._meddles(
            Advised(
                incident=incident.number, round=incident.round, strategy=strategy,
                why="it is better", at=self._stage.clock.now,
            )
        )  # fmt: skip

    def _meddles(self, advised: Advised) -> Advised:
        own = advised.base or advised.strategy not in ("", "retry", "recover")
        self.meddled = self.meddled or bool(own or advised.veto)
        return advised

    def advice(self, consult: Consult) -> list[tuple[float, Advised]]:
        """
        Return random advice of the recovery plugins that are asked. Each piece of advice comes with
        its delay in seconds.
        """
        count = self._stage.rng.choice((0, 1, 1, 1, 2))
        return [self._advises(consult) for _ in range(count)]

    def _advises(self, consult: Consult) -> tuple[float, Advised]:
        rng = self._stage.rng
        stale = rng.random() < 0.15
        offered = [offer.strategy for offer in consult.offers if offer.why_not is None]
        own = rng.random() < 0.3
        base = rng.choice(offered) if own else ""
        step = consult.offers[0].step
        far = own and step and rng.random() < 0.2
        other = own and rng.random() < 0.3
        delay = (6.0 if rng.random() < 0.15 else 1.5) * rng.random()
        advised = Advised(
            incident=consult.incident,
            round=consult.round - stale,
            strategy="mine" if own else rng.choice(("", *offered, *STRATEGIES, "exit")),
            base=base,
            not_after=step - 1 if far and step else None,
            skip=rng.choice((0, 0, 1)) if own else 0,
            replace=(rng.randrange(self._stage.schedule.world),) if other else (),
            veto=(rng.choice(STRATEGIES),) if rng.random() < 0.2 else (),
            wait=rng.choice((0.0, 0.0, 0.0, 1.0, 2.0)),
            why="it is better",
            at=self._stage.clock.now,
        )
        return delay, self._meddles(advised)


def _nothing() -> None:
    """
    Do nothing. A process that no agent has started has a page (shared memory) of its own, which
    calls this function when it records a data position (the number of batches drawn). No agent
    sends such a position to another node.
    """
