"""
Ranks that another program starts: what that program calls to be a node of a job, and what it and the
node's agent say to each other.

    the program, in `Node.run`
      ├─ tft run ── agent          says when a rank is to be started, killed, forgotten
      └─ the ranks                 children of the program, which says when they have ended

Nothing of the agent's work is the program's: which process is the newest of a rank, what it was doing,
whether the job can go on. It starts, kills and reaps, one process at a time, in the order in which it
is told.
"""

import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

import msgspec

from tft.bus.ports import host_for_all, may_be_reached, own_address
from tft.config import (
    RUN_OPTIONS,
    aside_variables,
    change_environment,
    inherited_environment,
    run_options,
)
from tft.errors import UsageError
from tft.parent_death import parent_death_tie

UNKNOWN_STATUS = 1
"""Of a process whose status somebody else has taken."""
_FAILED = 4
"""The exit code of a job that has failed without a last checkpoint, as `tft run` has it."""
_SENTENCE = 1 << 16
"""Bytes of the longest message: a few numbers, or why a process could not be started."""
_DECIDED = (
    *("--nnodes", "--node-rank", "--nproc-per-node", "--placed", "--starter", "--resume-if-any"),
)
"""Options of `tft run` that follow from the launcher."""


class Starter(Protocol):
    """
    What the program can do. All of it is called on the thread that called `Node.run`.
    """

    def start(self, local_rank: int) -> int:
        """
        Start the process of a rank, whose earlier ones have ended: a child of this process, with the
        environment that this one has now, and the leader of a process group of its own. Its pid; it
        must not be reaped before `reap`. Raises OSError where it cannot be started.
        """

    def kill(self, local_rank: int, pid: int) -> None:
        """
        Kill a process and its group. It may have ended by itself.
        """

    def reap(self, local_rank: int, pid: int) -> None:
        """
        Take the status of a process that has ended.
        """


# ---------------------------------------------------------------- words between the two


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """
    What an agent asks for. With `start` comes a descriptor: the environment of the process, as JSON.
    """

    kind: Literal["start", "kill", "reap"]
    number: int
    """Of the process, counted by the agent."""
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """
    What has become of a process. Until it is asked to be reaped its pid is nobody else's.
    """

    kind: Literal["started", "ended", "refused"]
    number: int
    pid: int = 0
    code: int = 0
    """With `ended`: exit status, or minus the signal that ended it."""
    why: str = ""
    """With `refused`: the reason."""


def say(channel: socket.socket, said: Ask | Answer, *descriptors: int) -> None:
    """
    Waits for room only where the socket is one that blocks; raises OSError where the other side has gone.
    """
    content = msgspec.json.encode(asdict(said))
    socket.send_fds(channel, [content], descriptors, socket.MSG_NOSIGNAL)


def hear_answer(channel: socket.socket) -> Answer | None:
    """
    The next answer, None when there will be none. Raises `BlockingIOError` where it has not come.
    """
    said = channel.recv(_SENTENCE)
    return msgspec.json.decode(said, type=Answer) if said else None


def written(environment: Mapping[str, str]) -> int:
    """
    A descriptor with an environment, which can be larger than a message.
    """
    text = os.memfd_create("tft-environment")
    with os.fdopen(text, "w", closefd=False) as writing:
        writing.write(json.dumps(dict(environment)))
    return text


def _hear_ask(channel: socket.socket) -> tuple[Ask, dict[str, str]] | None:
    try:
        said, descriptors, _, _ = socket.recv_fds(channel, _SENTENCE, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # it has not heard all that it was told
        return None
    if not said:
        return None
    environment: dict[str, str] = {}
    for text in descriptors:
        environment = json.loads(os.pread(text, os.fstat(text).st_size, 0))
        os.close(text)
    return msgspec.json.decode(said, type=Ask), environment


# ---------------------------------------------------------------- being a node


def check_options(options: Sequence[str]) -> None:
    """
    Raises `UsageError` for what is not for the user to say under another launcher; the rest is for
    `tft run` to refuse.
    """
    for word in options:
        if word.partition("=")[0] in _DECIDED:
            raise UsageError(f"{RUN_OPTIONS} has {word}, which the launcher of the job decides")


class Node:
    """
    A node of a job, as the program that starts its ranks knows it.

    `address` is that of node 0 as all machines know it, `named` where it was read; `port` and the next
    one are free there. Of a job with one node they are not needed. `command` is what the ranks run, for
    the records; `defaults` are options of `tft run` that the user's own in TFT_RUN_OPTIONS go before.
    Raises `UsageError` for what cannot be, before anything is started.
    """

    def __init__(
        self,
        *,
        nnodes: int,
        node: int,
        ranks: int,
        address: str,
        port: int,
        named: str,
        command: Sequence[str],
        defaults: Sequence[str] = (),
    ) -> None:
        options = run_options()
        check_options(options)
        words = [
            *("--nnodes", str(nnodes), "--node-rank", str(node), "--nproc-per-node", str(ranks)),
            "--resume-if-any",
        ]
        if nnodes > 1:
            host = host_for_all(address, trusted=may_be_reached(options), named=named)
            words += ["--broker", f"{host}:{port}", "--host", own_address(host)]
        self._words = [*words, *defaults, *options]
        self._command = command
        self._mark = secrets.token_hex(16)

    def beside(self) -> dict[str, str]:
        """
        Variables for a process that is part of the job but no rank: it is ended with the job, and if it
        calls `tft.init` it waits there.
        """
        return aside_variables(self._mark) | parent_death_tie()

    def run(self, starter: Starter) -> int:
        """
        Be this node until the job is over; the exit code of `tft run`. SIGTERM and SIGINT are handed on
        to that. To be called on the main thread: the ranks die with the thread that started them.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = inherited_environment()
        for name in self.beside():
            environment.pop(name, None)
        descriptor = str(theirs.fileno())
        with mine:
            with theirs:
                running = subprocess.Popen(
                    [
                        # -P: a module in the working directory must not stand in for one of ours
                        *(sys.executable, "-P", "-m", "tft", "run", *self._words),
                        *("--starter", descriptor, self._mark, "--", *self._command),
                    ],
                    env=environment | parent_death_tie(),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # what is typed at the terminal comes from here, once
                )
            with _handed_on(running):
                Service(mine, starter, environment).serve(until_ended=running.pid)
        code = running.wait()
        if code < 0:
            sentence = (
                f"tft: `tft run` was ended by {signal.Signals(-code).name}, and the job with it"
            )
            sys.stderr.write(f"{sentence}\n")
            return _FAILED
        return code


@contextmanager
def _handed_on(running: "subprocess.Popen[bytes]") -> Iterator[None]:
    def hand_on(number: int, _: object) -> None:
        running.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    earlier = [signal.signal(number, hand_on) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, earlier, strict=True):
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """
    A process of a rank that was not reaped yet.
    """

    local_rank: int
    pid: int
    pidfd: int


class Service:
    """
    Does what the agent at the other end of `channel` asks for. `environment` is what it was started
    with: what differs from that it has chosen for the ranks.
    """

    def __init__(
        self, channel: socket.socket, starter: Starter, environment: Mapping[str, str]
    ) -> None:
        self._channel = channel
        self._starter = starter
        self._environment = environment
        self._started: dict[int, _Started] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self, *, until_ended: int) -> None:
        """
        Until that child of this process has ended. Then no process of a rank is left.
        """
        over = False

        def end() -> None:
            nonlocal over
            over = True

        with ExitStack() as opened:
            opened.enter_context(self._selector)
            opened.callback(self._leave_nothing)
            watched = os.pidfd_open(until_ended)
            opened.callback(os.close, watched)
            self._await(watched, end)
            self._await(self._channel.fileno(), self._obey)
            while not over:
                for ready, _ in self._selector.select():
                    ready.data()

    def _await(self, descriptor: int, act: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, act)

    def _obey(self) -> None:
        heard = _hear_ask(self._channel)
        if heard is None:  # it is leaving: its end comes by itself
            self._selector.unregister(self._channel.fileno())
            return
        ask, environment = heard
        match ask.kind:
            case "start":
                self._start(ask, environment)
            case "kill" if started := self._started.get(ask.number):
                self._starter.kill(started.local_rank, started.pid)
            case "reap" if started := self._started.pop(ask.number, None):
                self._reap(started)
            case _:
                pass

    def _start(self, ask: Ask, environment: Mapping[str, str]) -> None:
        try:
            with change_environment(self._changes(environment)):
                pid = self._starter.start(ask.local_rank)
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            self._answer(Answer(kind="refused", number=ask.number, why=str(error)))
            return
        self._started[ask.number] = _Started(local_rank=ask.local_rank, pid=pid, pidfd=pidfd)
        self._await(pidfd, lambda: self._ended(ask.number))
        self._answer(Answer(kind="started", number=ask.number, pid=pid))

    def _changes(self, environment: Mapping[str, str]) -> dict[str, str | None]:
        given = self._environment
        changed = {name: value for name, value in environment.items() if given.get(name) != value}
        gone = [name for name in (*given, *aside_variables("")) if name not in environment]
        return {**dict.fromkeys(gone), **changed, **parent_death_tie()}

    def _ended(self, number: int) -> None:
        started = self._started[number]
        self._selector.unregister(started.pidfd)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(started.pid, signal.SIGKILL)  # what it has left behind
        self._answer(
            Answer(kind="ended", number=number, pid=started.pid, code=_status(started.pid))
        )

    def _answer(self, answer: Answer) -> None:
        with suppress(OSError):  # it is gone, and the job with it
            say(self._channel, answer)

    def _reap(self, started: _Started) -> None:
        os.close(started.pidfd)
        self._starter.reap(started.local_rank, started.pid)

    def _leave_nothing(self) -> None:
        for started in self._started.values():
            self._starter.kill(started.local_rank, started.pid)
        for started in self._started.values():
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
            self._reap(started)
        self._started.clear()


def _status(pid: int) -> int:
    """
    How a child has ended, which stays to be reaped: exit status, or minus the signal.
    """
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return UNKNOWN_STATUS
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
