"""
A simulated node. The agent of the node starts and ends processes as ordered, and reports when they
end. The launcher (`outside.py`) reports the events that no agent can report.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tft.protocol.messages import (
    Beat,
    EndNode,
    Exited,
    Kill,
    Lead,
    LocalStates,
    LocalStatesKept,
    NodeJoined,
    Order,
    Pulse,
    RankOrder,
    Recall,
    Refused,
    Spawn,
    Spawned,
    StoreOpened,
)
from tft.simulation.local_states import LocalStateExchange
from tft.simulation.mail import Link, Mail
from tft.simulation.page import Page
from tft.simulation.process import Process
from tft.simulation.stage import Connection, NodeStore, ProcessPart, Stage

BEAT = 0.8
"""The time in seconds between two heartbeats. A real agent sends ten times as many; the simulation
sends fewer to be fast. The time must be below `ASLEEP` (1 s): hang detection takes a longer gap for
a pause of the node."""
OFTEN = 0.2
"""Seconds between two heartbeats in a job that compares slices (parts of the shards) in every step.
A step takes about as long, so the digests of each step are sent before newer digests replace them
in the shared memory."""
KILLED = -9
"""The exit code of a process that SIGKILL has ended."""


@dataclass(slots=True)
class _RankState:
    page: Page
    incarnation: int = -1
    due: Spawn | None = None
    process: ProcessPart | None = None
    answers: list[Spawned | Exited] = field(default_factory=list)


@dataclass(slots=True)
class _Processes:
    local_states: LocalStateExchange
    rank_states: dict[int, _RankState] = field(default_factory=dict)
    strangers: list[ProcessPart] = field(default_factory=list)
    """The processes on this node that no order started."""
    left_behind: dict[int, int] = field(default_factory=dict)
    """By rank: the newest step on its page (its shared memory) when this node joined again after it
    was lost."""


class Node:
    """
    One simulated node and its agent, from the start of the agent to its end.
    """

    def __init__(
        self, stage: Stage, number: int, ranks: tuple[int, ...], *, spare: int, life: int = 0
    ) -> None:
        self._stage = stage
        self.number = number
        self.ranks = ranks
        self.life = life
        """The number of agents that ran on this node before this agent."""
        self.pid = stage.pid()
        """The process id of the agent."""
        self.offset = stage.takes(-stage.schedule.skew, stage.schedule.skew)
        """The difference in seconds between the clock of the node and that of the controller."""
        self._spare = spare
        self.connection = Connection(stage.clock.now)
        self.mail = Mail(stage, f"node.{number}/{life}", self.connection.link)
        self.alive = True
        self.started = self.leaving = False
        self.store = NodeStore()
        self._epoch = 0
        self._ours = _Processes(LocalStateExchange(stage, self))
        self._ours.rank_states = {rank: self._new_rank() for rank in ranks}

    def _new_rank(self) -> _RankState:
        return _RankState(page=Page(self._ours.local_states.rung))

    @property
    def link(self) -> Link:
        """
        The connection of the node to the broker.
        """
        return self.connection.link

    @property
    def now(self) -> float:
        """
        The time by this node's own clock, in seconds.
        """
        return self._stage.clock.now + self.offset

    def start(self) -> None:
        """
        Start the agent: report the node, begin to send heartbeats, and open the rendezvous store.
        """
        if not self.alive or self.started:
            return
        self.started = True
        self._join()
        self._stage.clock.after(BEAT * self._stage.rng.random(), self._beat)
        self._stage.clock.after(0.05, self.open_store)

    def _join(self) -> None:
        self.mail.post(
            NodeJoined(
                node=self.number,
                host=f"node{self.number}",
                pid=self.pid,
                ranks=self.ranks,
                spare=self._spare,
                at=self.now,
            )
        )

    def _join_again(self) -> None:
        """
        Join the job again after this node was cut off for too long, when its processes have ended.
        """
        states = self._ours.rank_states.values()
        joins = self.mail.waits(NodeJoined)
        if not (joins or self.leaving or any(each.process or each.due for each in states)):
            self._ours.left_behind = {
                rank: max(page.local_states(), default=-1) for rank, page in self.pages().items()
            }
            self._join()

    def comes_back(self) -> None:
        """
        Start a new agent on this node. The processes that were on the node and the shared memory of
        its ranks are gone.
        """
        stage = self._stage
        if not self.alive and stage.cluster.nodes[self.number] is self:
            again = Node(stage, self.number, self.ranks, spare=self._spare, life=self.life + 1)
            stage.cluster.nodes[self.number] = again
            again.start()

    def open_store(self) -> None:
        """
        Open the rendezvous store of this node. The store listens on a new port each time.
        """
        if not self.alive:
            return
        self._lose_store()
        self.store.address = (f"node{self.number}", self._stage.pid())
        self.store.opened = self._stage.clock.now
        host, port = self.store.address
        self.mail.post(StoreOpened(node=self.number, host=host, port=port, at=self.now))
        self._start_due()

    def _lose_store(self) -> None:
        if self.store.address is not None:
            self._stage.groups.close(self.store.address)
        self.store.address = None

    def processes(self) -> list[ProcessPart]:
        """
        Return all processes on this node, including those that no order started.
        """
        ours = [
            rank_state.process
            for rank_state in self._ours.rank_states.values()
            if rank_state.process is not None
        ]
        return [*ours, *self._ours.strangers]

    def hosts(self, rank: int) -> bool:
        """
        Return whether a process of this rank may run on the node.
        """
        return rank in self._ours.rank_states or any(
            each.rank == rank for each in self._ours.strangers
        )

    def process(self, rank: int) -> ProcessPart | None:
        """
        Return the living process that this node started for a rank. Return None when there is none.
        """
        rank_state = self._ours.rank_states.get(rank)
        return None if rank_state is None else rank_state.process

    def incarnations(self) -> list[tuple[int, int, Page]]:
        """
        Return each rank of the node, its newest incarnation there, and its page (the shared memory
        with its data positions).
        """
        return [
            (rank, rank_state.incarnation, rank_state.page)
            for rank, rank_state in self._ours.rank_states.items()
        ]

    def kept(self, lost: int, rank: int) -> Mapping[int, str]:
        """
        Return the data positions, by step, that this node keeps for a rank of another node
        (`lost`).
        """
        return self._ours.local_states.kept(lost, rank)

    def hear_agent(self, message: LocalStates | LocalStatesKept) -> None:
        """
        Handle a message of the agent of another node.
        """
        self._ours.local_states.hear(message)

    def pages(self) -> dict[int, Page]:
        """
        Return the page (the shared memory) of each rank on this node.
        """
        return {rank: rank_state.page for rank, rank_state in self._ours.rank_states.items()}

    def left_behind(self, rank: int) -> int:
        """
        Return the newest step whose data position was on the page (the shared memory) of `rank`
        when this node joined again after it was lost. -1: this node has not joined again, or the
        page had no data position.
        """
        return self._ours.left_behind.get(rank, -1)

    def admit(self, stranger: ProcessPart) -> None:
        """
        Add a process that was started on this node without an order.
        """
        self._ours.strangers.append(stranger)
        self._stage.cluster.by_address[f"node{self.number}:{stranger.pid}"] = stranger

    # ---------------------------------------------------------------- orders

    def hear(self, order: Order, leader: int) -> None:
        """
        Handle an order for the agent or for ranks on this node.
        """
        if not self.alive or not self.started:
            return
        match order:
            case Spawn() | Kill() | Recall() | EndNode():
                if order.epoch >= self._epoch:
                    self._stage.checks.invariants.one_leader_obeyed(order.epoch, leader)
                    self._epoch = order.epoch
                    self._obey(order)
            case Refused():
                for process in self.processes():
                    process.hear_refusal(order)
            case _:
                self._hand_out(order, leader)

    def hear_lead(self, lead: Lead) -> None:
        """
        Handle a `Lead` message, with which the leading controller acknowledges reports, and pass
        the message to the processes.
        """
        if not self.alive:
            return
        if lead.epoch >= self._epoch:
            self._epoch = lead.epoch
            self.mail.heard(lead)
            self._ours.local_states.led(lead)
            if self.number in lead.silent:
                self._join_again()
        for process in self.processes():
            process.hear_lead(lead)

    def _hand_out(self, order: RankOrder, leader: int) -> None:
        for rank in order.to:
            rank_state = self._ours.rank_states.get(rank)
            if rank_state is not None and rank_state.process is not None:
                rank_state.process.hear(order, leader)
        for stranger in self._ours.strangers:
            if stranger.rank in order.to:
                stranger.hear(order, leader)

    def _obey(self, order: Spawn | Kill | Recall | EndNode) -> None:
        match order:
            case Spawn() if order.node == self.number:
                self._spawn(order)
            case Kill() if order.node == self.number:
                self._kill(order)
            case Recall() if order.node == self.number:
                for report in self._ours.local_states.recalled(order, self.now):
                    self.mail.post(report)
            case EndNode() if not self.leaving:
                self._leave(order.grace)
            case _:
                pass

    def _spawn(self, order: Spawn) -> None:
        rank_state = self._ours.rank_states.setdefault(order.rank, self._new_rank())
        if order.incarnation < rank_state.incarnation or self.leaving:
            return
        if order.incarnation == rank_state.incarnation:
            return self._answer_again(rank_state)
        if rank_state.due is None or rank_state.due.incarnation < order.incarnation:
            rank_state.due = order
        if rank_state.process is not None:
            self._end(rank_state.process, last_words=False)
        self._start_due()

    def _kill(self, order: Kill) -> None:
        rank_state = self._ours.rank_states.get(order.rank)
        if rank_state is None or order.incarnation < rank_state.incarnation:
            return
        if rank_state.process is not None:
            self._end(rank_state.process, last_words=order.last_words)
        if order.incarnation > rank_state.incarnation:
            if rank_state.due is not None and rank_state.due.incarnation <= order.incarnation:
                rank_state.due = None
            rank_state.incarnation, rank_state.answers = order.incarnation, []
            self._exited(rank_state, order.rank, order.incarnation, KILLED, "")
        elif rank_state.process is None:
            self._answer_again(rank_state)

    def _answer_again(self, rank_state: _RankState) -> None:
        for answer in rank_state.answers:
            self.mail.post_once(answer)

    # ---------------------------------------------------------------- processes

    def _start_due(self) -> None:
        if self.store.address is None:
            return
        for rank, rank_state in self._ours.rank_states.items():
            if rank_state.due is not None and rank_state.process is None:
                self._start(rank, rank_state, rank_state.due)

    def _start(self, rank: int, rank_state: _RankState, order: Spawn) -> None:
        stage = self._stage
        rank_state.due = None
        rank_state.incarnation, rank_state.answers = order.incarnation, []
        rank_state.page.training = False
        process = rank_state.process = Process(
            stage, self, rank, order.incarnation, rank_state.page
        )
        stage.cluster.processes.append(process)
        stage.cluster.by_address[f"node{self.number}:{process.pid}"] = process
        spawned = Spawned(
            node=self.number, rank=rank, incarnation=order.incarnation, pid=process.pid,
            at=self.now,
        )  # fmt: skip
        rank_state.answers.append(spawned)
        self.mail.post(spawned)
        late = stage.mishaps.lateness(rank)
        stage.clock.after(late + stage.takes(0.05, 0.6), process.join)

    def _end(self, process: ProcessPart, *, last_words: bool) -> None:
        delay = self._stage.takes(0.05, 0.5) if last_words else 0.001
        if process.life.alive:
            held = self._stage.mishaps.held_back(process.rank)
            process.life.held_until = max(process.life.held_until, self._stage.clock.now + held)
        delay = max(delay, process.life.held_until - self._stage.clock.now)
        stack = "File stuck.py" if last_words else ""
        self._stage.clock.after(delay, self.ended, process, KILLED, stack)

    def ended(self, process: ProcessPart, code: int, stack: str = "") -> None:
        """
        Handle the end of a process, as the kernel reports it.
        """
        if not process.life.alive:
            return
        process.end()
        if process in self._ours.strangers:
            self._ours.strangers.remove(process)
        rank_state = self._ours.rank_states.get(process.rank)
        if self.alive and rank_state is not None and rank_state.process is process:
            self.say_status()  # send the last digests of the process, which is about to be removed
            rank_state.process = None
            self._exited(rank_state, process.rank, process.incarnation, code, stack)
            self._start_due()

    def _exited(
        self, rank_state: _RankState, rank: int, incarnation: int, code: int, stack: str
    ) -> None:
        exited = Exited(
            node=self.number, rank=rank, incarnation=incarnation, code=code,
            position=rank_state.page.position, stack=stack,
            local_state={step: f"{data:x}" for step, data in rank_state.page.local_states().items()},
            at=self.now,
        )  # fmt: skip
        if rank_state.incarnation == incarnation:
            rank_state.answers.append(exited)
        self.mail.post(exited)

    # ---------------------------------------------------------------- status, the end

    def _beat(self) -> None:
        if self.alive:
            self.say_status()
            self._stage.clock.after(OFTEN if self._stage.schedule.slices else BEAT, self._beat)

    def say_status(self) -> None:
        """
        Send a heartbeat with the status of all ranks of this node.
        """
        stage = self._stage
        pulses = tuple(
            Pulse(
                rank=process.rank,
                incarnation=process.incarnation,
                position=process.page.position,
                training=process.page.training,
                moved=process.page.moved,
                digests=tuple(process.page.digests),
                kept=process.page.kept,
            )
            for rank_state in self._ours.rank_states.values()
            if (process := rank_state.process) is not None
        )
        beat = Beat(node=self.number, pulses=pulses, at=self.now)
        for leader in stage.cluster.leaders:
            if leader.leads and self.connection.beats:
                for moment in stage.network.level(
                    stage.clock.now, self.connection.link, leader.link
                ):
                    stage.clock.at(moment, leader.hear_beat, beat)

    def _leave(self, grace: float) -> None:
        self.leaving = True
        for rank_state in self._ours.rank_states.values():
            rank_state.due = None
        self._stage.clock.after(grace, self._clean_up)

    def _clean_up(self) -> None:
        for process in self.processes():
            self.ended(process, KILLED)
        self._stage.clock.after(1.0, self.vanish)

    def connected(self) -> None:
        """
        Reconnect the node to the broker, and send again all reports that are not acknowledged.
        """
        self.connection.link.mute = self.connection.link.deaf = False
        self.connection.since = self._stage.clock.now
        for mail in (self.mail, *(process.mail for process in self.processes())):
            mail.connected()

    def beats_again(self) -> None:
        """
        Let the heartbeats of the node reach the controller again.
        """
        self.connection.beats = True
        self.say_status()

    def vanish(self) -> None:
        """
        End the agent and every process that it started.
        """
        self.alive = False
        self.mail.closed = True
        self._lose_store()
        for process in self.processes():
            process.end()
