"""
The control thread: the part of a worker that receives orders and sends reports.

It runs next to the training thread, and is simple on purpose. It reads messages from the bus and
passes each order to the rank machine (`RankMachine`). This state machine decides how the rank
reacts, and the control thread carries out its commands.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol, assert_never, get_args

import structlog

from tft.bus.base import Bus, Gone, Heard, Malformed, NotLetIn, Present
from tft.bus.zeromq import open_bus
from tft.clock import SystemClock
from tft.config import RankSettings
from tft.core.link.delivery import Outbox
from tft.core.rank.machine import RankMachine
from tft.core.rank.protocol import (
    Abort,
    Answer,
    Execute,
    HoldAfter,
    LeaveAfter,
    Leaving,
    Located,
    Lock,
    Locked,
    Ordered,
    RankCommand,
    RankEvent,
    Unlock,
    Unlocked,
    Withdraw,
    Withdrawn,
    Woken,
)
from tft.errors import InternalError, PeerError, RankTaken, UsageError
from tft.limits import no_thread
from tft.protocol.messages import (
    ORDER_NAMES,
    Inquire,
    Joined,
    Lead,
    RankOrder,
    RankReport,
    Refused,
    Resume,
    Whereabouts,
)
from tft.protocol.topics import BEATS, ORDERS, REPORTS

REPEAT = 0.1
"""Seconds between repetitions of a report that the controller has not acknowledged."""
PATIENCE = 60.0
"""The time in seconds within which the controller must accept this rank. It is long because the
controller may be restarting."""
RANK_ORDERS: tuple[type, ...] = get_args(RankOrder)

log = structlog.get_logger()


class TrainingThread(Protocol):
    """
    The calls with which the control thread directs the training thread. `Gate` implements them.
    """

    def lock(self) -> Locked: ...
    def hold_after(self, step: int) -> Located: ...
    def unlock(self) -> Unlocked: ...
    def leave_after(self, step: int) -> Leaving: ...
    def withdraw(self) -> Withdrawn | None: ...
    def execute(self, execute: Execute) -> None: ...
    def abort(self) -> None: ...
    def whereabouts(self, rank: int, incarnation: int, inquiry: int) -> Whereabouts: ...


class _Admission:
    """
    The answer of the controller to the `Joined` report of this rank: accepted or refused.
    """

    def __init__(self) -> None:
        self.joined: Joined | None = None
        """The `Joined` report of this rank. None until `Control.start` was called."""
        self.refusal = ""
        """Why the controller refuses this rank. Empty while the controller has not refused."""
        self._answered = threading.Event()

    def accept(self) -> None:
        """
        Record that the controller has accepted this rank.
        """
        self._answered.set()

    def refuse(self, refused: Refused) -> None:
        """
        Record that the controller refuses this rank, if the message `refused` is addressed to this
        process.
        """
        joined = self.joined
        if joined and (refused.pid, refused.started) == (joined.pid, joined.started):
            self.refusal = refused.why
            self._answered.set()

    def wait(self) -> bool:
        """
        Wait for the answer. Return False if no answer has come within `PATIENCE` seconds.
        """
        return self._answered.wait(PATIENCE)


class Compared:
    """
    What this rank knows about the comparison of copies of shards while the job trains. The
    controller compares the copies, and tells the ranks the newest step at which all copies of every
    shard were equal.
    """

    def __init__(self) -> None:
        self.cycle = 0
        """The number of slices (parts) of each shard. After each step this rank digests one slice
        of each shard, so it digests every slice once in `cycle` steps. 0: it digests no slices, and
        the controller does not compare copies while the job trains."""
        self.step: int | None = 0
        """The newest step at which all copies were equal. None if each shard has only one holder,
        so that there are no copies to compare."""

    @property
    def wanted(self) -> bool:
        """
        True if this rank digests slices of its shards, so that the controller can compare copies.
        """
        return self.cycle > 0

    def sound(self, step: int) -> int:
        """
        Return the newest step, not later than `step`, whose copies count as equal.

        If no copies are compared while the job trains, return `step` itself. The copies then count
        as equal until an incident finds a difference and takes all ranks back to an earlier step.
        """
        return min(step, self.step) if self.wanted and self.step is not None else step

    def copies(self, every: int) -> int:
        """
        Return how many copies of its state, 2 or 3, this rank keeps in host memory. It makes a copy
        after every `every` steps.

        About `cycle` steps after a copy is made, the controller knows whether the copy is equal on
        all ranks. Some ranks hear the result a little later than others. All ranks must have heard
        the result before one of them drops an older copy: otherwise the ranks would keep copies of
        different steps. If a copy is made more often than every `2 * cycle` steps, a rank may not
        hear the result in time, so it keeps a third copy.
        """
        return 3 if every < 2 * self.cycle else 2


class Control:
    """
    The control thread of a worker, with its event loop and its connection to the bus.

    `report` and `tell` may be called from any thread.
    """

    def __init__(self, settings: RankSettings, training: TrainingThread) -> None:
        self._settings = settings
        self._training = training
        self._clock = SystemClock()
        self._machine = RankMachine(rank=settings.rank, incarnation=settings.incarnation)
        self._outbox = Outbox()
        self.compared = Compared()
        self._unheard: dict[int, Callable[[], None]] = {}
        """The functions to call when the controller acknowledges a report. The keys are the numbers
        of the reports."""
        self._sender = f"rank.{settings.rank}/{settings.incarnation}.{os.getpid()}"
        self._thread = threading.Thread(target=self._run, name="tft-control", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bus: Bus | None = None
        self._admission = _Admission()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = asyncio.Event()
        self._owing = asyncio.Event()

    def start(self, joined: Joined) -> None:
        """
        Join the job, and return once the controller has accepted this rank.

        Raises `RankTaken` if the controller refuses the rank. Raises `PeerError` when no controller
        answers. Raises `UsageError` if the system has no more threads.
        """
        self._admission.joined = joined
        try:
            self._thread.start()
        except RuntimeError as error:
            raise UsageError(
                f"rank {joined.rank} cannot start the thread that talks to the controller: "
                f"{no_thread(error)}"
            ) from None
        if not self._admission.wait():
            raise PeerError(
                f"no controller answered rank {joined.rank} within {PATIENCE:.0f} s at the broker "
                f"{self._settings.broker}: see controller.log in {self._settings.run_dir}/logs"
            )
        if self._admission.refusal:
            raise RankTaken(self._admission.refusal)

    def close(self) -> None:
        """
        Leave the bus. Reports that are not acknowledged yet are lost.
        """
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(timeout=2.0)

    def report(self, message: RankReport, heard: Callable[[], None] | None = None) -> None:
        """
        Send a report to the controller, and repeat it until the controller acknowledges it. Then
        call `heard` on the control thread.
        """
        self._call(self._post, message, heard)

    def tell(self, event: RankEvent) -> None:
        """
        Pass an event of the training thread to the rank machine (the state machine that decides how
        this rank reacts).
        """
        self._call(self._handle, event)

    def _call(self, function: object, *arguments: object) -> None:
        if self._loop is None:
            raise InternalError("the control thread was called before it was started")
        self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type] # callers pass matching arguments

    # ---------------------------------------------------------------- on the control thread

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException:
            log.critical("control_thread_died", rank=self._settings.rank, exc_info=True)
            os._exit(70)  # the agent notices the end at once, and the rank gets another process

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_give_up)
        settings = self._settings
        async with open_bus(
            settings.broker, job=settings.job, sender=self._sender, topics=(ORDERS,),
            curve=settings.curve,
        ) as bus:  # fmt: skip
            self._bus = bus
            await bus.listened(REPORTS)
            if self._admission.joined is not None:
                self._post(self._admission.joined)
            tasks = [asyncio.create_task(self._listen(bus)), asyncio.create_task(self._repeat(bus))]
            closing = asyncio.create_task(self._closing.wait())
            done, _ = await asyncio.wait([*tasks, closing], return_when=asyncio.FIRST_COMPLETED)
            for task in (*tasks, closing):
                task.cancel()
            for task in done - {closing}:
                task.result()

    async def _listen(self, bus: Bus) -> None:
        while True:
            arrival = await bus.receive()
            match arrival:
                case Heard(envelope=envelope):
                    self._hear(envelope.message)
                case Malformed(why=why):
                    log.warning("malformed_message", why=why)
                case NotLetIn(why=why):
                    log.warning("not_let_in", why=why)
                case Present() | Gone():
                    pass
                case _:
                    assert_never(arrival)

    async def _repeat(self, bus: Bus) -> None:
        while True:
            # sleep until there is a report that the controller has not acknowledged
            await self._owing.wait()
            await asyncio.sleep(REPEAT)
            for number, message in self._outbox.pending():
                bus.publish(REPORTS, message, number=number)
            if not self._outbox.pending():
                self._owing.clear()

    def _hear(self, message: object) -> None:
        rank = self._settings.rank
        if isinstance(message, Lead):
            self.compared.step = message.compared
            acknowledged = message.heard.get(self._sender, 0)
            self._outbox.acknowledge(acknowledged)
            for number in [each for each in self._unheard if each <= acknowledged]:
                self._unheard.pop(number)()
            if acknowledged:
                self._admission.accept()
        elif isinstance(message, Refused):
            self._admission.refuse(message)
        elif isinstance(message, Inquire) and self._bus is not None:
            incarnation = self._settings.incarnation
            self._bus.publish(BEATS, self._training.whereabouts(rank, incarnation, message.number))
        elif isinstance(message, RANK_ORDERS) and rank in message.to:  # type: ignore[attr-defined] # every order to ranks has `to`
            order: RankOrder = message  # type: ignore[assignment] # narrowed by RANK_ORDERS
            # training continues with `order.step`, so copies count as equal up to the step before
            # `order.step`. `compared.step` may have a later step, from an earlier message (`Lead`),
            # but the job has given up that step
            if isinstance(order, Resume):
                self.compared.step = order.step - 1
            name = ORDER_NAMES[type(order)]
            self._handle(Ordered(at=self._clock.now(), name=name, order=order))

    def _post(self, message: RankReport, heard: Callable[[], None] | None = None) -> None:
        number = self._outbox.add(message)
        if heard is not None:
            self._unheard[number] = heard
        self._owing.set()
        if self._bus is not None:
            self._bus.publish(REPORTS, message, number=number)

    def _handle(self, event: RankEvent) -> None:
        for command in self._machine.handle(event):
            self._do(command)
        self._set_timer()

    def _do(self, command: RankCommand) -> None:
        training = self._training
        match command:
            case Lock():
                self._handle(training.lock())
            case HoldAfter(step=step):
                self._handle(training.hold_after(step))
            case Unlock():
                self._handle(training.unlock())
            case LeaveAfter(step=step):
                self._handle(training.leave_after(step))
            case Withdraw():
                withdrawn = training.withdraw()
                if withdrawn is not None:
                    self._handle(withdrawn)
            case Abort():
                training.abort()
            case Execute():
                training.execute(command)
            case Answer(answer=answer):
                self._post(answer)
            case _:
                assert_never(command)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._machine.next_deadline()
        if deadline is not None and self._loop is not None:
            delay = max(0.0, deadline - self._clock.now())
            self._timer = self._loop.call_later(delay, self._wake)

    def _wake(self) -> None:
        self._handle(Woken(at=self._clock.now()))


# Any: asyncio passes values of several types
def _give_up(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """
    End the process after an error in the event loop.

    If the process continued, an event of the training thread might be lost, and the job would wait
    for it forever.
    """
    log.critical("control_failed", what=context["message"], exc_info=context.get("exception"))
    os._exit(70)  # the agent notices the end at once, and the rank gets another process
