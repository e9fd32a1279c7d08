"""
Looks at a running job: receives for a short time the messages that its controller and agents send
in any case, and finds out where each rank stands. `tft status`, `tft top` and `tft jobs` use this
module, and `tft run` uses it for its line about progress.

A look costs the job only one more message of the controller (`Lead`).
"""

import asyncio
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from tft.bus.base import Bus, Heard, Malformed, NotLetIn
from tft.bus.zeromq import open_bus
from tft.clock import SystemClock
from tft.core.job.transitions import State
from tft.launcher.run_directory import JobThere
from tft.protocol.messages import (
    Beat,
    Envelope,
    Inquire,
    Lead,
    News,
    Notice,
    Pulse,
    Whereabouts,
)
from tft.protocol.topics import BEATS, NEWS, ORDERS, presence

FRESH = 3.0
"""Seconds without a message after which a part counts as silent. An agent sends ten heartbeats in a
second, and a controller a `Lead` each second."""
_SPAN = 10.0
"""The mean step time is computed from the steps that have ended within this many seconds."""
_REACHES = 0.5  # seconds between two looks at the connection to the broker
# seconds between two checks whether everything is known: in a large job a message comes each
# millisecond, and a check takes longer, so a check is not made for each message
_PAUSE = 0.05
_HEALTHY = str(State.HEALTHY)
_RANK = re.compile(r"rank\.(\d+)/(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeen:
    """
    The newest known state of one rank.
    """

    node: int
    pulse: Pulse
    """The newest status of the rank."""
    standstill: float
    """Seconds since the last progress of the training thread, on the clock of the rank's node."""
    step_seconds: float | None
    """The mean time of the last steps in seconds. None: no step has ended during the look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """
    The slowest and the fastest of some ranks, and the time of their steps.
    """

    slowest: RankSeen | None
    fastest: RankSeen | None
    step_seconds: float | None
    """The median of the ranks' mean times of a step in seconds."""
    standstill: float | None
    """Seconds since the last progress of any of the ranks."""


def pace(ranks: Collection[RankSeen]) -> Pace:
    """
    Return how far `ranks` have come, and how fast they are.
    """
    times = sorted(each.step_seconds for each in ranks if each.step_seconds is not None)
    return Pace(
        slowest=min(ranks, key=lambda r: (r.pulse.position.step, r.pulse.rank), default=None),
        fastest=max(ranks, key=lambda r: (r.pulse.position.step, -r.pulse.rank), default=None),
        step_seconds=times[len(times) // 2] if times else None,
        standstill=min((each.standstill for each in ranks), default=None),
    )


class Watch:
    """
    The state of a running job, as far as this process has received it in messages of the job. For
    example, `tft status` and `tft top` look at a job in this way.
    """

    def __init__(self) -> None:
        self.lead: Lead | None = None
        """The newest message `Lead` of the leading controller, which has the highest epoch."""
        self.notices: tuple[Notice, ...] = ()
        """The last sentences for people from the leading controller, the oldest first."""
        self.broker = False
        """True while this process is connected to the broker."""
        self.odd = ""
        """A sentence about the last refused connection or message that could not be read. Empty:
        none."""
        self.news = asyncio.Event()
        """Set whenever a message of the job arrives."""
        self.orders = asyncio.Event()
        """Set whenever the controller sends an order, or says that the job has another state."""
        self._clock = SystemClock()
        self._led = 0.0
        self._beats: dict[int, tuple[Beat, float]] = {}
        self._counts: dict[int, int] = {}
        self._steps: dict[int, deque[tuple[int, float]]] = {}

    # ------------------------------------------------------------ what is heard

    def heard(self, envelope: Envelope) -> None:
        """
        Update this object from a message of the job.
        """
        self.news.set()
        match envelope.message:
            case Lead() as lead:
                if self.lead is None or lead.epoch >= self.lead.epoch:
                    if self.lead is None or lead.state != self.lead.state:
                        self.orders.set()
                    self.lead, self._led = lead, self._clock.now()
                    if lead.state != _HEALTHY:
                        # otherwise the next step time would include the time of the incident
                        self._steps.clear()
            case News(epoch=epoch, notices=notices):
                if self.lead is None or epoch >= self.lead.epoch:
                    self.notices = notices
            case Beat() as beat:
                self._beats[beat.node] = (beat, self._clock.now())
                self._counts[beat.node] = self._counts.get(beat.node, 0) + 1
                for pulse in beat.pulses:
                    self._mark(pulse)
            case Whereabouts() | Inquire():
                pass  # questions about a standstill and their answers do not change the job
            case _:
                self.orders.set()

    def _mark(self, pulse: Pulse) -> None:
        """
        Record the newest step of a rank and the time at which this step ended. The time is exact:
        while no update window is open, `pulse.moved` is the time at which the last window closed.
        """
        calm = self.lead is None or self.lead.state == _HEALTHY
        if pulse.position.window or not pulse.training or not calm:
            return
        steps = self._steps.setdefault(pulse.rank, deque())
        if steps and pulse.position.step < steps[-1][0]:
            steps.clear()  # the job has returned to an earlier step
        if not steps or pulse.position.step > steps[-1][0]:
            steps.append((pulse.position.step, pulse.moved))
        while len(steps) > 2 and pulse.moved - steps[0][1] > _SPAN:
            steps.popleft()

    # ------------------------------------------------------------ what is known

    @property
    def leads(self) -> bool:
        """
        Return whether a controller has said within the last `FRESH` seconds that it leads the job.
        """
        return self.lead is not None and self._clock.now() - self._led <= FRESH

    @property
    def state(self) -> str:
        """
        The state of the job; empty if no controller has reported it within the last `FRESH`
        seconds.
        """
        return self.lead.state if self.lead is not None and self.leads else ""

    def nodes(self) -> set[int]:
        """
        Return the nodes whose agents have sent a heartbeat within the last `FRESH` seconds.
        """
        now = self._clock.now()
        return {node for node, (_, at) in self._beats.items() if now - at <= FRESH}

    def ranks(self) -> dict[int, RankSeen]:
        """
        Return the newest known state of each rank whose node has sent a heartbeat lately.
        """
        found: dict[int, RankSeen] = {}
        now = self._clock.now()
        for node in self.nodes():
            beat, heard = self._beats[node]
            for pulse in beat.pulses:
                seen = found.get(pulse.rank)
                if seen is None or seen.pulse.incarnation <= pulse.incarnation:
                    found[pulse.rank] = RankSeen(
                        node=node,
                        pulse=pulse,
                        # the time without progress when the heartbeat was sent (by the node's
                        # clock), plus the time since it arrived (by this process's clock)
                        standstill=max(0.0, beat.at - pulse.moved + now - heard)
                        if pulse.moved
                        else 0.0,
                        step_seconds=self._step_seconds(pulse.rank),
                    )
        return dict(sorted(found.items()))

    def pids(self) -> dict[tuple[int, int], int]:
        """
        Return the pids of the ranks' processes by rank and incarnation. A process is left out if
        the controller has handled no report from it, or if it is not connected any more.
        """
        names = () if self.lead is None else self.lead.heard
        found = [_RANK.fullmatch(name) for name in names]
        return {(int(m[1]), int(m[2])): int(m[3]) for m in found if m is not None}

    def complete(self, nodes: Collection[int], *, steps: bool) -> bool:
        """
        Return whether everything is known: a controller leads, and each of `nodes` has sent a
        heartbeat. With `steps`, each node must have sent two heartbeats, and each rank of a healthy
        job must have ended two steps, so that the time of a step is known.
        """
        if self.lead is None or any(self._counts.get(node, 0) < 1 + steps for node in nodes):
            return False
        if self.state != _HEALTHY or not steps:
            return True
        return all(seen.step_seconds is not None for seen in self.ranks().values())

    def _step_seconds(self, rank: int) -> float | None:
        steps = self._steps.get(rank)
        if not steps or len(steps) < 2:
            return None
        (first, began), (last, ended) = steps[0], steps[-1]
        return (ended - began) / (last - first)


@asynccontextmanager
async def watching(there: JobThere) -> AsyncIterator[Watch]:
    """
    Listen to a job while the context is open. Raises `UsageError` if the broker's address or the
    keys of the job cannot be used.
    """
    # by the prefix `ask.` the controller recognizes an operator's command, and sends a `Lead` at
    # once
    sender = f"ask.{secrets.token_hex(4)}"
    watch = Watch()
    async with open_bus(
        there.broker,
        job=there.job,
        sender=sender,
        topics=[ORDERS, BEATS, NEWS],
        curve=there.curve,
        sampled=BEATS,
    ) as bus:
        # no `TaskGroup`: it would wrap an error of the caller, such as `UsageError`, in a group
        duties = [
            asyncio.create_task(_listen(bus, watch)),
            asyncio.create_task(_reach(bus, presence(there.job, sender), watch)),
        ]
        try:
            yield watch
        finally:
            for duty in duties:
                duty.cancel()
            await asyncio.wait(duties)
        for duty in duties:
            if not duty.cancelled():
                duty.result()  # raise the exception of a failed task


async def look(
    watch: Watch, nodes: Collection[int], least: float, most: float, *, steps: bool = True
) -> None:
    """
    Listen until everything is known of a job with these `nodes` (see `Watch.complete`), but for at
    least `least` and at most `most` seconds.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(most):
            await asyncio.sleep(least)
            while not watch.complete(nodes, steps=steps):
                watch.news.clear()
                await watch.news.wait()
                await asyncio.sleep(_PAUSE)


async def _listen(bus: Bus, watch: Watch) -> None:
    while True:
        match await bus.receive():
            case Heard(envelope=envelope):
                watch.heard(envelope)
            case Malformed(why=why) | NotLetIn(why=why):
                watch.odd = why
            case _:
                pass


async def _reach(bus: Bus, topic: bytes, watch: Watch) -> None:
    """
    Keep `watch.broker` up to date: whether this process is connected to the broker. It is connected
    while its subscription to its own presence topic, `topic`, exists at the broker.
    """
    while True:
        try:
            async with asyncio.timeout(FRESH):
                await bus.listened(topic)
            watch.broker = True
            await asyncio.sleep(_REACHES)
        except TimeoutError:
            watch.broker = False
