"""
The moments of the mishaps (injected faults and requests) in a run. Each mishap waits for its moment
and happens at most once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from tft.core.job.transitions import State
from tft.protocol.messages import FaultKind, Noticed, OrderName, Verdict
from tft.simulation import loop
from tft.simulation.clock import START
from tft.simulation.harm import Harm
from tft.simulation.schedule import ANY, ASKED, Mishap, Schedule
from tft.simulation.stage import ProcessPart, Stage

CHANCE = 0.1
"""The time in seconds after which a mishap (an injected fault or a request) that had no target is
tried again, at most `CHANCES` times."""
CHANCES = 40


@dataclass(slots=True)
class _Armed:
    """
    The mishaps (injected faults and requests) that wait for their moment, and how often each order
    and each state of the job machine was seen so far.
    """

    phases: dict[tuple[int, int, str], list[list[Mishap]]] = field(default_factory=dict)
    """By rank, step and phase: the mishaps that happen when the rank reaches this phase of the
    step."""
    orders: dict[tuple[int, str], list[list[Mishap]]] = field(default_factory=dict)
    """By rank and order: the mishaps that happen when the rank begins to carry out the order."""
    states: dict[str, list[list[Mishap]]] = field(default_factory=dict)
    """By state of the job machine: the mishaps that happen when the machine enters the state."""
    until: dict[str, list[Callable[[], None]]] = field(default_factory=dict)
    """By state of the job machine: functions that end the effect of a mishap when the machine
    enters the state."""
    orders_seen: dict[tuple[int, str], int] = field(default_factory=dict)
    states_seen: dict[str, int] = field(default_factory=dict)


class Mishaps:
    """
    All mishaps (injected faults and requests) of one schedule, before and after they happen.
    """

    def __init__(self, stage: Stage, schedule: Schedule) -> None:
        self._stage = stage
        self.happened: list[Mishap] = []
        """The mishaps (injected faults and requests) that have happened."""
        self.last = START
        """The virtual time at which the effects of all mishaps that have happened are over."""
        self.failures: dict[tuple[int, str], list[Mishap]] = {}
        self.slow: dict[tuple[int, str], Mishap] = {}
        self.late: dict[int, Mishap] = {}
        self.unkillable: dict[int, Mishap] = {}
        self.verdicts: dict[int, Verdict] = {}
        self.bad: dict[tuple[int, int], Mishap] = {}
        """By rank and batch: the mishap that makes this batch fail each time it is computed."""
        self.poison: dict[int, Mishap] = {}
        self._blind = 0
        """The number of steps after a polluted update (an update with wrong numbers) until ranks
        notice the wrong numbers."""
        self._observed: FaultKind | Literal[""] | None = ""
        """The kind of the fault that an observer will notice because of the polluted update. Empty:
        a rank will notice the wrong numbers itself. None: an observer has noticed them."""
        self.harm = Harm(stage, self)
        self._armed = _Armed()
        for mishap in schedule.mishaps:
            self._arm(mishap)

    @property
    def faults(self) -> list[Mishap]:
        """
        The mishaps that have happened, without requests and without nodes that join.
        """
        return [mishap for mishap in self.happened if mishap.what not in ASKED]

    def _arm(self, mishap: Mishap) -> None:
        armed = [mishap]
        match mishap.when:
            case "time":
                self._stage.clock.at(START + mishap.delay, self._happen, mishap)
            case "phase":
                key = (mishap.target, mishap.number, mishap.name)
                self._armed.phases.setdefault(key, []).append(armed)
            case "order":
                self._armed.orders.setdefault((mishap.target, mishap.name), []).append(armed)
            case "state":
                self._armed.states.setdefault(mishap.name, []).append(armed)
        if mishap.by:
            self._stage.clock.at(START + mishap.by, self._at_last, armed)

    # ---------------------------------------------------------------- times of mishaps

    def reached(self, process: ProcessPart, step: int, phase: str) -> bool:
        """
        Inject the faults and requests that the schedule has set for this rank, step and phase.
        Return True when the rank can go on with the step.
        """
        if not self._armed.phases:
            return True
        for armed in self._armed.phases.pop((process.rank, step, phase), ()):
            if armed:
                self._happen(armed.pop())
        return (
            process.life.alive
            and not process.thread.stuck
            and process.thread.phase not in ("leaving", "gone")
        )

    def begins(self, process: ProcessPart, order: OrderName) -> bool:
        """
        Inject the faults and requests that the schedule has set for the moment when this rank
        begins this order. Return True when the rank can go on with the order.
        """
        if self._armed.orders:
            for rank in (process.rank, ANY):
                key = (rank, order)
                seen = self._armed.orders_seen.get(key, 0)
                self._armed.orders_seen[key] = seen + 1
                self._due(self._armed.orders.get(key), seen, process.rank)
        return process.life.alive and not process.thread.stuck

    def entered(self, state: State) -> None:
        """
        Inject the faults and requests that the schedule has set for the state which the job machine
        has entered.
        """
        for come_back in self._armed.until.pop(state, ()):
            come_back()
        if self._armed.states:
            seen = self._armed.states_seen.get(state, 0)
            self._armed.states_seen[state] = seen + 1
            self._due(self._armed.states.get(state), seen, 0)

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

    def _at_last(self, armed: list[Mishap]) -> None:
        if armed:
            mishap = armed.pop()
            self._happen(replace(mishap, target=max(0, mishap.target)))

    def back(self, mishap: Mishap, come_back: Callable[[], None]) -> None:
        """
        Call the function `come_back` after the `lasting` seconds of the mishap. If the mishap has a
        state `until`, call `come_back` also when the job machine enters that state.
        """
        self._stage.clock.after(mishap.lasting, come_back)
        if mishap.until:
            self._armed.until.setdefault(mishap.until, []).append(come_back)

    def _happen(self, mishap: Mishap, tried: int = 0) -> None:
        stage = self._stage
        if stage.over is not None and mishap.name != "ended":
            return
        match self.harm.does(mishap):
            case "done":
                self.came(mishap)
            case "nobody" if tried < CHANCES:
                stage.clock.after(CHANCE, self._happen, mishap, tried + 1)
            case _:
                pass

    def came(self, mishap: Mishap) -> None:
        """
        Record that a mishap (an injected fault or a request) has happened.
        """
        self.happened.append(mishap)
        self.expect(mishap.lasting)

    def expect(self, seconds: float) -> None:
        """
        Record that the effect of a mishap (an injected fault or a request) lasts for `seconds` from
        now on.
        """
        self.last = max(self.last, self._stage.clock.now + seconds)

    # ---------------------------------------------------------------- parts that fail

    def notices(self, process: ProcessPart, step: int) -> bool:
        """
        Let a rank check the numbers that it has computed. Return True when the rank leaves its loop
        with a fault.
        """
        batch = self.bad.get((process.rank, process.memory.data + 1)) if self.bad else None
        if batch is not None:
            if batch not in self.happened:
                self.came(batch)
            loop.fault(process, "numeric", "NaN in the loss")
            return True
        polluted = self._stage.pollution.step
        if polluted is None or step - 1 < polluted + self._blind:
            return False
        if not any(content.spoilt or content.wrong for content in process.memory.content.values()):
            return False
        if self._observed == "":
            loop.fault(process, "numeric", "NaN in the parameters", polluted=True)
            return True
        if self._observed is not None:
            self._stage.outside.report(
                Noticed(
                    rank=process.rank, kind=self._observed, evidence="wrong numbers",
                    not_after=polluted - 1, at=self._stage.clock.now,
                )
            )  # fmt: skip
            self._observed = None
        return False

    def spread(self, process: ProcessPart) -> None:
        """
        Record that a rank has contributed wrong data to the all-reduces, so that all members of the
        group get wrong results.
        """
        mishap = self.poison.pop(process.rank, None)
        if mishap is not None:
            self._blind = 1 if mishap.lasting > 2 else 0
            self._observed = mishap.kind  # type: ignore[assignment] # a kind of NOTICED, or empty
            self.came(mishap)

    def failure(self, rank: int, order: OrderName) -> str | None:
        """
        Return the text of the failure that the schedule injects into an order on a rank. Return
        None when the order does not fail.
        """
        left = self.failures.get((rank, order))
        if not left:
            return None
        mishap = left.pop()
        if mishap not in self.happened:
            self.came(mishap)
        return "OSError: it broke"

    def slowness(self, rank: int, order: OrderName) -> float:
        """
        Return how many more seconds than usual a rank needs for an order.
        """
        mishap = self.slow.pop((rank, order), None)
        if mishap is None:
            return 0.0
        self.came(mishap)
        return 2.5 * mishap.lasting

    def lateness(self, rank: int) -> float:
        """
        Return how many more seconds than usual the process of a rank needs until it calls
        `tft.init`.
        """
        mishap = self.late.pop(rank, None)
        if mishap is None:
            return 0.0
        self.came(mishap)
        return 5.0 * mishap.lasting

    def held_back(self, rank: int) -> float:
        """
        Return how many more seconds than usual it takes until the process of a rank has ended.
        """
        mishap = self.unkillable.pop(rank, None)
        if mishap is None:
            return 0.0
        self.came(replace(mishap, lasting=4 * mishap.lasting))
        return 4 * mishap.lasting

    def verdict(self, rank: int) -> Verdict:
        """
        Return the verdict of a health check on a rank.
        """
        return self.verdicts.get(rank, "pass")
