"""
What goes wrong in a run, and when: each mishap waits for its moment and happens once.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from tft.core.commands import Consult
from tft.core.policy import STRATEGIES
from tft.core.table import State
from tft.protocol.messages import (
    Advised,
    FaultKind,
    NodeLost,
    Noticed,
    OrderName,
    PauseRequested,
    ResumeRequested,
    StopRequested,
    Verdict,
)
from tft.testing.cluster import loop
from tft.testing.cluster.leader import start_controller
from tft.testing.cluster.node import Page
from tft.testing.cluster.process import Process
from tft.testing.cluster.schedule import ANY, Mishap, Schedule
from tft.testing.cluster.stage import START

if TYPE_CHECKING:
    from tft.testing.cluster.stage import Stage

BOOT = 0.7
"""Seconds from the death of a controller to the next one, where none stands by."""


class Mishaps:
    """
    All mishaps of one schedule.
    """

    def __init__(self, stage: "Stage", schedule: Schedule) -> None:
        self._stage = stage
        self.happened: list[Mishap] = []
        self.last = START
        """When the last effect of any of them will be over."""
        self._phases: dict[tuple[int, int, str], list[Mishap]] = {}
        self._orders: dict[tuple[int, str], list[list[Mishap]]] = {}
        self._states: dict[str, list[list[Mishap]]] = {}
        self._failures: dict[tuple[int, str], int] = {}
        self._slow: dict[tuple[int, str], float] = {}
        self._verdicts: dict[int, Verdict] = {}
        self._bad: set[tuple[int, int]] = set()
        """Rank and batch: what cannot be computed, however often it is tried."""
        self._blind = 0
        """How many more steps it takes to notice that numbers have gone bad."""
        self._orders_seen: dict[tuple[int, str], int] = {}
        self._states_seen: dict[str, int] = {}
        for mishap in schedule.mishaps:
            self._arm(mishap)

    def _arm(self, mishap: Mishap) -> None:
        match mishap.when:
            case "time":
                self._stage.clock.at(START + mishap.delay, self._happen, mishap)
            case "phase":
                key = (mishap.target, mishap.number, mishap.name)
                self._phases.setdefault(key, []).append(mishap)
            case "order":
                self._orders.setdefault((mishap.target, mishap.name), []).append([mishap])
            case "state":
                self._states.setdefault(mishap.name, []).append([mishap])

    # ---------------------------------------------------------------- the moments

    def reached(self, process: Process, step: int, phase: str) -> bool:
        """
        A rank is in a phase of a step; True when it stays there.
        """
        if not self._phases:
            return True
        for mishap in self._phases.pop((process.rank, step, phase), ()):
            self._happen(mishap)
        return process.alive and not process.stuck and process.phase not in ("leaving", "gone")

    def begins(self, process: Process, order: OrderName) -> bool:
        """
        A rank begins to carry out an order; True when it gets to it.
        """
        if self._orders:
            for rank in (process.rank, ANY):
                key = (rank, order)
                seen = self._orders_seen.get(key, 0)
                self._orders_seen[key] = seen + 1
                self._due(self._orders.get(key), seen, process.rank)
        return process.alive and not process.stuck

    def entered(self, state: State) -> None:
        """
        The job machine has entered a state.
        """
        if self._states:
            seen = self._states_seen.get(state, 0)
            self._states_seen[state] = seen + 1
            self._due(self._states.get(state), seen, 0)

    def _due(self, waiting: list[list[Mishap]] | None, seen: int, rank: int) -> None:
        for armed in waiting or ():
            if armed and armed[0].number <= seen:
                mishap = armed.pop()
                if mishap.target == ANY:
                    mishap = replace(mishap, target=rank)
                if mishap.delay:
                    self._stage.clock.after(mishap.delay, self._happen, mishap)
                else:
                    self._happen(mishap)

    def notices(self, process: Process, step: int) -> bool:
        """
        A rank looks at what it has computed; True when it is a fault.
        """
        if self._bad and (process.rank, process.data + 1) in self._bad:
            loop.fault(process, "numeric", "NaN in the loss")
            return True
        polluted = self._stage.polluted
        if polluted is None or step - 1 < polluted + self._blind:
            return False
        if all(
            content == self._stage.truth.value(step - 1) for content in process.content.values()
        ):
            return False
        loop.fault(process, "numeric", "NaN in the parameters", polluted=True)
        return True

    # ---------------------------------------------------------------- hooks that do not do as they should

    def failure(self, rank: int, order: OrderName) -> str | None:
        """
        Why an order fails that a rank carries out now.
        """
        left = self._failures.get((rank, order), 0)
        if not left:
            return None
        self._failures[rank, order] = left - 1
        return "OSError: it broke"

    def slowness(self, rank: int, order: OrderName) -> float:
        """
        How many more seconds it takes.
        """
        return self._slow.pop((rank, order), 0.0)

    def verdict(self, rank: int) -> Verdict:
        """
        What a check finds on a rank.
        """
        return self._verdicts.get(rank, "pass")

    # ---------------------------------------------------------------- what happens

    def _happen(self, mishap: Mishap) -> None:
        stage = self._stage
        if stage.over is not None:
            return
        self.happened.append(mishap)
        self.last = max(self.last, stage.clock.now + mishap.lasting)
        match mishap.what:
            case "node" | "partition":
                self._node(mishap)
            case "broker":
                stage.network.away = True
                stage.clock.after(mishap.lasting, self._broker_back)
            case "controller" | "deposed":
                self._controller(mishap)
            case "store":
                stage.nodes[mishap.target % stage.schedule.nodes].open_store()
            case "pause":
                self._pause(mishap)
            case "resume":
                stage.outside.report(ResumeRequested(why="asked to", at=stage.clock.now))
            case "request":
                stage.outside.report(
                    StopRequested(why="asked to", signal=mishap.target, at=stage.clock.now)
                )
            case _:
                process = self._process(mishap.target)
                if process is not None and not process.stuck:
                    self._process_mishap(mishap, process)

    def _process(self, rank: int) -> Process | None:
        for node in self._stage.nodes.values():
            process = node.process(rank)
            if process is not None and process.alive:
                return process
        return None

    def _process_mishap(self, mishap: Mishap, process: Process) -> None:
        stage = self._stage
        match mishap.what:
            case "kill":
                process.node.ended(process, -9)
            case "hang" | "stop":
                process.hang(wholly=mishap.what == "stop")
            case "fail":
                self._failures[process.rank, mishap.name] = 4 if mishap.lasting > 2 else 1
            case "slow":
                self._slow[process.rank, mishap.name] = 2.5 * mishap.lasting
            case "impostor":
                self._impostor(process)
            case "notice":
                self._notice(mishap)
            case "pollute":
                process.poison = True
                self._blind = 1 if mishap.lasting > 2 else 0
            case "bad batch":
                self._bad.add((process.rank, process.data + 1))
            case "memory" | "corruption" | "numeric" | "network" | "software":
                if process.phase not in ("forward", "sums", "window"):
                    return
                if mishap.what in ("memory", "corruption"):
                    for name in process.content:
                        process.content[name] = stage.truth.wrong()
                loop.fault(process, mishap.what, f"Boom: {mishap.what}")
            case _:
                raise ValueError(f"{mishap.what} does not happen to a process")

    def _notice(self, mishap: Mishap) -> None:
        """
        Somebody sees a fault from outside. That numbers are bad is seen in all ranks, or in one.
        """
        kind: FaultKind = mishap.kind  # type: ignore[assignment] # one of NOTICED
        self._stage.outside.report(
            Noticed(
                rank=mishap.target, kind=kind, evidence=f"it looks like {kind}", at=self._stage.clock.now,
                polluted=kind in ("numeric", "corruption") and mishap.lasting > 1,
            )
        )  # fmt: skip

    def _pause(self, mishap: Mishap) -> None:
        clock, kind = self._stage.clock, mishap.kind
        self._verdicts[mishap.target] = kind if kind in ("isolate", "end") else "pass"  # type: ignore[assignment] # mypy does not narrow by `in`
        check = "links" if kind else ""
        self._stage.outside.report(PauseRequested(why="asked to", check=check, at=clock.now))
        if not kind:
            resume = ResumeRequested(why="asked to", at=clock.now)
            clock.after(mishap.lasting, self._stage.outside.report, resume)

    def advice(self, consult: Consult) -> list[tuple[float, Advised]]:
        """
        What recovery plugins say when they are asked, and after how many seconds: anything.
        """
        rng = self._stage.rng
        advised = []
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            late = rng.random() < 0.15
            offered = [offer.strategy for offer in consult.offers if offer.why_not is None]
            own = rng.random() < 0.3
            base = rng.choice(offered) if own else ""
            step = consult.offers[0].step
            advised.append(
                (
                    1.5 * rng.random(),
                    Advised(
                        incident=consult.incident,
                        round=consult.round - late,
                        strategy="mine" if own else rng.choice(("", *offered, *STRATEGIES, "exit")),
                        base=base,
                        not_after=step - 1 if own and step and rng.random() < 0.2 else None,
                        skip=rng.choice((0, 0, 1)) if own else 0,
                        replace=(rng.randrange(self._stage.schedule.world),)
                        if own and rng.random() < 0.3
                        else (),
                        veto=(rng.choice(STRATEGIES),) if rng.random() < 0.2 else (),
                        wait=rng.choice((0.0, 0.0, 0.0, 1.0, 2.0)),
                        why="it is better",
                        at=self._stage.clock.now,
                    ),
                )
            )
        return advised

    def _impostor(self, process: Process) -> None:
        """
        The script of a rank is started again by somebody, with the environment it had.
        """
        if process.phase == "starting":
            return  # whoever comes first is taken for the one that was ordered
        node = process.node
        stranger = Process(self._stage, node, process.rank, process.incarnation, Page())
        node.admit(stranger)
        self._stage.processes.append(stranger)
        stranger.join()

    def _node(self, mishap: Mishap) -> None:
        stage = self._stage
        node = stage.nodes[mishap.target]
        if not node.started:
            return  # a node that never comes is waited for, as long as whoever started the job likes
        if mishap.what == "partition":
            node.link.cut = True
            stage.clock.after(mishap.lasting, self._node_back, mishap.target)
            return
        node.vanish()
        if mishap.lasting > 1:
            stage.clock.after(mishap.lasting, node.comes_back)
        if mishap.loud or stage.schedule.nodes == 1:
            lost = NodeLost(node=node.number, why="its agent has ended", at=stage.clock.now)
            stage.clock.after(0.05, stage.outside.report, lost)

    def _node_back(self, number: int) -> None:
        self._stage.nodes[number].link.cut = False

    def _broker_back(self) -> None:
        self._stage.network.away = False

    def _controller(self, mishap: Mishap) -> None:
        stage = self._stage
        leader = next((each for each in stage.leaders if each.leads), None)
        if leader is None:
            return
        self.last += 10.0  # those that stand by have their patience
        others = any(each is not leader for each in stage.leaders)
        if mishap.what == "controller":
            leader.die()
        else:
            leader.muffled = True
        if not others:
            stage.clock.after(BOOT, start_controller, stage)
