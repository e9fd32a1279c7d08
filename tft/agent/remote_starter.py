"""
The agent's side of the protocol in `tft.spi.launcher`. The protocol is for ranks whose processes
the agent does not start itself. Another program, here called the start program, starts, kills and
reaps these processes for the agent. It tells the agent at once when a process has ended.
"""

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal

import structlog

from tft.agent.child import signal_main_thread
from tft.errors import PeerError
from tft.spi.launcher import Answer, Ask, hear_answer, say, written
from tft.stopped import is_stopped

log = structlog.get_logger(__name__)

NOT_STARTED = 127
"""The exit status that is reported for a process that could not be started. Shells use the same
number."""


class Distant:
    """
    One process of a rank that the start program starts, and not the agent itself.
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
        """The pid, or 0 until the start program reports the start. The kernel gives the pid to no
        other process until this process is reaped. The start program reaps the process only when
        the agent asks."""
        self.code: int | None = None
        """The exit status, or the negative number of the signal that ended the process. None while
        the process lives."""
        self._starter = starter

    def signal(self, number: int) -> None:
        """
        Send a signal to the main thread of the process (see `Child.signal`).
        """
        if self.pid and self.code is None:
            signal_main_thread(self.pid, number)

    def end(self) -> None:
        """
        Ask the start program to kill the process and its process group. The start program handles
        requests in order. So a process that is not started yet is first started and then killed.
        """
        if self.code is None:
            self._starter.ask("kill", self)

    def stopped(self) -> bool:
        """
        Return whether the process is stopped (see `Child.stopped`).
        """
        return bool(self.pid) and is_stopped(self.pid)


class Elsewhere:
    """
    The connection of the agent to the start program, which starts the ranks of this node.
    `descriptor` is the agent's end of a socket. `lost` is called with an error when the start
    program has closed its own end of the socket, or has ended.
    """

    def __init__(self, descriptor: int, *, lost: Callable[[Exception], None]) -> None:
        self._channel = socket.socket(fileno=descriptor)
        self._lost = lost
        self._asked = 0
        self._processes: dict[int, Distant] = {}
        self._unsent: deque[tuple[Ask, int | None]] = deque()
        """The requests that wait until the socket has room, in order. Beside each request to start
        a process is the descriptor of a file that contains the environment of that process. Beside
        all other requests is None."""

    def open(self) -> None:
        """
        Begin to listen to the start program.
        """
        # the start program reads from the other end: if it is busy, do not block
        self._channel.setblocking(False)
        asyncio.get_running_loop().add_reader(self._channel, self._hear)

    def close(self) -> None:
        """
        Close the socket to the start program.
        """
        asyncio.get_running_loop().remove_reader(self._channel)
        asyncio.get_running_loop().remove_writer(self._channel)
        self._drop_unsent()
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
        Ask the start program to start a process of the rank in slot `local_rank`. `began` is called
        when the process has started. `ended` is called when the process has ended or could not be
        started. If it could not be started, the attribute `code` of the returned object is then
        `NOT_STARTED`.

        Raises OSError when the request cannot be sent, for example because the start program has
        ended.
        """
        self._asked += 1
        process = Distant(self, self._asked, local_rank, began=began, ended=ended)
        ask = Ask(kind="start", number=process.number, local_rank=local_rank)
        self._unsent.append((ask, written(environment)))
        self._send()
        self._processes[process.number] = process
        return process

    def ask(self, kind: Literal["kill", "reap"], process: Distant) -> None:
        """
        Ask the start program to kill or reap a process.
        """
        ask = Ask(kind=kind, number=process.number, local_rank=process.local_rank)
        self._unsent.append((ask, None))
        with contextlib.suppress(OSError):
            # If the start program has ended, the request is lost. The agent then ends too (`_hear`
            # calls `lost`), and its reaper kills the rank's process.
            self._send()

    def _send(self) -> None:
        """
        Send the waiting requests in order, until the socket is full. The remaining requests are
        sent when the socket has room again. Raises OSError when the start program has ended.
        """
        if self._channel.fileno() == -1:
            return  # the socket is closed, because this agent is ending
        loop = asyncio.get_running_loop()
        while self._unsent:
            ask, environment = self._unsent[0]
            try:
                say(self._channel, ask, *([] if environment is None else [environment]))
            except BlockingIOError:
                loop.add_writer(self._channel, self._send_more)
                return
            except OSError:
                self._drop_unsent()
                raise
            self._unsent.popleft()
            if environment is not None:
                os.close(environment)
        loop.remove_writer(self._channel)

    def _send_more(self) -> None:
        with contextlib.suppress(OSError):  # `_hear` will notice that the start program has ended
            self._send()

    def _drop_unsent(self) -> None:
        for _, environment in self._unsent:
            if environment is not None:
                os.close(environment)
        self._unsent.clear()

    def _hear(self) -> None:
        try:
            answer = hear_answer(self._channel)
        except BlockingIOError:
            return
        except OSError:
            answer = None
        if answer is None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._lost(PeerError("the program that starts the ranks of this node has ended"))
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
