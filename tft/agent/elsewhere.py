"""
The agent's side of `tft.starter`: ranks whose processes another program starts, kills and reaps. That
program says when one has ended, as soon as the kernel does.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import Literal

import structlog

from tft.agent.child import is_stopped, signal_main_thread
from tft.errors import PeerError
from tft.starter import Answer, Ask, hear_answer, say, written

log = structlog.get_logger(__name__)

NOT_STARTED = 127
"""The status of a process that could not be started, as a shell has it."""


class Distant:
    """
    One process that another program was asked for.
    """

    def __init__(
        self,
        starter: "Elsewhere",
        number: int,
        local_rank: int,
        *,
        began: Callable[["Distant"], None],
        ended: Callable[["Distant"], None],
    ) -> None:
        self.number = number
        self.local_rank = local_rank
        self.began = began
        self.ended = ended
        self.pid = 0
        """0 until it is said to have started. It is nobody else's until the process is reaped, and that
        is for the agent to ask for."""
        self.code: int | None = None
        """Exit status, or minus the signal that ended it; None while it lives."""
        self._starter = starter

    def signal(self, number: int) -> None:
        """
        See `Child.signal`.
        """
        if self.pid and self.code is None:
            signal_main_thread(self.pid, number)

    def end(self) -> None:
        """
        Have it killed, with whatever it started in its group; if it is still to be started, then.
        """
        if self.code is None:
            self._starter.ask("kill", self)

    def stopped(self) -> bool:
        """
        See `Child.stopped`.
        """
        return bool(self.pid) and is_stopped(self.pid)


class Elsewhere:
    """
    The other program, at the other end of a socket. `lost` is called when it has gone.
    """

    def __init__(self, descriptor: int, *, lost: Callable[[Exception], None]) -> None:
        self._channel = socket.socket(fileno=descriptor)
        self._lost = lost
        self._asked = 0
        self._processes: dict[int, Distant] = {}

    def open(self) -> None:
        """
        Listen to it from now on.
        """
        self._channel.setblocking(False)  # it may be busy, and nobody may hold up the agent
        asyncio.get_running_loop().add_reader(self._channel, self._hear)

    def close(self) -> None:
        """
        It is not needed any more.
        """
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()

    def start(
        self,
        local_rank: int,
        environment: Mapping[str, str],
        *,
        began: Callable[[Distant], None],
        ended: Callable[[Distant], None],
    ) -> Distant:
        """
        Have a process started; `began` is called when it is there, `ended` when it has ended, with
        `NOT_STARTED` where it could not be started. Raises OSError where nobody listens.
        """
        self._asked += 1
        process = Distant(self, self._asked, local_rank, began=began, ended=ended)
        text = written(environment)
        try:
            say(
                self._channel,
                Ask(kind="start", number=process.number, local_rank=local_rank),
                text,
            )
        finally:
            os.close(text)
        self._processes[process.number] = process
        return process

    def ask(self, kind: Literal["kill", "reap"], process: Distant) -> None:
        """
        Ask for something else to be done with a process.
        """
        told = Ask(kind=kind, number=process.number, local_rank=process.local_rank)
        # where nobody listens the reaper ends the process, when this agent has ended
        with contextlib.suppress(OSError):
            say(self._channel, told)

    def _hear(self) -> None:
        try:
            answer = hear_answer(self._channel)
        except BlockingIOError:
            return
        except OSError:
            answer = None
        if answer is None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._lost(PeerError("the program that starts the ranks of this node has gone"))
            return
        self._take(answer)

    def _take(self, answer: Answer) -> None:
        process = self._processes[answer.number]
        match answer.kind:
            case "started":
                process.pid = answer.pid
                process.began(process)
            case "refused":
                log.warning("rank_not_started", local_rank=process.local_rank, why=answer.why)
                self._over(process, NOT_STARTED)
            case "ended":
                self.ask("reap", process)
                self._over(process, answer.code)

    def _over(self, process: Distant, code: int) -> None:
        del self._processes[process.number]
        process.code = code
        process.ended(process)
