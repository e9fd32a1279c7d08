"""
Own what the controller knows of a job, and the small operations that every decision is made with.
Nothing is decided here.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from tft.core.job.commands import Command, JobOver, Tell
from tft.core.job.incident import Decision, Incident, Phase, Task
from tft.core.job.orders import ORDERS
from tft.core.job.policy import Policy
from tft.core.job.rank_process import ProcessStage
from tft.core.job.rank_state import RankState
from tft.core.job.transitions import FAULTS, SETTLED, TRANSITIONS, Reaction, State
from tft.core.plan import planner
from tft.core.plan.topology import Topology
from tft.errors import InternalError
from tft.protocol.messages import (
    ORDER_NAMES,
    Kill,
    Order,
    OrderName,
    PauseRequested,
    RankOrder,
    Refused,
    Spawn,
    StopRequested,
)

S = State


class Job:
    """
    The state of one job of `world` ranks. Only the job machine and its parts write to it.
    """

    def __init__(
        self,
        world: int,
        policy: Policy,
        *,
        name: str,
        checkpoints: str,
        checkpoint_name: str,
        at: float,
        resume: tuple[str, int] | None,
        older: Sequence[tuple[str, int]] = (),
        first_incident: int,
    ) -> None:
        self.name = name
        self.policy = policy
        self.directory = checkpoints
        """The directory that last checkpoints are written to."""
        self.checkpoint_name = checkpoint_name
        """The name of a last checkpoint: a format string with the field `step`."""
        known = older if resume is None else (*older, resume)
        self.checkpoints = {step: directory for directory, step in known}
        """Step to directory: the known checkpoints of all ranks."""
        self.unread: Counter[int] = Counter()
        """By step: how many times a rank could not load the checkpoint of that step."""
        self.missed: dict[tuple[int, str], list[int]] = {}
        """By rank and reason: the steps whose checkpoint could not be written."""
        self.resumed = resume is not None
        self.state = State.AWAITING
        self.epoch = 0
        self.now = self.led = at
        self.said: list[Command] = []
        self.rank_states = {rank: RankState(rank=rank) for rank in range(world)}
        self.members = frozenset(range(world))
        """The ranks that take part in the training. After the job has shrunk they are fewer than
        the world."""
        self.successors: dict[int, RankState] = {}
        """By rank: a process that prepares to take over the rank from a process that still
        trains."""
        self.switch: frozenset[int] = frozenset()
        """The ranks that are to be switched to other processes, all together, because of a
        request."""
        self.switch_why = ""
        """The reason for this switch."""
        self.gathering = False
        """True while all members go to one step boundary, where successors are to take over."""
        self.joined = False
        self.gathered: float | None = None
        """The time at which the last node joined. None: no node has joined yet."""
        self.displaced: list[RankState] = []
        """The processes that hold a rank and are being ended: the agent has the order, and their
        end is not reported yet."""
        self.starting: dict[tuple[int, int], RankState] = {}
        """By rank and incarnation: the processes that take no orders yet. The oldest comes
        first."""
        self.running: set[tuple[int, int]] = set()
        """Rank and incarnation of every process that is known to run."""
        self.finished: set[int] = set()
        """The ranks whose `train` has returned."""
        self.retiring: list[RankState] = []
        """The processes whose ranks were taken over by a successor, until these processes have
        ended."""
        self.refused: dict[str, tuple[Refused, float]] = {}
        """By sender: the refusal of a process's claim to a rank, and the time of the refusal."""
        self.handed: dict[int, int] = {}
        """By rank: the incarnation that was given out last."""
        self.nodes: dict[int, tuple[int, ...]] = {}
        self.agents: dict[int, tuple[str, int]] = {}
        """By node: host and pid of the agent of the node."""
        self.came: dict[int, float] = {}
        """By node: the time at which this agent came up, by the clock of the node."""
        self.room: dict[int, int] = {}
        """By node: how many more ranks the node has room for."""
        self.lost_nodes: set[int] = set()
        """The nodes that are gone, and the nodes on which nothing is to be started any more."""
        self.isolated: set[int] = set()
        """The nodes that were given up for good: an agent that joins from one of them again is
        ignored."""
        self.node_orders: dict[int, list[Spawn | Kill]] = {}
        """By rank: the `Spawn` and `Kill` orders that agents have not answered yet."""
        self.stores: dict[int, tuple[str, int]] = {}
        """By node: the address of its rendezvous store. The store that was opened last comes
        last."""
        self.incident = Incident(number=0, opened=at, decision=Decision(strategy="start"))
        self.incidents: list[Incident] = []
        self.next_number = first_incident
        self.troubles: dict[int, list[float]] = {}
        """By rank: the times at which an incident was held against the rank."""
        self.last_step = 0 if resume is None else resume[1]
        self.first = self.last_step
        """The step whose end the job begins with."""
        self.compared = self.last_step
        """The last step at whose end all copies of each shard were equal. Copies of later steps may
        differ."""
        self.untrained = True
        """True until the ranks have built their wrappers for the first time. Until then one initial
        state is as good as another."""
        self.tails = False
        """True if the loops of ranks report where their steps end."""
        self.began = False
        """True once the states that the ranks begin with were compared."""
        self.trained: set[int] = set()
        """The ranks that have completed a step since the last resume."""
        self.pause: PauseRequested | None = None
        """A pause that is under way, or that is pending until the job is healthy."""
        self.checked = ""
        """The result of the last check: `passed`, or a sentence that says what was found."""
        self.deadline: float | None = None
        """The time at which the present state is left in any case: a pause, a consultation, the
        exit of the ranks. None: no such limit."""
        self.allowed = 0.0
        """The limit behind `deadline` in seconds, as `stay` set it."""
        self.stop: StopRequested | None = None
        self.outcome: JobOver | None = None
        self.ending: list[Order] = []
        self._topology: Topology | None = None

    # ---------------------------------------------------------------- ranks and processes

    def member_states(self) -> list[RankState]:
        """
        Return the states of the ranks that are members.
        """
        return [rank_state for rank, rank_state in self.rank_states.items() if rank in self.members]

    def find(self, rank: int, incarnation: int) -> RankState | None:
        """
        Return the state of exactly this process. The process holds its rank, is a successor, or is
        retiring. None: the process is not known.
        """
        for rank_state in (self.rank_states.get(rank), self.successors.get(rank), *self.retiring):
            if rank_state is not None and (rank_state.rank, rank_state.incarnation) == (
                rank,
                incarnation,
            ):
                return rank_state
        return None

    def holds_rank(self, rank_state: RankState) -> bool:
        """
        Return whether this is the state of the process that holds the rank, and not the state of a
        successor.
        """
        return self.rank_states.get(rank_state.rank) is rank_state

    def anyone_joined(self) -> bool:
        """
        Return whether some rank has called `tft.init`, even if that process is gone by now.
        """
        return self.joined

    def placeless(self) -> list[int]:
        """
        Return the members whose process was never ordered, because no node with a place for them
        has joined.
        """
        return [
            rank_state.rank
            for rank_state in self.member_states()
            if rank_state.process.stage is ProcessStage.ABSENT
        ]

    def terminating(self) -> list[RankState]:
        """
        Return the processes that are being ended and whose end is not reported yet: what they leave
        behind is not known.
        """
        return [*self.displaced, *self.retiring]

    def awaits_ends(self) -> bool:
        """
        Return whether the ends of single processes count: while the job runs, and after it has
        completed. In a job that was ended otherwise, the nodes end all their processes, with one
        limit for all of them.
        """
        return self.state not in SETTLED or (self.state is State.EXITING and not self.ending)

    def every(self, holds: Callable[[RankState], bool]) -> bool:
        """
        Return whether `holds` is true for every member.
        """
        return all(holds(self.rank_states[rank]) for rank in self.members)

    def warm(self) -> list[RankState]:
        """
        Return the successors that are ready to take over. Of the ranks that are switched together,
        all successors are returned or none.
        """
        ready = {
            rank: successor
            for rank, successor in self.successors.items()
            if successor.ready and not successor.process.terminating
        }
        partly = frozenset() if self.switch <= ready.keys() else self.switch
        return [successor for rank, successor in ready.items() if rank not in partly]

    def returning(self) -> frozenset[int]:
        """
        Return the non-members that could come back: whole model replicas (columns) of ranks that
        are ready to take orders and are not flapping. Empty if `scale_out` is not enabled.
        """
        if len(self.members) == len(self.rank_states) or "scale_out" not in self.policy.enable:
            return frozenset()
        ready = {
            r
            for r, rank_state in self.rank_states.items()
            if r not in self.members
            and rank_state.ready
            and not rank_state.process.terminating
            and not self.flapping(r)
        }
        columns = self.topology().columns
        return frozenset(r for r in ready if ready.issuperset(columns[r]))

    def checkpointed(self, step: int, directory: str) -> None:
        """
        Add a checkpoint, and drop the oldest ones beyond `policy.keep_checkpoints`. Ranks remove
        these from disk once the new checkpoint is reported, so no rank can go back to them.
        """
        known = {**self.checkpoints, step: directory}
        kept = sorted(known)[-self.policy.keep_checkpoints :]  # 0: keep all
        self.checkpoints = {each: known[each] for each in kept}

    def not_checkpointed(self, rank: int, step: int, why: str) -> None:
        """
        Note that the checkpoint of `step` could not be written. Only the first failure per rank and
        reason is logged: a full disk stays full.
        """
        steps = self.missed.setdefault((rank, why), [])
        if not steps:
            self.tell("checkpoint_failed", rank=rank, step=step, why=why)
        steps.append(step)

    # ---------------------------------------------------------------- places on nodes

    @property
    def store(self) -> tuple[str, int] | None:
        """
        The rendezvous store for the next process groups. A store on a lost node is taken only if
        there is no other. None: no store is known.
        """
        there = [store for node, store in self.stores.items() if node not in self.lost_nodes]
        known = there or list(self.stores.values())
        return known[-1] if known else None

    def home(self, rank_state: RankState) -> int | None:
        """
        Return the node on which a process for this rank can be started: the rank's own node, or
        another node with room if the own node is lost or excluded. None: there is no such node, or
        the rank never had a node.
        """
        if rank_state.node not in self.lost_nodes | {*rank_state.excluded_nodes.values()}:
            return rank_state.node
        return self.elsewhere(rank_state, self.room)

    def elsewhere(self, rank_state: RankState, room: Mapping[int, int]) -> int | None:
        """
        Return another node with `room` on which this rank may be started. None: there is no such
        node. `room` is the number of free places by node.
        """
        for node in sorted(room):
            if room[node] > 0 and node not in {
                *self.lost_nodes,
                *rank_state.excluded_nodes.values(),
                rank_state.node,
            }:
                return node
        return None

    def settle(self, rank_state: RankState, node: int) -> None:
        """
        Give a rank its place on this node from now on.
        """
        if rank_state.node != node:
            self.room[node] -= 1
            if rank_state.node is not None:
                self.room[rank_state.node] += 1
            rank_state.node = node
            self._topology = None

    # ---------------------------------------------------------------- input of the planner

    def topology(self) -> Topology:
        """
        Return shard groups, model replicas (columns) and nodes, as the ranks reported them.
        """
        if self._topology is None:
            rank_states = self.rank_states.values()
            self._topology = Topology(
                groups={
                    shard: ranks
                    for rank_state in rank_states
                    for shard, ranks in rank_state.declared.shards.items()
                },
                columns={rank_state.rank: rank_state.declared.column for rank_state in rank_states},
                nodes={
                    rank_state.rank: rank_state.node
                    for rank_state in rank_states
                    if rank_state.node is not None
                },
            )
        return self._topology

    def placed(self) -> None:
        """
        Drop the cached topology: a rank has reported what it holds, or another process holds the
        rank now.
        """
        self._topology = None

    def only_on(self, ranks: Iterable[int]) -> list[str]:
        """
        Return the shards that no sound rank outside `ranks` holds.
        """
        going = set(ranks)
        staying = {
            rank
            for rank, rank_state in self.rank_states.items()
            if rank_state.ready
            and rank_state.holdings.trusted
            and not rank_state.process.terminating
            and rank not in going
        }
        return [s for s, held in self.topology().groups.items() if staying.isdisjoint(held)]

    def standings(self, unplaceable: Callable[[RankState], str]) -> dict[int, planner.Standing]:
        """
        Return the state of every rank as the planner sees it. `unplaceable` says why a rank whose
        process is gone cannot get another process.
        """
        return {
            rank_state.rank: rank_state.standing(
                unplaceable(rank_state) if rank_state.process.stage is ProcessStage.GONE else ""
            )
            for rank_state in self.rank_states.values()
        }

    def terms(self) -> planner.Terms:
        """
        Return what a plan for the present incident has to respect.
        """
        incident = self.incident
        kept = {
            step
            for s in self.rank_states.values()
            for step in (s.holdings.held, *s.holdings.kept)
            if step is not None
        }
        on_page = {s.rank: self._on_page(s, kept) for s in self.member_states()}
        fresh = {0: ""} if self.untrained and not self.resumed else {}
        return planner.Terms(
            enabled=self.policy.enable,
            ceiling=incident.spread.ceiling,
            checkpoints=self.checkpoints or fresh,
            trained=not self.untrained,
            faulty=frozenset(incident.faulty()),
            replaced=frozenset(incident.turnover.respawns),
            flapping={rank: why for rank in self.members if (why := self.flapping(rank))},
            failed=incident.decision.failed,
            forced=incident.decision.forced,
            without_local_state={
                rank_state.rank: on_page[rank_state.rank].union(rank_state.local_state.reported)
                for rank_state in self.member_states()
                if len(on_page[rank_state.rank]) < len(kept) or self.without_local_state(rank_state)
                if not (rank_state.declared.derives and self._may_derive(rank_state))
            },
            strangers=frozenset(s.rank for s in self.member_states() if not s.declared.shards),
            reloads=len(self.members) == len(self.rank_states)
            and self.every(lambda s: s.declared.reloads),
        )

    def without_local_state(self, rank_state: RankState) -> bool:
        """
        Return whether the process of a rank cannot reach the rank-local state that the rank had
        captured, or whether that state is out of date.
        """
        if rank_state.rank in self.incident.turnover.joining:
            return True
        if rank_state.local_state.page is None:
            return self.resumed  # then only the checkpoint has that state
        return (
            rank_state.local_state.page in self.lost_nodes
            or rank_state.local_state.page != rank_state.node
        )

    def _on_page(self, rank_state: RankState, steps: Set[int]) -> frozenset[int]:
        """
        Return those of `steps` whose captured rank-local state can be on the page of the rank's
        process.
        """
        return frozenset(
            ()
            if self.without_local_state(rank_state)
            else (s for s in steps if s >= rank_state.local_state.since)
        )

    def captures(self, rank_state: RankState) -> None:
        """
        Note that a rank has its rank-local state of the agreed step on the page of its process.
        Captures on an earlier page are not on this page, but they may have been reported: then they
        stay in `private`.
        """
        step = self.incident.progress.agreed
        rank_state.local_state.since = (
            step
            if self.without_local_state(rank_state)
            else min(rank_state.local_state.since, step)
        )
        told = (
            {}
            if rank_state.rank in self.incident.turnover.joining
            else rank_state.local_state.reported
        )
        rank_state.local_state.reported = {
            earlier: told[earlier] for earlier in told if earlier < rank_state.local_state.since
        }
        rank_state.local_state.page = rank_state.node

    def _may_derive(self, rank_state: RankState) -> bool:
        """
        Return whether the rank-local state of a rank may be made anew, because the original is not
        available.
        """
        in_checkpoint = rank_state.local_state.page is None and bool(self.checkpoints)
        return rank_state.rank in self.incident.turnover.joining or not in_checkpoint

    def see(self, rank_state: RankState) -> None:
        """
        Take in the position of a rank, alive or dead. The position of a rank that searches for a
        checkpoint is left out while the agreed step is unknown: the checkpoint may be of another
        run. A checkpoint that the job chose is of this run.
        """
        if not rank_state.holdings.searching or self.incident.progress.step is not None:
            self.incident.progress.saw(rank_state.position)

    def search(self, *, over: bool = False) -> None:
        """
        Note that every member loads a checkpoint, or with `over` that this has ended. When it ends,
        some ranks may have loaded a step that others have not, and no other rank has their
        rank-local state of that step.
        """
        for rank_state in self.member_states():
            rank_state.holdings.searching = not over

    # ---------------------------------------------------------------- flapping ranks

    def count(self, rank: int) -> None:
        """
        Hold the present incident against a rank. A second call for the same incident does nothing.
        """
        if rank not in self.incident.turnover.counted:
            self.incident.turnover.counted.add(rank)
            self.troubles.setdefault(rank, []).append(self.now)

    def flapping(self, rank: int) -> str:
        """
        Return the sentence that says that a rank has failed too often lately. Empty: the rank has
        not.
        """
        since = self.now - self.policy.flap_window
        recent = [at for at in self.troubles.get(rank, ()) if at >= since]
        if len(recent) <= self.policy.flaps:
            return ""
        return (
            f"rank {rank} was the cause of {len(recent)} incidents within "
            f"{self.policy.flap_window:.0f} s"
        )

    # ---------------------------------------------------------------- states and orders to ranks

    def move(self, state: State) -> None:
        """
        Go from the present state to `state`, and drop the deadline. Raises `InternalError` for a
        move that is not in the table.
        """
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"no way leads from {self.state} to {state}")
        self.state = state
        self.deadline = None

    @property
    def fault_reaction(self) -> Reaction:
        """
        What a fault leads to in the present state.
        """
        return FAULTS[self.state]

    def stay(self, seconds: float) -> None:
        """
        Set the deadline of the present state, in seconds from now.
        """
        self.deadline, self.allowed = self.now + seconds, seconds

    def expired(self) -> bool:
        """
        Return whether the deadline of the present state has passed.
        """
        return self.deadline is not None and self.deadline <= self.now

    def step_to(self, state: State, order: RankOrder, *, longer: float = 0.0) -> None:
        """
        Go to `state`, whose only work is this order. `longer` is as for `issue`.
        """
        self.move(state)
        self.incident.tasks = {}
        self.issue(order, longer=longer)

    def to_all(self, order: Callable[..., RankOrder], **facts: object) -> RankOrder:
        """
        Make an order for every member.
        """
        return order(**self.key(), to=tuple(sorted(self.members)), **facts)

    def key(self) -> dict[str, Any]:  # Any: the fields' own types
        """
        Return the fields that every order to ranks carries.
        """
        return {
            "epoch": self.epoch,
            "incident": self.incident.number,
            "round": self.incident.round,
            "incarnations": {
                s.rank: s.incarnation for s in self.rank_states.values() if s.incarnation > 0
            },
        }

    def issue(self, *orders: RankOrder, longer: float = 0.0) -> None:
        """
        Send an order to its ranks. They have to answer it within the limit of `ORDERS` and `longer`
        more seconds.
        """
        name = ORDER_NAMES[type(orders[0])]
        limit = ORDERS[name].seconds(self.policy) + longer
        self.incident.tasks[name] = Task(
            orders=orders,
            waiting={rank for order in orders for rank in order.to},
            issued=self.now,
            limit=limit,
            deadline=self.now + limit,
        )
        self.said.extend(orders)

    def answered_all(self, *orders: OrderName) -> bool:
        """
        Return whether every rank has answered these orders. An order that was not issued counts as
        answered.
        """
        tasks = self.incident.tasks
        return not any(tasks[order].waiting for order in orders if order in tasks)

    def excuse(self, rank: int) -> None:
        """
        Expect no answer from a rank to any open order.
        """
        for task in self.incident.tasks.values():
            task.waiting.discard(rank)

    def issued(self, order: OrderName) -> float:
        """
        Return the time at which an order was issued. If it was not issued, return the present time.
        """
        task = self.incident.tasks.get(order)
        return self.now if task is None else task.issued

    # ---------------------------------------------------------------- orders to agents

    def spawn(self, rank_state: RankState, node: int, cause: str) -> None:
        """
        Order the agent of this node to start another process for a rank.
        """
        successor = not self.holds_rank(rank_state)
        self.settle(rank_state, node)
        self.handed[rank_state.rank] = self.handed.get(rank_state.rank, -1) + 1
        rank_state.order(self.handed[rank_state.rank], self.now)
        self.starts(rank_state)
        if self.incident.is_open:
            self.incident.turnover.started += 1
        self.order_node(
            Spawn(
                epoch=self.epoch,
                node=node,
                rank=rank_state.rank,
                incarnation=rank_state.incarnation,
                cause=cause,
                successor=successor,
            )
        )

    def respawn(self, rank_state: RankState) -> None:
        """
        Start another process for a rank that has lost its process, if a node has a place for it.
        """
        node = self.home(rank_state)
        self.switch -= {rank_state.rank}
        if node is not None:
            self.incident.turnover.given_another(rank_state.rank)
            self.spawn(rank_state, node, f"rank {rank_state.rank} has lost its process")

    def starts(self, rank_state: RankState) -> None:
        """
        Note that a process starts. Its time limit to join begins now.
        """
        self.starting.pop((rank_state.rank, rank_state.incarnation), None)
        rank_state.process.spawned = self.now
        self.starting[rank_state.rank, rank_state.incarnation] = rank_state

    def waits_for_starters(self) -> bool:
        """
        Return whether the process of some member is still starting.
        """
        return any(self.is_current(*process) for process in self.starting)

    def kill(self, rank_state: RankState, why: str, *, last_words: bool) -> None:
        """
        Order the agent to end the process of a rank.
        """
        if rank_state.node is not None:
            self.order_node(
                Kill(
                    epoch=self.epoch,
                    node=rank_state.node,
                    rank=rank_state.rank,
                    incarnation=rank_state.incarnation,
                    last_words=last_words,
                    cause=why,
                )
            )

    def order_node(self, order: Spawn | Kill) -> None:
        """
        Send an order to an agent. The order is repeated until the agent has answered it.
        """
        self.node_orders.setdefault(order.rank, []).append(order)
        self.said.append(order)

    def forget(self, rank: int, incarnation: int, *kinds: type) -> None:
        """
        Drop the orders of these kinds to an agent: they need no answer any more.
        """
        self.node_orders[rank] = [
            order
            for order in self.node_orders.get(rank, [])
            if order.incarnation != incarnation or not isinstance(order, kinds)
        ]

    # ---------------------------------------------------------------- reports and events

    def phase(self, name: str, rank: int | None, start: float, end: float) -> None:
        """
        Add a stretch of time to the report of the incident, unless the incident is closed.
        """
        if self.incident.closed is None:
            self.incident.phases.append(Phase(name=name, rank=rank, start=start, end=end))

    def say(self, order: Order) -> None:
        """
        Send an order that needs no answer.
        """
        self.said.append(order)

    def tell(self, event: str, **facts: object) -> None:
        """
        Send an event for the log.
        """
        self.said.append(Tell(event=event, facts=facts))

    def present(self) -> Iterable[RankState]:
        """
        Return the states of the processes that hold a rank and can hear an order. They may be
        members or not. Successors are not included.
        """
        there = (ProcessStage.JOINED, ProcessStage.READY)
        return [
            rank_state
            for rank_state in self.rank_states.values()
            if rank_state.process.stage in there
        ]

    def all_left(self) -> bool:
        """
        Return whether no process of the job runs any more. If the job has completed, only the
        processes that hold the rank of a member count: the others are ended together with their
        nodes.
        """
        if not self.ending:  # the nodes were not ordered to end: the job has completed
            return not any(self.is_current(*process) for process in self.running)
        return not self.running

    def is_current(self, rank: int, incarnation: int) -> bool:
        """
        Return whether this process holds the rank of a member.
        """
        return rank in self.members and self.rank_states[rank].incarnation == incarnation
