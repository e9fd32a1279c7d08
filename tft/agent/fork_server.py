"""
The agent's side of the fork server (`tft.worker.fork_server`), a process that has imported all
modules. The agent asks the fork server for forked processes, which become ranks or the rendezvous
store. If the fork server fails or is too slow, the agent starts ranks and store itself. They then
start more slowly, because each new process must import all modules.
"""

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tft.agent.child import Child
from tft.agent.output import Console, Output
from tft.agent.settings import AgentSettings, python_environment
from tft.forked_task import ANOTHER, READY, ForkedTask, give_task
from tft.stopped import is_stopped

log = structlog.get_logger(__name__)

_PAUSE = 0.1
"""The time in seconds before the fork server is started again. Without this pause, a fork server
that always ends at once would keep the CPU busy."""
_ATTEMPTS = 3
"""The number of fork servers in a row that may end before they have forked a process. Then the
agent starts no further fork server. The machine probably has too little memory for a fork server,
or the system's limit for the number of processes is reached."""
_LOADING_LIMIT = 60.0
"""The time in seconds after which a fork server that is still importing modules is killed. The
limit is ten times what the imports take on a busy machine. After so long a time it is faster to let
each rank make the imports itself, without a fork server."""
_FORKING_LIMIT = 2.0
"""The time in seconds in which a requested forked process must arrive. Otherwise the agent kills
the fork server, and starts a process that does all imports itself. A fork normally takes
milliseconds."""
_IN_ADVANCE = 1
"""The number of forked processes that are kept ready to replace the next lost rank. A fork of a
process that has imported a framework, such as PyTorch, takes tens of milliseconds on a busy node.
During an incident, the other ranks would wait for this fork."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedProcess:
    """
    A process that the fork server has forked. The process is a child of the agent now. It waits at
    the socket `channel` for its task: to become a rank or the rendezvous store.
    """

    pid: int
    pidfd: int
    channel: socket.socket

    def is_usable(self) -> bool:
        """
        Return whether the process can begin a task: it still lives, and is not stopped (as by
        SIGSTOP).
        """
        gone = select.poll()
        gone.register(self.pidfd, select.POLLIN)
        return not gone.poll(0) and not is_stopped(self.pid)

    def begin(self, task: ForkedTask, ended: Callable[[Child], None]) -> Child | None:
        """
        Give the process its task, and return the `Child` that watches the process. Return None if
        the process has already ended.
        """
        with self.channel:
            try:
                give_task(self.channel, task)
            except OSError as error:
                log.warning("forked_process_lost", pid=self.pid, why=error.strerror)
                os.close(self.pidfd)
                return None
        return Child.adopt(self.pid, self.pidfd, ended=ended)

    def dismiss(self) -> None:
        """
        Kill the process, which has got no task, and close the socket to it.
        """
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            # SIGKILL, because a stopped process would not notice that the socket is closed
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.close(self.pidfd)


class ForkServer:
    """
    Starts and supervises the fork server of a node, and receives forked processes from it.

    `changed` is called when the fork server is ready, when a forked process has arrived, and when
    the fork server has ended, so that no more forked processes come. `changed` may call `take` to
    use the forked processes. Afterwards `_IN_ADVANCE` unused forked processes are kept, and all
    further unused ones are killed.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        marker: str,
        console: Console,
        changed: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._marker = marker
        self._console = console
        self._changed = changed
        self.hopeful = False
        """True while a fork server is starting or running. A rank should then be started in a
        forked process, so its start waits until a forked process arrives."""
        self._child: Child | None = None
        self._door: socket.socket | None = None
        self._output: Output | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._ready = False
        self._refusal = ""
        self._awaited = 0
        self._forked: list[ForkedProcess] = []
        self._failures = 0
        self._stopped = False

    def start(self) -> None:
        """
        Start the fork server. Whenever a fork server ends, another one is started, unless that one
        would probably fail too.
        """
        if self._stopped:
            return
        try:
            self._start()
        except OSError as error:
            self._give_up(str(error))
            return
        self.hopeful = True
        self._limit_to(_LOADING_LIMIT)

    def want(self, count: int) -> None:
        """
        Ask the fork server for as many forked processes as are missing until `count` are on their
        way. Processes that were requested earlier and have not arrived yet are counted.
        """
        if not self._ready or self._door is None:
            return
        while self._awaited < count:
            with contextlib.suppress(OSError):  # `_ended` or `_too_late` handles a dead fork server
                self._door.send(ANOTHER)
            self._awaited += 1
            self._limit_to(_FORKING_LIMIT)

    def want_in_advance(self) -> None:
        """
        Ask the fork server for the forked processes that are kept ready for the next lost rank,
        unless these processes are there already. Call this while the ranks train. During an
        incident, a fork would take processor time from the recovery.
        """
        self._drop_unusable()
        self.want(_IN_ADVANCE - len(self._forked))

    def take(self) -> ForkedProcess | None:
        """
        Return a forked process that was not taken yet and is usable, or None if there is none.
        """
        self._drop_unusable()
        return self._forked.pop(0) if self._forked else None

    def _drop_unusable(self) -> None:
        useless = [forked for forked in self._forked if not forked.is_usable()]
        self._forked = [forked for forked in self._forked if forked not in useless]
        for forked in useless:
            why = "it has ended or was stopped before it had a task"
            log.warning("forked_process_lost", pid=forked.pid, why=why)
            forked.dismiss()

    def stop(self) -> None:
        """
        Kill the fork server and the forked processes that wait for a task. No fork server is
        started any more.
        """
        self._stopped = True
        while self._forked:
            self._forked.pop().dismiss()
        if self._child is not None:
            self._child.end()

    def close(self) -> None:
        """
        Copy the last output of the fork server from its pipe to its log, and close the pipe.
        """
        if self._output is not None:
            self._output.finish()

    def _start(self) -> None:
        settings = self._settings
        if self._output is not None:
            self._output.finish()
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.setblocking(False)
        with theirs:
            # Let the fork server write to a pipe, and not to its log, because ranks write to pipes.
            # A forked rank inherits the Python object `sys.stdout` of the fork server, and replaces
            # only the file descriptor below that object. So the object must have been made for a
            # pipe.
            self._output, writing = Output.open(
                record=settings.job.run_dir / "logs" / f"fork-server-{settings.node}.log",
                prefix="[fork server] ",
                console=self._console,
            )
            try:
                self._child = Child.start(
                    [
                        *(sys.executable, "-P", "-m", "tft.worker.fork_server"),
                        *(settings.job.adaptor, str(theirs.fileno())),
                    ],
                    environment=python_environment(settings, self._marker),
                    output=writing,
                    inherited=(theirs.fileno(),),
                    ended=self._ended,
                )
            finally:
                os.close(writing)
        asyncio.get_running_loop().add_reader(self._door, self._hear)

    def _hear(self) -> None:
        assert self._door is not None
        try:
            said, descriptors, _, _ = socket.recv_fds(self._door, 1024, 2, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:  # the event loop has called `_hear` although there is no message
            return
        except OSError:  # the fork server may have ended, which `_ended` handles
            said, descriptors = b"", []
        if not said:
            asyncio.get_running_loop().remove_reader(self._door)
        elif descriptors:
            pidfd, channel = descriptors
            self._welcome(
                ForkedProcess(pid=int(said), pidfd=pidfd, channel=socket.socket(fileno=channel))
            )
        elif said == READY:
            self._ready = True
            self._limit_to(None)
            log.info("fork_server_ready")
            self._changed()
        else:
            self._refusal = said.decode(errors="replace")

    def _welcome(self, forked: ForkedProcess) -> None:
        self._awaited -= 1
        self._failures = 0
        self._limit_to(_FORKING_LIMIT if self._awaited else None)
        self._forked.append(forked)
        self._changed()
        keep = 0 if self._stopped else _IN_ADVANCE
        while len(self._forked) > keep:
            self._forked.pop().dismiss()

    def _limit_to(self, seconds: float | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        if seconds is not None:
            self._limit = asyncio.get_running_loop().call_later(seconds, self._too_late, seconds)

    def _too_late(self, seconds: float) -> None:
        log.warning("fork_server_silent", ready=self._ready, seconds=seconds)
        if self._child is not None:
            self._child.end()

    def _ended(self, child: Child) -> None:
        if self._door is not None:
            asyncio.get_running_loop().remove_reader(self._door)
            # a process that the fork server is forking right now cannot reach the agent through the
            # closed socket, and so ends
            self._door.close()
            self._door = None
        self._limit_to(None)
        assert child.code is not None
        # the fork server counts as failed if it ended while it was importing modules, or before it
        # had sent all requested forked processes
        failed = not self._ready or self._awaited > 0
        was_ready, self._ready, self._awaited = self._ready, False, 0
        self.hopeful = False
        if self._stopped:
            return
        # let `changed` start the waiting ranks without a fork server, because the next fork server
        # may need seconds until it is ready
        self._changed()
        self._failures += failed
        if self._refusal or (not was_ready and child.code >= 0):
            self._give_up(
                self._refusal
                or f"the fork server ended with exit status {child.code} while it was loading; "
                "its log is in logs/"
            )
        elif self._failures >= _ATTEMPTS:
            self._give_up(
                f"the fork server ended {self._failures} times in a row while it was loading or "
                "before it had forked a process"
            )
        else:
            log.warning("fork_server_ended", pid=child.pid, code=child.code)
            asyncio.get_running_loop().call_later(_PAUSE, self.start)

    def _give_up(self, why: str) -> None:
        log.warning("ranks_not_forked", why=why)
        self._changed()
