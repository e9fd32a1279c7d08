"""
Support for a program that starts the ranks of a node itself, in place of tft.

Such a program is, for example, the launcher of another framework. The program calls the functions
in this file to run one node of a job. This file also defines the messages between the program and
the node's agent.

    the program, in `Node.run`
      ├─ tft run ── agent          asks the program to start, kill and reap a rank's process
      └─ the ranks                 children of the program, which reports their end

The program makes no decisions. It does not know which process of a rank is the newest, what a
process was doing, or whether the job can continue. It only carries out the agent's requests, one
after another: to start, kill or reap one process.
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
from tft.ending_signals import heeded
from tft.errors import UsageError
from tft.parent_death import parent_death_tie

UNKNOWN_STATUS = 1
"""The exit status that is reported for a process if its real exit status is not known, because
other code in this program has already reaped the process."""
_FAILED = 4
"""The exit code of `tft run` for a job that has failed without a last checkpoint."""
_SENTENCE = 1 << 16
"""The size in bytes of the longest message between the agent and the program that starts the ranks.
A message contains a few numbers, or the reason of a failed start."""
_DECIDED = (
    *("--nnodes", "--node-rank", "--nproc-per-node", "--placed", "--starter", "--resume-if-any"),
)
"""The options of `tft run` that the program (the launcher of the job) sets, and that a user must
not set."""


class Starter(Protocol):
    """
    The operations on the processes of ranks that a program must provide if it starts the ranks of a
    node in place of tft.

    All methods are called on the thread that has called `Node.run`.
    """

    def start(self, local_rank: int) -> int:
        """
        Start a process of a rank, and return its pid.

        The earlier processes of the rank have ended. The new process must be a child of this
        process, and must lead its own process group. It must get the environment that this process
        has now. It must not be reaped before `reap` is called.

        Raises OSError when the process cannot be started.
        """

    def kill(self, local_rank: int, pid: int) -> None:
        """
        Kill a process and its process group. The process may have ended already.
        """

    def reap(self, local_rank: int, pid: int) -> None:
        """
        Reap a process that has ended. Until then the kernel gives its pid to no other process.
        """


# ---------------------------------------------------------------- messages between agent and starter


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """
    A request of an agent to the program that starts the ranks: start, kill or reap a process of a
    rank.

    A `start` request is sent together with a file descriptor. Its file contains the environment of
    the new process as JSON.
    """

    kind: Literal["start", "kill", "reap"]
    number: int
    """The number that the agent has given to the process of the rank."""
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """
    A report about a process of a rank. The program that starts the ranks sends it to the agent.

    A process that has ended is not reaped until the agent asks for that. Until then no other
    process can get the same pid.
    """

    kind: Literal["started", "ended", "refused"]
    number: int
    pid: int = 0
    code: int = 0
    """With `ended`: the exit status, or the negative number of the signal that ended the process.
    """
    why: str = ""
    """With `refused`: the reason why the process could not be started."""


def say(channel: socket.socket, said: Ask | Answer, *descriptors: int) -> None:
    """
    Send the message `said`, with file descriptors, over `channel`.

    Raises OSError when the other side has closed the connection, or when the socket is non-blocking
    and its buffer is full. A blocking socket waits for room instead.
    """
    content = msgspec.json.encode(asdict(said))
    socket.send_fds(channel, [content], descriptors, socket.MSG_NOSIGNAL)


def hear_answer(channel: socket.socket) -> Answer | None:
    """
    Return the next answer of the program that starts the ranks, or None when that program has
    closed the connection.

    Raises `BlockingIOError` when `channel` is non-blocking and no answer has arrived yet.
    """
    said = channel.recv(_SENTENCE)
    return msgspec.json.decode(said, type=Answer) if said else None


def written(environment: Mapping[str, str]) -> int:
    """
    Write an environment as JSON to a file in memory, and return the file's descriptor.

    The environment is sent as a file, because it can be larger than a message may be.
    """
    text = os.memfd_create("tft-environment")
    with os.fdopen(text, "w", closefd=False) as writing:
        writing.write(json.dumps(dict(environment)))
    return text


def _hear_ask(channel: socket.socket) -> tuple[Ask, dict[str, str]] | None:
    try:
        said, descriptors, _, _ = socket.recv_fds(channel, _SENTENCE, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # the agent has closed its socket without reading all answers
        return None
    if not said:
        return None
    environment: dict[str, str] = {}
    for text in descriptors:
        environment = json.loads(os.pread(text, os.fstat(text).st_size, 0))
        os.close(text)
    return msgspec.json.decode(said, type=Ask), environment


# ---------------------------------------------------------------- running a node


def check_options(options: Sequence[str]) -> None:
    """
    Check the options of `tft run` that a user has given for a job under another launcher.

    Raises `UsageError` for an option that only the launcher may set. Other invalid options are
    refused later by `tft run`.
    """
    for word in options:
        if word.partition("=")[0] in _DECIDED:
            raise UsageError(
                f"the environment variable {RUN_OPTIONS} contains {word}, which the launcher of "
                "the job sets: remove this option from the variable"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    """
    The address of the broker, which runs on node 0, for the nodes of a job.

    A job with one node does not use this address.
    """

    host: str
    """The address of node 0, which must be valid on all machines."""
    port: int
    """The first port of the broker. This port and the next port must be free on node 0."""
    named: str
    """The name of the environment variable from which `host` was read, for error messages."""


class Node:
    """
    A node of a job, for the program that starts the ranks of the node.

    `nnodes` is the number of nodes, `node` the number of this node, and `ranks` the number of ranks
    on this node. `broker` is the address of the broker. `command` is the command that each rank
    runs. tft only records this command, because the program starts the ranks itself. `defaults` are
    options of `tft run`; the user's options in TFT_RUN_OPTIONS override them.

    Raises `UsageError` for invalid options or addresses, before any process is started.
    """

    def __init__(
        self,
        *,
        nnodes: int,
        node: int,
        ranks: int,
        broker: BrokerAddress,
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
            host = host_for_all(broker.host, trusted=may_be_reached(options), named=broker.named)
            words += ["--broker", f"{host}:{broker.port}", "--host", own_address(host)]
        self._words = [*words, *defaults, *options]
        self._command = command
        self._mark = secrets.token_hex(16)

    def beside(self) -> dict[str, str]:
        """
        Return environment variables for a process that belongs to the job but is not a rank.

        A process with these variables is killed when the job is over. If it calls `tft.init`, the
        call does not return, because the process has no rank.
        """
        return aside_variables(self._mark) | parent_death_tie()

    def run(self, starter: Starter) -> int:
        """
        Run this node until the job is over, and return the exit code of `tft run`.

        SIGTERM, SIGINT and SIGHUP are forwarded to `tft run`, SIGHUP only if this process does not
        ignore it. Call this method on the main thread, because the ranks die together with the
        thread that started them.
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
                        # -P: modules in the working directory must not hide modules of tft
                        *(sys.executable, "-P", "-m", "tft", "run", *self._words),
                        *("--starter", descriptor, self._mark, "--", *self._command),
                    ],
                    env=environment | parent_death_tie(),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    # a signal from the terminal, such as Ctrl-C, must not reach `tft run` directly,
                    # because this process forwards the signal
                    start_new_session=True,
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

    numbers = heeded()
    earlier = [signal.signal(number, hand_on) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, earlier, strict=True):
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """
    A process of a rank that was started and has not been reaped.
    """

    local_rank: int
    pid: int
    pidfd: int


class Service:
    """
    Carries out the requests of the agent at the other end of the socket `channel`.

    `environment` is the environment with which the agent was started. A request to start a process
    contains the environment that the agent wants for the process. Variables that have the same
    value in both environments are left as they are in this process. Only the variables that differ
    are set or removed for the new process.
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
        Carry out the agent's requests until the child process with the pid `until_ended` has ended.

        Then kill and reap all rank processes that are left.
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
        # None: the agent has closed the connection and is ending. No request comes any more, and
        # the loop in `serve` only waits for the end of `tft run`
        if heard is None:
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
            pidfd = self._watch(ask.local_rank, pid)
        except OSError as error:
            self._answer(Answer(kind="refused", number=ask.number, why=str(error)))
            return
        self._started[ask.number] = _Started(local_rank=ask.local_rank, pid=pid, pidfd=pidfd)
        self._await(pidfd, lambda: self._ended(ask.number))
        self._answer(Answer(kind="started", number=ask.number, pid=pid))

    def _watch(self, local_rank: int, pid: int) -> int:
        """
        Return a pidfd (a file descriptor for a process) of a process that was just started.

        If no pidfd can be opened, for example because no descriptors are left, the process is
        killed and reaped. The `OSError` is then raised.
        """
        try:
            return os.pidfd_open(pid)
        except OSError:
            self._starter.kill(local_rank, pid)
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            self._starter.reap(local_rank, pid)
            raise

    def _changes(self, environment: Mapping[str, str]) -> dict[str, str | None]:
        given = self._environment
        changed = {name: value for name, value in environment.items() if given.get(name) != value}
        gone = [name for name in (*given, *aside_variables("")) if name not in environment]
        return {**dict.fromkeys(gone), **changed, **parent_death_tie()}

    def _ended(self, number: int) -> None:
        started = self._started[number]
        self._selector.unregister(started.pidfd)
        with suppress(ProcessLookupError, PermissionError):
            # the process of a rank has ended: kill the children that it has left behind
            os.killpg(started.pid, signal.SIGKILL)
        self._answer(
            Answer(kind="ended", number=number, pid=started.pid, code=_status(started.pid))
        )

    def _answer(self, answer: Answer) -> None:
        with suppress(OSError):  # if the agent has ended, `say` fails, but the job is over anyway
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
    Return how a child process has ended: its exit status, or the negative number of the signal that
    ended it.

    The child is not reaped. Returns `UNKNOWN_STATUS` if other code has already reaped the child.
    """
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return UNKNOWN_STATUS
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
