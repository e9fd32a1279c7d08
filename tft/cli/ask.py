"""
`tft pause`, `tft resume`, `tft dump`: send a request to a running job, and report the outcome.

The command repeats the request until the leading controller acknowledges it. Then the command reads
the `Lead` messages, with which the controller announces the state of the job. The command ends when
the job has done what was requested, or can no longer do it.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from tft import checkpoint
from tft.bus.base import Arrival, Bus, Heard, Malformed, NotLetIn
from tft.bus.zeromq import open_bus
from tft.clock import SystemClock
from tft.core.job.transitions import State
from tft.core.link.delivery import Outbox
from tft.errors import PeerError, UsageError
from tft.launcher.exit_codes import COMPLETED, FAILED
from tft.launcher.run import say
from tft.launcher.run_directory import FreshReport, JobThere, checkpoint_store_there, job_there
from tft.protocol.messages import (
    Envelope,
    Lead,
    OutsideReport,
    PauseRequested,
    ResumeRequested,
    StopRequested,
)
from tft.protocol.topics import ORDERS, REPORTS

_REPEAT = 0.1  # seconds after which an unacknowledged request is sent again
# seconds without a `Lead` message after which the command assumes that no controller leads the job:
# a leading controller sends this message each second, and needs less than `_SILENCE` to restart
_SILENCE = 10.0

_HEALTHY = {str(State.HEALTHY)}
_STILL = {str(State.PAUSING), str(State.PAUSED)}
_OVER = {str(state) for state in (State.DUMPING, State.EXITING, State.ENDED)}


def pause(run_dir: Path, check: str, why: str) -> int:
    """
    Pause the job of this run directory. If `check` is the name of a plugin's check, wait for the
    result of this check.

    Returns 0 if the job paused, or if the check passed. Returns 4 otherwise, also if no controller
    answers. Raises `UsageError` if the job cannot pause now.
    """

    async def asking(leader: Leader) -> int:
        before = await leader.speaks()
        if before.state in _OVER:
            raise UsageError(
                f"the job in {run_dir} is ending (its state is {before.state}) and cannot pause "
                "any more"
            )
        if before.state in _STILL:
            raise UsageError(f"the job in {run_dir} is already {before.state}")
        heard = await leader.ask(PauseRequested(why=why, check=check, at=leader.now()))
        if heard.state not in _STILL:
            say(f"the job is {heard.state}; it pauses after that")
        standing = set() if check else {str(State.PAUSED)}
        lead = await leader.until(standing | _HEALTHY | _OVER)
        return _paused(lead, heard, check)

    return _ask(run_dir, asking)


def _paused(lead: Lead, heard: Lead, check: str) -> int:
    if lead.state == State.PAUSED:
        say("the job stands still; `tft resume` lets it go on")
        return COMPLETED
    if check and lead.check == "passed":
        after = f" after incident {lead.incident}" if lead.incident != heard.incident else ""
        say(f"the check {check!r} has passed on all ranks{after}; the job is {lead.state}")
        return COMPLETED
    if check and lead.check:
        say(f"the check {check!r} has not passed: {lead.check}; the job is {lead.state}")
        return FAILED
    say(f"the job did not pause, it is {lead.state}: the controller's log says why")
    return FAILED


def resume(run_dir: Path, why: str) -> int:
    """
    Resume the paused job of this run directory.

    Returns 0 when the job goes on. Returns 4 if the job has ended or is ending, or if no controller
    answers. Raises `UsageError` if the job is not paused.
    """

    async def asking(leader: Leader) -> int:
        before = await leader.speaks()
        if before.state in _HEALTHY | _OVER:
            raise UsageError(f"the job in {run_dir} is not paused: it is {before.state}")
        await leader.ask(ResumeRequested(why=why, at=leader.now()))
        lead = await leader.until(_HEALTHY | _OVER)
        if lead.state in _OVER:
            say(f"the job is {lead.state}: the controller's log says why")
            return FAILED
        say("the job goes on")
        return COMPLETED

    return _ask(run_dir, asking)


def dump(run_dir: Path, why: str) -> int:
    """
    End the job of this run directory with a last checkpoint.

    Returns 0 if the job ended with a last checkpoint. Returns 4 if the job ended without such a
    checkpoint, or if no controller answers. Raises `UsageError` if the job is ending already.
    """
    report = FreshReport(run_dir)

    async def asking(leader: Leader) -> int:
        before = await leader.speaks()
        if before.state in _OVER:
            raise UsageError(f"the job in {run_dir} is ending already: its state is {before.state}")
        await leader.ask(StopRequested(why=why, signal=0, at=leader.now()))
        try:
            await leader.until({str(State.ENDED)})
        except PeerError:
            # a controller that no longer answers may have ended the job: a controller writes the
            # report of the job before it exits
            if report.text() is None:
                raise
        newest = checkpoint.newest(checkpoint_store_there(run_dir))
        if report.result() != "dumped" or newest is None:
            say(f"the job has ended without a last checkpoint: {report.why()}")
            return FAILED
        say(f"the job has ended with a last checkpoint: {newest}")
        return COMPLETED

    return _ask(run_dir, asking)


# ---------------------------------------------------------------- the connection to the leader


class Leader:
    """
    The connection of a command to the controller that leads a job.
    """

    def __init__(self, bus: Bus, sender: str, there: JobThere) -> None:
        self._bus = bus
        self._sender = sender
        self._there = there
        self._clock = SystemClock()
        self._outbox = Outbox()
        self._lead: Lead | None = None
        self._spoke = self._clock.now()
        self._odd = ""

    def now(self) -> float:
        """
        Return the current time (CLOCK_MONOTONIC, in seconds), for the field `at` of a request.
        """
        return self._clock.now()

    async def speaks(self) -> Lead:
        """
        Return the newest `Lead` message of the controller, and wait if none has arrived yet. Raises
        `PeerError` if no controller leads.
        """
        while self._lead is None:
            await self._listen(_SILENCE)
        return self._lead

    async def ask(self, request: OutsideReport) -> Lead:
        """
        Repeat a request until the leader acknowledges it. Return the leader's newest `Lead`
        message.

        Raises `PeerError` if no leader acknowledges the request within 10 s.
        """
        number = self._outbox.add(request)
        limit = self.now() + _SILENCE
        while self._outbox.pending():
            if self.now() > limit:
                raise PeerError(
                    f"the controller of the job {self._there.job!r} has not acknowledged the "
                    f"request for {_SILENCE:.0f} s, although it leads the job: see "
                    f"{self._there.log}"
                )
            self._bus.publish(REPORTS, request, number=number)
            await self._listen(_REPEAT)
        return await self.speaks()

    async def until(self, states: set[str]) -> Lead:
        """
        Wait until the job is in one of `states`. Return the `Lead` message that names the state.

        Raises `PeerError` when no controller leads any more.
        """
        while (lead := await self.speaks()).state not in states:
            await self._listen(_SILENCE)
        return lead

    async def _listen(self, limit: float) -> None:
        """
        Receive one message, or return after `limit` seconds without a message.

        Raises `PeerError` if no `Lead` message of the leading controller has arrived for `_SILENCE`
        seconds, whatever else has arrived.
        """
        arrival: Arrival | None = None
        # no message is lost if the timeout cancels the call of `receive` (see `Bus.receive`)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                arrival = await self._bus.receive()
        match arrival:
            case Heard(envelope=Envelope(message=Lead() as lead)):
                if self._lead is None or lead.epoch >= self._lead.epoch:
                    self._lead, self._spoke = lead, self.now()
                    self._outbox.acknowledge(lead.heard.get(self._sender, 0))
            case Malformed(why=why) | NotLetIn(why=why):
                self._odd = f" ({why})"
            case _:
                pass
        if self.now() - self._spoke >= _SILENCE:
            raise PeerError(
                f"no controller has led the job {self._there.job!r} for {_SILENCE:.0f} s at the "
                f"broker {self._there.broker}: check that `tft run` still runs{self._odd}"
            )


def _ask(run_dir: Path, asking: Callable[[Leader], Awaitable[int]]) -> int:
    there = job_there(run_dir)
    sender = (
        # each command needs a new sender name, because each command numbers its requests from 1
        f"ask.{secrets.token_hex(4)}"
    )

    async def with_bus() -> int:
        async with open_bus(
            there.broker, job=there.job, sender=sender, topics=[ORDERS], curve=there.curve
        ) as bus:
            return await asking(Leader(bus, sender, there))

    try:
        return asyncio.run(with_bus())
    except PeerError as silent:
        say(str(silent))
        return FAILED
