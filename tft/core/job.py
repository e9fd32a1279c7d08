"""
What is known of a job, and the small parts every decision is made with. Decides nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from tft.core import planner
from tft.core.commands import Command, JobOver, Tell
from tft.core.incident import Incident, Phase, Task
from tft.core.policy import Policy
from tft.core.rank_state import Process, RankState
from tft.core.table import TRANSITIONS, State
from tft.core.topology import Topology
from tft.errors import InternalError
from tft.protocol.messages import (
    ORDER_NAMES,
    Kill,
    Order,
    OrderName,
    PauseRequested,
    RankOrder,
    Refused,
    SavedFile,
    Spawn,
    StopRequested,
)

S = State


class Job:
    """
    One job of `world` ranks. Written by the machine and the parts it is made of only.
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
        """Where last checkpoints go."""
        self.checkpoint_name = checkpoint_name
        """What they are called."""
        known = older if resume is None else (*older, resume)
        self.checkpoints = {step: directory for directory, step in known}
        """Step to directory: the checkpoints of all ranks that are known."""
        self.unread: Counter[int] = Counter()
        """By step, how often some rank could not load its checkpoint."""
        self.missed: dict[tuple[int, str], list[int]] = {}
        """By rank and reason: the steps of which there is no checkpoint for it."""
        self.resumed = resume is not None
        self.state = State.AWAITING
        self.epoch = 0
        self.now = self.led = at
        self.said: list[Command] = []
        self.rank_states = {rank: RankState(rank=rank) for rank in range(world)}
        self.members = frozenset(range(world))
        """The ranks that take part: fewer than the world once the job has shrunk."""
        self.successors: dict[int, RankState] = {}
        """By rank: a process that gets ready to take over from one that still trains."""
        self.switch: frozenset[int] = frozenset()
        """The ranks that are to go to other processes, together, because somebody has asked for it."""
        self.switch_why = ""
        """Why they are."""
        self.gathering = False
        """Everyone is on the way to one boundary, where somebody is to take over."""
        self.joined = False
        self.gathered: float | None = None
        """When the last node joined."""
        self.displaced: list[RankState] = []
        """Those who hold a rank, were told to be ended, and have not ended yet."""
        self.starting: dict[tuple[int, int], RankState] = {}
        """By rank and incarnation: the processes that take no orders yet, the oldest first."""
        self.running: set[tuple[int, int]] = set()
        """Rank and incarnation of every process that is known to run."""
        self.finished: set[int] = set()
        """The ranks whose `train` has returned."""
        self.retiring: list[RankState] = []
        """Processes whose ranks were taken over, until they have ended."""
        self.refused: dict[str, tuple[Refused, float]] = {}
        """By sender: processes whose claim to a rank was refused, and when."""
        self.handed: dict[int, int] = {}
        """By rank: the incarnation that was handed out last."""
        self.nodes: dict[int, tuple[int, ...]] = {}
        self.agents: dict[int, tuple[str, int]] = {}
        """By node: host and pid of its agent."""
        self.came: dict[int, float] = {}
        """By node: when that agent came up, by the clock of the node."""
        self.room: dict[int, int] = {}
        """By node: for how many more ranks it has room."""
        self.lost_nodes: set[int] = set()
        """Nodes that are gone, or that nothing is to be started on."""
        self.isolated: set[int] = set()
        """Those of them that are not taken back."""
        self.node_orders: dict[int, list[Spawn | Kill]] = {}
        """`Spawn` and `Kill`, by rank, until they are answered."""
        self.stores: dict[int, tuple[str, int]] = {}
        """By node: where its rendezvous store listens; the one that was opened last comes last."""
        self.incident = Incident(number=0, opened=at, strategy="start")
        self.incidents: list[Incident] = []
        self.next_number = first_incident
        self.troubles: dict[int, list[float]] = {}
        """By rank: when it was the cause of an incident."""
        self.last_step = 0 if resume is None else resume[1]
        self.first = self.last_step
        """The step whose end the job begins with."""
        self.compared = self.last_step
        """The last step at whose end all copies of each shard were equal: what is later may have come to differ."""
        self.untrained = True
        """No rank has built its wrapper yet: every fresh state is as good as another."""
        self.tails = False
        """The loops of ranks say where their steps end."""
        self.began = False
        """What the ranks begin with has been compared."""
        self.trained: set[int] = set()
        """The ranks that have done a step since the last resume."""
        self.saved: dict[str, SavedFile] = {}
        self.pause: PauseRequested | None = None
        """A pause that is under way, or is kept until the job is healthy."""
        self.checked = ""
        """What became of the last check: `passed`, or a sentence."""
        self.deadline: float | None = None
        """When the state is left whatever comes: a pause, a consultation, the ranks' leaving."""
        self.allowed = 0.0
        """How many seconds that was, when it was set."""
        self.stop: StopRequested | None = None
        self.outcome: JobOver | None = None
        self.ending: list[Order] = []
        self._topology: Topology | None = None

    # ---------------------------------------------------------------- who is there

    def member_states(self) -> list[RankState]:
        """
        The states of the ranks that are members.
        """
        return [rank_state for rank, rank_state in self.rank_states.items() if rank in self.members]

    def find(self, rank: int, incarnation: int) -> RankState | None:
        """
        The state of exactly this process: it holds its rank, is a successor, or is retiring. None: it is not known.
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
        Whether it is the state of the process that holds the rank, and not that of a successor.
        """
        return self.rank_states.get(rank_state.rank) is rank_state

    def anyone_joined(self) -> bool:
        """
        Some rank has called `tft.init`, whether it still lives or not.
        """
        return self.joined

    def placeless(self) -> list[int]:
        """
        The members that were never asked for: no node has come that has a place for them.
        """
        return [
            rank_state.rank
            for rank_state in self.member_states()
            if rank_state.process is Process.ABSENT
        ]

    def terminating(self) -> list[RankState]:
        """
        Those who were told to be ended and whose end has not come in: what they leave is not known.
        """
        return [*self.displaced, *self.retiring]

    def every(self, holds: Callable[[RankState], bool]) -> bool:
        """
        Something holds for every member.
        """
        return all(holds(self.rank_states[rank]) for rank in self.members)

    def warm(self) -> list[RankState]:
        """
        Those who are ready to take over: of the ranks that are switched together, all or none.
        """
        ready = {
            rank: successor
            for rank, successor in self.successors.items()
            if successor.ready and not successor.terminating
        }
        partly = frozenset() if self.switch <= ready.keys() else self.switch
        return [successor for rank, successor in ready.items() if rank not in partly]

    def returning(self) -> frozenset[int]:
        """
        The ranks outside that could come back: whole columns of them, ready to take orders.
        """
        if len(self.members) == len(self.rank_states) or "scale_out" not in self.policy.enable:
            return frozenset()
        ready = {
            r
            for r, rank_state in self.rank_states.items()
            if r not in self.members
            and rank_state.ready
            and not rank_state.terminating
            and not self.flapping(r)
        }
        columns = self.topology().columns
        return frozenset(r for r in ready if ready.issuperset(columns[r]))

    def checkpointed(self, step: int, directory: str) -> None:
        """
        There is another checkpoint. Ranks remove older ones when we have heard of it: so these are none
        to go back to any more.
        """
        known = {**self.checkpoints, step: directory}
        kept = sorted(known)[-self.policy.keep_checkpoints :]  # all, where that is 0
        self.checkpoints = {each: known[each] for each in kept}

    def not_checkpointed(self, rank: int, step: int, why: str) -> None:
        """
        There is no checkpoint of `step`. For the log the first time is news: a full disk stays full.
        """
        steps = self.missed.setdefault((rank, why), [])
        if not steps:
            self.tell("checkpoint_failed", rank=rank, step=step, why=why)
        steps.append(step)

    # ---------------------------------------------------------------- where they could be

    @property
    def store(self) -> tuple[str, int] | None:
        """
        The rendezvous store for the next groups: not that of a node that is gone, if there is
        another.
        """
        there = [store for node, store in self.stores.items() if node not in self.lost_nodes]
        known = there or list(self.stores.values())
        return known[-1] if known else None

    def home(self, rank_state: RankState) -> int | None:
        """
        The node on which a process for this rank can be started: its own, else one with room.
        """
        if rank_state.node not in self.lost_nodes | rank_state.excluded_nodes:
            return rank_state.node
        return self.elsewhere(rank_state, self.room)

    def elsewhere(self, rank_state: RankState, room: Mapping[int, int]) -> int | None:
        """
        Another node, of those that have `room`.
        """
        for node in sorted(room):
            if room[node] > 0 and node not in {
                *self.lost_nodes,
                *rank_state.excluded_nodes,
                rank_state.node,
            }:
                return node
        return None

    def settle(self, rank_state: RankState, node: int) -> None:
        """
        A rank has its place on this node from now on.
        """
        if rank_state.node != node:
            self.room[node] -= 1
            if rank_state.node is not None:
                self.room[rank_state.node] += 1
            rank_state.node = node
            self._topology = None

    # ---------------------------------------------------------------- what the planner is told

    def topology(self) -> Topology:
        """
        Shard groups, columns and nodes, as the ranks named them.
        """
        if self._topology is None:
            rank_states = self.rank_states.values()
            self._topology = Topology(
                groups={
                    shard: ranks
                    for rank_state in rank_states
                    for shard, ranks in rank_state.shards.items()
                },
                columns={rank_state.rank: rank_state.column for rank_state in rank_states},
                nodes={
                    rank_state.rank: rank_state.node
                    for rank_state in rank_states
                    if rank_state.node is not None
                },
            )
        return self._topology

    def placed(self) -> None:
        """
        A rank has said what it holds, or another process speaks for it: the topology may be another.
        """
        self._topology = None

    def only_on(self, ranks: Iterable[int]) -> list[str]:
        """
        The shards that no sound rank has but these.
        """
        going = set(ranks)
        staying = {
            rank
            for rank, rank_state in self.rank_states.items()
            if rank_state.ready
            and rank_state.trusted
            and not rank_state.terminating
            and rank not in going
        }
        return [s for s, held in self.topology().groups.items() if staying.isdisjoint(held)]

    def standings(self, unplaceable: Callable[[RankState], str]) -> dict[int, planner.Standing]:
        """
        Where every rank stands. `unplaceable` says why a rank cannot get another process.
        """
        return {
            rank_state.rank: rank_state.standing(
                unplaceable(rank_state) if rank_state.process is Process.GONE else ""
            )
            for rank_state in self.rank_states.values()
        }

    def terms(self) -> planner.Terms:
        """
        What a plan for the present incident has to respect.
        """
        incident = self.incident
        kept = {
            step
            for s in self.rank_states.values()
            for step in (s.held, *s.kept)
            if step is not None
        }
        on_page = {s.rank: self._on_page(s, kept) for s in self.member_states()}
        fresh = {0: ""} if self.untrained and not self.resumed else {}
        return planner.Terms(
            enabled=self.policy.enable,
            ceiling=incident.ceiling,
            checkpoints=self.checkpoints or fresh,
            trained=not self.untrained,
            faulty=frozenset(incident.faulty()),
            replaced=frozenset(incident.respawns),
            flapping={rank: why for rank in self.members if (why := self.flapping(rank))},
            failed=incident.failed,
            forced=incident.forced,
            without_local_state={
                rank_state.rank: on_page[rank_state.rank].union(rank_state.private)
                for rank_state in self.member_states()
                if len(on_page[rank_state.rank]) < len(kept) or self.without_local_state(rank_state)
                if not (rank_state.derives and self._may_derive(rank_state))
            },
            strangers=frozenset(s.rank for s in self.member_states() if not s.shards),
            reloads=len(self.members) == len(self.rank_states) and self.every(lambda s: s.reloads),
        )

    def without_local_state(self, rank_state: RankState) -> bool:
        """
        What a rank had captured of its own is out of reach of its process, or is of a time that
        is over.
        """
        if rank_state.rank in self.incident.joining:
            return True
        if rank_state.page is None:
            return self.resumed  # what it is to begin with stands in the checkpoint, and there only
        return rank_state.page in self.lost_nodes or rank_state.page != rank_state.node

    def _on_page(self, rank_state: RankState, steps: Set[int]) -> frozenset[int]:
        """
        The steps of which the page of its process can hold what the rank had captured.
        """
        return frozenset(
            ()
            if self.without_local_state(rank_state)
            else (s for s in steps if s >= rank_state.since)
        )

    def captures(self, rank_state: RankState) -> None:
        """
        A rank has what is its own at the agreed step on the page of its process. What it had captured
        earlier on another page is not there, but may have been told.
        """
        step = self.agreed()
        rank_state.since = (
            step if self.without_local_state(rank_state) else min(rank_state.since, step)
        )
        told = {} if rank_state.rank in self.incident.joining else rank_state.private
        rank_state.private = {
            earlier: told[earlier] for earlier in told if earlier < rank_state.since
        }
        rank_state.page = rank_state.node

    def _may_derive(self, rank_state: RankState) -> bool:
        """
        Its private state may be made anew: it is not to be had as it was.
        """
        in_checkpoint = rank_state.page is None and bool(self.checkpoints)
        return rank_state.rank in self.incident.joining or not in_checkpoint

    def see(self, rank_state: RankState) -> None:
        """
        Takes in where a rank stands, or stood when it died: not where what it has found may be of another
        run. What is known to be loaded is of this one.
        """
        if not rank_state.searching or self.incident.step is not None:
            self.incident.saw(rank_state.position)

    def search(self, *, over: bool = False) -> None:
        """
        Every member loads a checkpoint, until that is `over`: what some have loaded by then the others have
        not, and what is their own at that step nobody else has.
        """
        for rank_state in self.member_states():
            rank_state.searching = not over

    def agreed(self) -> int:
        """
        The step at whose end everyone is to stand: to go on from there, or to save it.
        """
        return (self.incident.step or 1) - 1

    # ---------------------------------------------------------------- what is held against a rank

    def count(self, rank: int) -> None:
        """
        The present incident is held against a rank, once.
        """
        if rank not in self.incident.counted:
            self.incident.counted.add(rank)
            self.troubles.setdefault(rank, []).append(self.now)

    def flapping(self, rank: int) -> str:
        """
        The sentence that says that a rank has failed too often lately; empty: it has not.
        """
        since = self.now - self.policy.flap_window
        recent = [at for at in self.troubles.get(rank, ()) if at >= since]
        if len(recent) <= self.policy.flaps:
            return ""
        return (
            f"rank {rank} was the cause of {len(recent)} incidents within "
            f"{self.policy.flap_window:.0f} s"
        )

    # ---------------------------------------------------------------- moving on

    def move(self, state: State) -> None:
        """
        From one state to the next. Raises `InternalError` for a move that is not in the table.
        """
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"no way leads from {self.state} to {state}")
        self.state = state
        self.deadline = None

    def stay(self, seconds: float) -> None:
        """
        The present state is left after so many seconds, whatever comes.
        """
        self.deadline, self.allowed = self.now + seconds, seconds

    def expired(self) -> bool:
        """
        The present state has lasted as long as it may.
        """
        return self.deadline is not None and self.deadline <= self.now

    def step_to(self, state: State, order: RankOrder, limit: float) -> None:
        """
        The next state, whose work is this one order.
        """
        self.move(state)
        self.incident.tasks = {}
        self.issue(order, limit=limit)

    def to_all(self, order: Callable[..., RankOrder], **facts: object) -> RankOrder:
        """
        An order for every member.
        """
        return order(**self.key(), to=tuple(sorted(self.members)), **facts)

    def key(self) -> dict[str, Any]:  # Any: the fields' own types
        """
        What every order to ranks carries.
        """
        return {
            "epoch": self.epoch,
            "incident": self.incident.number,
            "round": self.incident.round,
            "incarnations": {
                s.rank: s.incarnation for s in self.rank_states.values() if s.incarnation > 0
            },
        }

    def issue(self, *orders: RankOrder, limit: float) -> None:
        """
        Says an order; it is owed an answer within `limit` seconds.
        """
        self.incident.tasks[ORDER_NAMES[type(orders[0])]] = Task(
            orders=orders,
            waiting={rank for order in orders for rank in order.to},
            issued=self.now,
            limit=limit,
            deadline=self.now + limit,
        )
        self.said.extend(orders)

    def answered_all(self, *orders: OrderName) -> bool:
        """
        Nobody owes an answer to any of these orders.
        """
        tasks = self.incident.tasks
        return not any(tasks[order].waiting for order in orders if order in tasks)

    def excuse(self, rank: int) -> None:
        """
        A rank owes no answer any more.
        """
        for task in self.incident.tasks.values():
            task.waiting.discard(rank)

    def issued(self, order: OrderName) -> float:
        """
        When an order was said.
        """
        task = self.incident.tasks.get(order)
        return self.now if task is None else task.issued

    # ---------------------------------------------------------------- orders to agents

    def spawn(self, rank_state: RankState, node: int, cause: str) -> None:
        """
        Has another process started for a rank, on this node.
        """
        successor = not self.holds_rank(rank_state)
        self.settle(rank_state, node)
        self.handed[rank_state.rank] = self.handed.get(rank_state.rank, -1) + 1
        rank_state.order(self.handed[rank_state.rank], self.now)
        self.starts(rank_state)
        if self.incident.is_open:
            self.incident.started += 1
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
        Has another process started for a rank that has lost its own, where there is a place.
        """
        node = self.home(rank_state)
        self.switch -= {rank_state.rank}
        if node is not None:
            self.incident.given_another(rank_state.rank)
            self.spawn(rank_state, node, f"rank {rank_state.rank} has lost its process")

    def starts(self, rank_state: RankState) -> None:
        """
        A process is on its way, and its time begins now.
        """
        self.starting.pop((rank_state.rank, rank_state.incarnation), None)
        rank_state.spawned = self.now
        self.starting[rank_state.rank, rank_state.incarnation] = rank_state

    def waits_for_starters(self) -> bool:
        """
        Some member's process is still starting.
        """
        return any(self.is_current(*process) for process in self.starting)

    def kill(self, rank_state: RankState, why: str, *, last_words: bool) -> None:
        """
        Has the process of a rank ended.
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
        Says an order to an agent; it is repeated until it is answered.
        """
        self.node_orders.setdefault(order.rank, []).append(order)
        self.said.append(order)

    def forget(self, rank: int, incarnation: int, *kinds: type) -> None:
        """
        These orders to an agent need no answer any more.
        """
        self.node_orders[rank] = [
            order
            for order in self.node_orders.get(rank, [])
            if order.incarnation != incarnation or not isinstance(order, kinds)
        ]

    # ---------------------------------------------------------------- telling

    def phase(self, name: str, rank: int | None, start: float, end: float) -> None:
        """
        A stretch of time for the report of the incident that is open.
        """
        if self.incident.closed is None:
            self.incident.phases.append(Phase(name=name, rank=rank, start=start, end=end))

    def say(self, order: Order) -> None:
        """
        Says an order that is owed no answer.
        """
        self.said.append(order)

    def tell(self, event: str, **facts: object) -> None:
        """
        Says something for the log.
        """
        self.said.append(Tell(event=event, facts=facts))

    def present(self) -> Iterable[RankState]:
        """
        The processes that can hear an order, members or not.
        """
        there = (Process.JOINED, Process.READY)
        return [
            rank_state for rank_state in self.rank_states.values() if rank_state.process in there
        ]

    def all_left(self) -> bool:
        """
        No process of the job runs any more. Where all is done, nobody waits for those that had no
        part in it: they are ended with their nodes.
        """
        if not self.ending:  # the nodes were not told to end: all is done
            return not any(self.is_current(*process) for process in self.running)
        return not self.running

    def is_current(self, rank: int, incarnation: int) -> bool:
        """
        This process holds the rank of a member.
        """
        return rank in self.members and self.rank_states[rank].incarnation == incarnation
