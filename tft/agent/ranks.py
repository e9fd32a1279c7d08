"""
The ranks of a node: their pages and their processes.

The agent starts a process of a rank only when the controller orders this. The agent ends a process
when the controller orders its end, or orders a newer process of the same rank. The agent reports
the start and the end of each process to the controller at once. When the controller repeats an
order, the agent sends the reports that answered the order again.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import structlog

from tft.agent.child import Child, note_pid
from tft.agent.death_watch import DeathWatch
from tft.agent.fork_server import ForkedProcess, ForkServer
from tft.agent.output import Console, Output
from tft.agent.remote_starter import NOT_STARTED, Distant, Elsewhere
from tft.agent.settings import AgentSettings, RankStart, rank_environment
from tft.agent.warm_ranks import WarmProcess, WarmRanks
from tft.clock import Clock
from tft.config import descriptor_variables
from tft.forked_task import ForkedTask
from tft.page import Page
from tft.parent_death import LAST_WORDS
from tft.protocol.messages import Exited, Kill, Pulse, SliceDigest, Spawn, Spawned

log = structlog.get_logger(__name__)

LAST_WORDS_LIMIT = 0.5
"""The time in seconds that a process gets to write the stacks of its threads before it is killed.
On an idle machine, a process needs only milliseconds for this, even with a hundred threads."""


_Ready = WarmProcess | ForkedProcess
"""A process that was started in advance and waits until the agent gives it a rank."""
_HOW = {WarmProcess: "warm", ForkedProcess: "forked"}
"""For the log: the word for each kind of process that was started in advance."""
_ELSEWHERE = "by another program"
"""For the log: how a process was started that another program (`StartedElsewhere`) has started."""

PARTS = 7
"""About how many extra heartbeats with digests the agent sends in one cycle through all slices of a
shard, besides the regular heartbeats. A rank posts the digest of one slice in each step. Not each
digest gets a heartbeat, because with short steps this would take a notable part of each step."""
MANY = 24
"""The number of new digests of one rank after which an extra heartbeat is sent. The page of a rank
keeps only the newest digests, so older digests must be sent in time."""
REPEATED = 3
"""For how many of the last heartbeats the agent remembers the number of digests on the page of a
rank. With these numbers the agent sends each digest in two heartbeats (`REPEATED` - 1), so that no
digest is lost if one heartbeat is lost."""


@dataclass(slots=True)
class _Process:
    """
    The living process of one incarnation of a rank.
    """

    incarnation: int
    child: Child | Distant
    words: int
    """The descriptor of the memory file into which the process writes its stacks."""
    how: str
    """For the log: how the process was started."""
    stopped: bool = False
    """True if the process was stopped (as by SIGSTOP) when its end was ordered."""
    death_watch: DeathWatch | None = None
    """Watches for the end of the process. None if another program has started the process."""
    reported: bool = False
    """True if the end of the process was reported while the kernel still freed its memory."""
    asked: bool = False
    """True if the process was asked to write its stacks before its end."""
    ordered: bool = False
    """True if the controller has ordered the end of the process. The end is then reported only when
    the process is gone, so that the controller notices a process that cannot be ended, for example
    one that is stuck in a driver."""


@dataclass(slots=True)
class _RankState:
    """
    The state of a rank on this node, over all its incarnations.
    """

    rank: int
    slot: int
    """The number of the rank's place on the node, from 0."""
    page: Page
    incarnation: int = -1
    """The newest incarnation that was started on this node, or that was ended before its start."""
    due: Spawn | None = None
    """
    The order to start a process, as long as the process is not started yet; otherwise None. The
    start waits until the rendezvous store is open and the rank's previous process has ended. It
    also waits for a forked process, unless no fork server is starting or running.
    """
    process: _Process | None = None
    answers: list[Spawned | Exited] = field(default_factory=list)
    """The reports on the newest incarnation. They are sent again when an order is repeated."""
    posted: deque[int] = field(default_factory=lambda: deque(maxlen=REPEATED))
    """How many digests the rank had posted on its page at each of the last beats. From these
    numbers `repeated` finds the digests that need not be sent again."""
    sent: tuple[int, int] = (0, 0)
    """How many digests the rank had posted on its page at the last beat that had digests, and the
    step of the newest of these digests."""
    hurried: bool = False
    """True if the rank posts digests so fast that an extra beat may soon be needed. The agent then
    looks for new digests at short intervals."""
    worked: int = 0
    """The number of steps whose times were sent so far."""
    last: Pulse | None = None
    """The last status of a process that has ended, until it is sent with the next beat. This status
    may contain digests that were not sent before."""

    def repeated(self) -> int:
        """
        Record how many digests the rank has posted on its page until now. Return how many of the
        oldest digests the next beat may leave out, because `REPEATED` - 1 beats contained them.
        """
        self.posted.append(self.page.posted())
        return self.posted[0] if len(self.posted) == REPEATED else 0

    def urgent(self) -> bool:
        """
        Return whether the new digests of this rank are worth an extra beat (heartbeat). They are if
        there are at least `MANY`, or if they cover one of `PARTS` equal parts of a cycle through
        the slices.
        """
        posted = self.page.posted()
        newest = self.page.digests(posted - 1) if posted > self.sent[0] else ()
        return bool(newest) and self._worth(posted, newest[-1], MANY)

    def _worth(self, posted: int, newest: SliceDigest, many: int) -> bool:
        """
        Return whether the digests since the last beat are worth an extra beat. They are if there
        are at least `many`, or if they cover one of `PARTS` equal parts of a cycle through the
        slices. `posted` is the number of all digests until now; `newest` is the newest digest.
        """
        sent, step = self.sent
        part = max(1, newest.of // PARTS)
        return posted - sent >= many or not step - part < newest.step < step + part

    def pulse(self, incarnation: int) -> Pulse:
        """
        Return the status of the rank's process, as read from the page.
        """
        digests = self.page.digests(self.repeated())
        if digests:
            posted = self.posted[-1]
            self.hurried = self._worth(posted, digests[-1], MANY // 2)
            self.sent = posted, digests[-1].step
        worked, self.worked = self.worked, self.page.worked()
        return Pulse(
            rank=self.rank,
            incarnation=incarnation,
            position=self.page.position(),
            training=self.page.training(),
            moved=self.page.moved(),
            digests=digests,
            kept=self.page.kept(),
            unprotected=self.page.unprotected(),
            work=self.page.work(worked),
        )


class Ranks:
    """
    All ranks of this node.

    `report` is called with each report on the start or end of a process. The same report may come
    twice. If another program starts the ranks and this program is lost, ranks can neither be
    started nor ended any more. `lost` is then called with an error.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        marker: str,
        console: Console,
        fork_server: ForkServer,
        clock: Clock,
        report: Callable[[Spawned | Exited], None],
        lost: Callable[[Exception], None],
    ) -> None:
        self._settings = settings
        self._marker = marker
        self._console = console
        self._clock = clock
        self._report = report
        self._store: tuple[str, int] | None = None
        self._rank_states: dict[int, _RankState] = {}
        for rank in settings.ranks:
            self._rank_state(rank)
        self._outputs: list[Output] = []
        self._leaving = False
        self._gone = asyncio.Event()
        self._gone.set()
        self._fork_server = fork_server
        self._warm = WarmRanks(settings, marker=marker, console=console, fork_server=fork_server)
        elsewhere = settings.starter
        self.bell: tuple[int, int] | None = None
        """The reading and the writing end of the pipe through which ranks wake the agent when they
        have new captures. None if the job has only one node: then no other node can keep them."""
        if settings.job.nnodes > 1:
            self.bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._elsewhere = elsewhere and Elsewhere(elsewhere.descriptor, lost=lost)

    def prepare(self) -> None:
        """
        Start the fork server now, so that it imports the ranks' modules before the controller
        orders the first rank. If another program starts the ranks, begin to listen to that program
        instead.
        """
        if self._elsewhere:
            self._elsewhere.open()
        else:
            self._fork_server.start()

    # ------------------------------------------------------------ orders

    def spawn(self, order: Spawn) -> None:
        """
        Carry out an order to start an incarnation of a rank. If the order is repeated, only the
        reports are repeated. An older process of the rank is killed. The new process starts when
        the older process has ended and the rendezvous store is open.
        """
        rank_state = self._rank_state(order.rank)
        if order.incarnation < rank_state.incarnation or self._leaving:
            return
        if order.incarnation == rank_state.incarnation:
            self._answer_again(rank_state)
            return
        if rank_state.due is None or rank_state.due.incarnation < order.incarnation:
            rank_state.due = order
        if rank_state.process is not None:
            self._end(rank_state.process, last_words=False)
        self.start_due()

    def kill(self, order: Kill) -> None:
        """
        Carry out an order to end an incarnation of a rank. Older incarnations of the rank are ended
        too. If the incarnation was never started, report it as killed nevertheless, and never start
        it.
        """
        rank_state = self._rank_state(order.rank)
        if order.incarnation < rank_state.incarnation:
            return
        if rank_state.process is not None:
            self._end(rank_state.process, last_words=order.last_words)
        if order.incarnation > rank_state.incarnation:
            if rank_state.due is not None and rank_state.due.incarnation <= order.incarnation:
                rank_state.due = None
            self._begin(rank_state, order.incarnation)
            self._exited(rank_state, order.incarnation, code=-signal.SIGKILL)
        elif rank_state.process is None:
            self._answer_again(rank_state)

    def store_at(self, address: tuple[str, int] | None) -> None:
        """
        Set the address (host, port) of the rendezvous store. None means that the store is lost, and
        no process is started until it is open again.
        """
        self._store = address
        self.start_due()

    # ------------------------------------------------------------ status

    def pulses(self) -> tuple[Pulse, ...]:
        """
        Return the status of every rank that has a process, as read from the rank's page. The first
        call after the end of a process also returns the last status of that process, unless the
        rank has a new process already.
        """
        found = []
        for rank_state in self._rank_states.values():
            last, rank_state.last = rank_state.last, None
            if rank_state.process is not None:
                last = rank_state.pulse(rank_state.process.incarnation)
            if last is not None:
                found.append(last)
        return tuple(found)

    @property
    def empty(self) -> bool:
        """
        True if no rank of this node has a process or is about to get one.
        """
        return not any(each.process or each.due for each in self._rank_states.values())

    def posted(self) -> bool:
        """
        Return whether any rank of this node has posted digests of slices on its page.
        """
        return any(rank_state.page.posted() for rank_state in self._rank_states.values())

    def hurried(self) -> bool:
        """
        Return whether some rank posts digests so fast that an extra beat (heartbeat) may soon be
        needed for them.
        """
        return any(rank_state.hurried for rank_state in self._rank_states.values())

    def urgent(self) -> bool:
        """
        Return whether an extra beat should be sent, because every rank that posts digests has
        enough new ones.
        """
        there = [each for each in self._rank_states.values() if each.process and each.page.posted()]
        return bool(there) and all(rank_state.urgent() for rank_state in there)

    def pages(self) -> list[tuple[int, int, Page]]:
        """
        Return a tuple for each rank that this node has or had: the number of the rank, its newest
        incarnation on this node, and its page.
        """
        return [(s.rank, s.incarnation, s.page) for s in self._rank_states.values()]

    def completed(self) -> int:
        """
        Return the highest step that any rank of this node has completed; 0 without ranks.
        """
        return max(
            (rank_state.page.position().step for rank_state in self._rank_states.values()),
            default=0,
        )

    # ------------------------------------------------------------ the end of processes

    def leave(self) -> None:
        """
        Start no further process from now on, and stop the fork server.
        """
        self._leaving = True
        for rank_state in self._rank_states.values():
            rank_state.due = None
        self._warm.stop()
        self._fork_server.stop()

    def end(self) -> None:
        """
        Kill the process of every rank.
        """
        for rank_state in self._rank_states.values():
            if rank_state.process is not None:
                rank_state.process.child.end()

    async def gone(self) -> None:
        """
        Wait until no rank has a process.
        """
        await self._gone.wait()

    def close(self) -> None:
        """
        Copy the last output of the processes to their logs, and release the pages of the ranks.
        """
        for output in self._outputs:
            output.finish()
        self._warm.close()
        self._fork_server.close()
        if self._elsewhere:
            self._elsewhere.close()
        for rank_state in self._rank_states.values():
            rank_state.page.close()
        for end in self.bell or ():
            os.close(end)

    # ------------------------------------------------------------ one process

    def _rank_state(self, rank: int) -> _RankState:
        """
        Return the `_RankState` of a rank. If the rank is new on this node, create the `_RankState`
        first. A rank of another node gets the first slot (place on the node) that no rank with a
        process or a pending start uses.
        """
        if rank not in self._rank_states:
            taken = {
                rank_state.slot
                for rank_state in self._rank_states.values()
                if rank_state.process or rank_state.due
            }
            own = rank in self._settings.ranks
            slot = len(self._rank_states) if own else next(n for n in count() if n not in taken)
            self._rank_states[rank] = _RankState(rank=rank, slot=slot, page=Page.create())
        return self._rank_states[rank]

    def start_due(self) -> None:
        """
        Start the processes that the controller has ordered and that were not started yet. Without
        an open rendezvous store, none is started. Processes that need a forked process wait until
        one arrives.
        """
        if self._store is None:
            return
        waiting = 0
        for rank_state in self._rank_states.values():
            if rank_state.due is None or rank_state.process is not None:
                continue
            ready = self._warm.take() or self._fork_server.take()
            if ready or not self._fork_server.hopeful:
                self._start(rank_state, rank_state.due, self._store, ready)
            else:
                waiting += 1
        self._fork_server.want(waiting)

    def prepare_next(self) -> None:
        """
        If all ranks of this node train, prepare for the loss of the next rank: start a warm process
        if one is missing, and ask the fork server for a forked process. A node without ranks, which
        takes over ranks of a lost node, prepares in the same way.
        """
        states = self._rank_states.values()
        there = [rank_state for rank_state in states if rank_state.process is not None]
        due = any(rank_state.due is not None for rank_state in states)
        if due or not all(rank_state.page.training() for rank_state in there):
            return
        if there or not self._settings.ranks:
            self._warm.want()
        if there:
            self._fork_server.want_in_advance()

    def _start(
        self,
        rank_state: _RankState,
        order: Spawn,
        store: tuple[str, int],
        ready: _Ready | None,
    ) -> None:
        rank_state.due = None
        self._begin(rank_state, order.incarnation)
        try:
            rank_state.process = self._process(rank_state, order, store, ready)
        except OSError as error:
            log.warning("rank_not_started", rank=rank_state.rank, why=str(error))
            self._exited(rank_state, order.incarnation, code=NOT_STARTED)
            return
        self._gone.clear()
        if rank_state.process.child.pid:
            self._began(
                rank_state,
                order.incarnation,
                rank_state.process.child.pid,
                how=rank_state.process.how,
            )
            self._watch_death(rank_state)

    def _began(self, rank_state: _RankState, incarnation: int, pid: int, *, how: str) -> None:
        """
        Write the pid file of a started process, and report the start.
        """
        note_pid(self._settings.job.run_dir, f"rank-{rank_state.rank}", pid)
        log.info(
            "rank_started",
            rank=rank_state.rank,
            incarnation=incarnation,
            pid=pid,
            how=how,
        )
        self._tell(
            rank_state,
            Spawned(
                node=self._settings.node,
                rank=rank_state.rank,
                incarnation=incarnation,
                pid=pid,
                at=self._clock.now(),
            ),
        )

    def _process(
        self,
        rank_state: _RankState,
        order: Spawn,
        store: tuple[str, int],
        ready: _Ready | None,
    ) -> _Process:
        incarnation = order.incarnation
        # the page may still say that the rank trains, because the previous process has written
        # this: correct the page, because the new process does not train yet
        rank_state.page.train(False, self._clock.now())
        words = os.memfd_create(f"tft-words-{rank_state.rank}")
        environment = rank_environment(
            self._settings,
            self._marker,
            RankStart(
                rank=rank_state.rank,
                incarnation=incarnation,
                successor=order.successor,
                slot=rank_state.slot,
                page=rank_state.page.fd,
                words=words,
                store=store,
                bell=self.bell and self.bell[1],
            ),
        )
        try:
            child, how = (
                self._started_elsewhere(
                    self._elsewhere, rank_state, incarnation, environment, words
                )
                if self._elsewhere
                else self._started_here(rank_state, incarnation, environment, words, ready)
            )
        except OSError:
            os.close(words)
            raise
        return _Process(incarnation=incarnation, child=child, words=words, how=how)

    def _started_here(
        self,
        rank_state: _RankState,
        incarnation: int,
        environment: dict[str, str],
        words: int,
        ready: _Ready | None,
    ) -> tuple[Child, str]:
        rank = rank_state.rank
        record = self._settings.job.run_dir / "logs" / f"rank-{rank}.{incarnation}.log"
        output, writing = Output.open(
            record=record, prefix=f"[rank {rank}] ", console=self._console
        )
        self._outputs = [kept for kept in self._outputs if not kept.closed] + [output]
        task = ForkedTask(
            work="rank",
            arguments=self._settings.command,
            environment=environment,
            output=writing,
            descriptors=(rank_state.page.fd, words, *(self.bell or ())[1:]),
        )

        def ended(_: Child) -> None:
            self._ended(rank_state)

        try:
            while ready is not None:
                if (child := ready.begin(task, ended)) is not None:
                    return child, _HOW[type(ready)]
                ready = self._fork_server.take()  # the process `ready` has ended; try another one
            return _execute(task, ended), "executed"
        finally:
            os.close(writing)

    def _started_elsewhere(
        self,
        elsewhere: Elsewhere,
        rank_state: _RankState,
        incarnation: int,
        environment: dict[str, str],
        words: int,
    ) -> tuple[Distant, str]:
        """
        Let the start program, which starts the ranks of this node, start a process of a rank. The
        process inherits no file descriptors from the agent. So its environment names the paths of
        the agent's descriptors (/proc/PID/fd/N) instead.
        """
        here = f"/proc/{os.getpid()}/fd"
        paths = descriptor_variables(
            page=f"{here}/{rank_state.page.fd}",
            words=f"{here}/{words}",
            bell=f"{here}/{self.bell[1]}" if self.bell else "",
        )

        def began(child: Distant) -> None:
            self._began(rank_state, incarnation, child.pid, how=_ELSEWHERE)

        def ended(_: Distant) -> None:
            self._ended(rank_state)

        child = elsewhere.start(rank_state.slot, environment | paths, began=began, ended=ended)
        return child, _ELSEWHERE

    def _end(self, process: _Process, *, last_words: bool) -> None:
        if process.asked and last_words:
            return  # the process is already writing the stacks of its threads, and a timer kills it
        process.stopped = process.stopped or process.child.stopped()
        process.ordered = True
        if not last_words:
            process.child.end()
            return
        process.asked = True
        process.child.signal(LAST_WORDS)
        # a stopped process handles signals only when it continues
        process.child.signal(signal.SIGCONT)
        asyncio.get_running_loop().call_later(LAST_WORDS_LIMIT, process.child.end)

    def _ended(self, rank_state: _RankState) -> None:
        process, rank_state.process = rank_state.process, None
        assert process is not None
        assert process.child.code is not None
        if process.death_watch is not None:
            process.death_watch.stop()
        if not process.reported:
            self._report_end(rank_state, process, process.child.code)
        os.close(process.words)
        if not any(other.process for other in self._rank_states.values()):
            self._gone.set()
        self.start_due()

    def _watch_death(self, rank_state: _RankState) -> None:
        """
        Watch the process of a rank, and report its end as soon as its training thread has ended,
        unless the controller has ordered the end. The kernel may need more time to free the memory
        of the process. The next process of the rank is started only when the memory is freed.
        """
        process = rank_state.process
        loop = asyncio.get_running_loop()
        if process is None or not isinstance(process.child, Child):
            return

        def ending(code: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
                loop.call_soon_threadsafe(ended, code)

        def ended(code: int) -> None:
            if rank_state.process is process and not process.reported and not process.ordered:
                process.child.end()  # kill the processes that the ended process has started
                process.reported = True
                self._report_end(rank_state, process, code)

        process.death_watch = DeathWatch(rank_state.page, process.child.pid, ending)

    def _report_end(self, rank_state: _RankState, process: _Process, code: int) -> None:
        if rank_state.page.posted():
            rank_state.last = rank_state.pulse(process.incarnation)
        self._exited(
            rank_state,
            process.incarnation,
            code=code,
            stack=_read(process.words),
            stopped=process.stopped,
        )

    # ------------------------------------------------------------ reports

    def _begin(self, rank_state: _RankState, incarnation: int) -> None:
        rank_state.incarnation = incarnation
        rank_state.answers = []

    def _exited(
        self,
        rank_state: _RankState,
        incarnation: int,
        *,
        code: int,
        stack: str = "",
        stopped: bool = False,
    ) -> None:
        log.info("rank_exited", rank=rank_state.rank, incarnation=incarnation, code=code)
        self._tell(
            rank_state,
            Exited(
                node=self._settings.node,
                rank=rank_state.rank,
                incarnation=incarnation,
                code=code,
                position=rank_state.page.position(),
                stack=stack,
                stopped=stopped,
                script_ended=rank_state.page.script_ended(incarnation),
                local_state={
                    step: state.hex() for step, state in rank_state.page.local_states().items()
                },
                at=self._clock.now(),
            ),
        )

    def _tell(self, rank_state: _RankState, report: Spawned | Exited) -> None:
        if report.incarnation == rank_state.incarnation:
            rank_state.answers.append(report)
        self._report(report)

    def _answer_again(self, rank_state: _RankState) -> None:
        for answer in rank_state.answers:
            self._report(answer)


def _execute(task: ForkedTask, ended: Callable[[Child], None]) -> Child:
    """
    Start a process of a rank without the fork server, so that the process imports all modules
    itself.

    Raises OSError when the process cannot be started.
    """
    return Child.start(
        [
            sys.executable,
            "-P",  # no imports from the working directory: its modules could hide modules of tft
            *("-m", "tft.worker.launch", *task.arguments),
        ],
        environment=task.environment,
        output=task.output,
        inherited=task.descriptors,
        ended=ended,
    )


def _read(fd: int) -> str:
    # `pread` with offset 0, because the process that wrote the file has moved the file offset,
    # which it shares with this descriptor
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
