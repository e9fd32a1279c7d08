"""
Define all facts that the controller knows about a job, and small operations on these facts. The
other modules of the job machine share the operations. No decision is made here.
"""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from tft.core.job.commands import Command, Tell
from tft.core.job.history import History
from tft.core.job.incident import Decision, Incident, Phase, Task
from tft.core.job.membership import Processes, Ranks, Succession
from tft.core.job.nodes import Nodes
from tft.core.job.orders import ORDERS
from tft.core.job.origin import Origin
from tft.core.job.policy import Policy
from tft.core.job.rank_state import RankState
from tft.core.job.requests import JobEnd, Pause
from tft.core.job.timing import Timing
from tft.core.job.training import RANKS_AWAY, UNFINISHED, Checkpoints, Training
from tft.core.job.transitions import FAULTS, SETTLED, TRANSITIONS, Reaction, State
from tft.core.plan.plan import START
from tft.errors import InternalError
from tft.protocol.messages import (
    ORDER_NAMES,
    Kill,
    Order,
    OrderName,
    RankOrder,
    Spawn,
)


class Job:
    """
    The facts about one job of `world` ranks. Only the job machine and its parts change them.
    """

    def __init__(self, world: int, policy: Policy, origin: Origin, *, at: float) -> None:
        self.name = origin.job
        self.policy = policy
        self.state = State.AWAITING
        self.said: list[Command] = []
        """The commands that the job machine will return to the controller for the event that is
        being handled."""
        self.timing = Timing(now=at, led=at)
        self.ranks = Ranks.of(world)
        self.succession = Succession()
        self.processes = Processes()
        self.nodes = Nodes()
        self.checkpoints = Checkpoints.of(origin)
        self.training = Training.of(origin)
        self.incident = Incident(number=0, opened=at, decision=Decision(plan=START))
        """The open incident or, if no incident is open, the last incident."""
        self.history = History(next_number=origin.first_incident)
        self.pausing = Pause()
        self.end = JobEnd()

    # ---------------------------------------------------------------- ranks and processes

    def find(self, rank: int, incarnation: int) -> RankState | None:
        """
        Return what is known about the process with this rank and this incarnation. The process may
        hold the rank, be a successor that will take the rank over, or be a replaced process that
        has not ended yet. Return None if no such process is known.
        """
        for rank_state in (
            self.ranks.states.get(rank),
            self.succession.successors.get(rank),
            *self.processes.retiring,
        ):
            if rank_state is not None and (rank_state.rank, rank_state.incarnation) == (
                rank,
                incarnation,
            ):
                return rank_state
        return None

    def awaits_ends(self) -> bool:
        """
        Return True if there must be a time limit for each process that is being ended. This is so
        while the job runs, and while the ranks leave a completed job. If the job ends in another
        way, the agents end all processes of their nodes, and one time limit covers all of these
        processes.
        """
        return self.state not in SETTLED or (self.state is State.EXITING and not self.end.orders)

    def unsettled(self) -> bool:
        """
        Return True while it is not known which training state is left in the job. Either a process
        is being ended, or a node has not yet reported the rank-local state that it has kept for a
        lost node.
        """
        return bool(self.processes.terminating() or self.nodes.recalls)

    def returning(self) -> frozenset[int]:
        """
        Return the ranks that have left the job and can come back to it. A model replica comes back
        only as a whole: each of its ranks must be able to receive orders, and must not have caused
        too many incidents lately. Return no ranks if the strategy `scale_out` is not enabled.
        """
        if self.ranks.whole or "scale_out" not in self.policy.enable:
            return frozenset()
        ready = {
            r
            for r, rank_state in self.ranks.states.items()
            if r not in self.ranks.members
            and rank_state.ready
            and not rank_state.process.terminating
            and not self.flapping(r)
        }
        columns = self.ranks.topology().columns
        return frozenset(r for r in ready if ready.issuperset(columns[r]))

    def all_left(self) -> bool:
        """
        Return True if no process of the job runs any more. If the job is completed, look only at
        the processes of ranks that take part in training. The agents will end all other processes.
        """
        # `end.orders` is empty here only if the job is completed. Otherwise the nodes were ordered
        # to end all processes as soon as the outcome was decided
        if not self.end.orders:
            return not any(self.ranks.is_current(*process) for process in self.processes.running)
        return not self.processes.running

    # ---------------------------------------------------------------- places on nodes

    def home(self, rank_state: RankState) -> int | None:
        """
        Return the node on which a process for this rank can be started. This is the present node of
        the rank or, if that node is lost or excluded for the rank, another node with room. Return
        None if there is no such node, or if the rank never had a node.
        """
        if rank_state.node not in self.nodes.lost | {*rank_state.excluded_nodes.values()}:
            return rank_state.node
        return self.elsewhere(rank_state, self.nodes.room)

    def elsewhere(self, rank_state: RankState, room: Mapping[int, int]) -> int | None:
        """
        Return a node with room, other than the present node of the rank, on which a process of this
        rank may be started. Return None if there is no such node. `room` has the number of free
        places by node.
        """
        excluded = {*rank_state.excluded_nodes.values(), rank_state.node}
        return self.nodes.with_room(excluded, room)

    def settle(self, rank_state: RankState, node: int) -> None:
        """
        Set the node on which the process of a rank runs, and update the number of free places on
        the old and the new node of the rank.
        """
        if rank_state.node != node:
            self.nodes.room[node] -= 1
            if rank_state.node is not None:
                self.nodes.room[rank_state.node] += 1
            rank_state.node = node
            self.ranks.placed()

    # ---------------------------------------------------------------- positions and checkpoints

    def see(self, rank_state: RankState) -> None:
        """
        Record the last known position of a rank in the incident, so that the job knows how far the
        ranks had come. Ignore the position while the rank loads a checkpoint that the ranks must
        find themselves, because that checkpoint may be of another run.
        """
        if not rank_state.holdings.searching or self.incident.progress.step is not None:
            self.incident.progress.saw(rank_state.position)

    def begin_training(self) -> None:
        """
        Record that the ranks that take part have built their wrappers, such as DDP, for the first
        time. The wrappers may have made the initial states of these ranks equal. So do not use the
        initial state of a rank that has left the job before.
        """
        if not self.training.untrained:
            return
        self.training.untrained = False
        for rank_state in self.ranks.states.values():
            if rank_state.rank not in self.ranks.members and not rank_state.holdings.held:
                rank_state.holdings.distrust()

    def search(self, *, over: bool = False) -> None:
        """
        Record that every rank that takes part begins to load a checkpoint. If `over` is True,
        record instead that the loading has ended. While ranks load, the state and the position of a
        rank do not count, because some ranks may have loaded a step that other ranks have not.
        """
        for rank_state in self.ranks.member_states():
            rank_state.holdings.searching = not over

    def checkpointed(self, step: int, directory: str) -> None:
        """
        Record that the checkpoint of `step` is complete. Also record that periodic checkpoints of
        earlier steps that are incomplete now will never be completed.
        """
        self.leave_unfinished(step)
        self.checkpoints.add(step, directory, keep=self.policy.keep_checkpoints)

    def leave_unfinished(self, step: int) -> None:
        """
        Record that the periodic checkpoints of steps before `step` that are incomplete now will
        never be completed.
        """
        since = self.checkpoints.suspended
        for older in self.checkpoints.unfinished(step, every=self.policy.checkpoint_every):
            away = since is not None and older > since
            self.not_checkpointed(None, older, RANKS_AWAY if away else UNFINISHED)

    def not_checkpointed(self, rank: int | None, step: int, why: str) -> None:
        """
        Record that the periodic checkpoint of `step` could not be written. `rank` has reported
        this, or is None if no rank has. Log `checkpoint_failed`, with the reason, only at the
        first failure for each rank and reason, because the reason may last, as with a full disk.
        Log `checkpoint_missed`, without the reason, once for each missed checkpoint.
        """
        self.checkpoints.found(step)
        steps = self.checkpoints.missed.setdefault((rank, why), [])
        if not steps:
            self.tell("checkpoint_failed", rank=rank, step=step, why=why)
        if step not in self.checkpoints.told:
            self.checkpoints.told.add(step)
            self.tell("checkpoint_missed", step=step)
        steps.append(step)

    # ---------------------------------------------------------------- flapping ranks

    def count(self, rank: int) -> None:
        """
        Count the present incident against a rank. A rank that causes too many incidents is not
        restarted any more. A second call for the same incident does nothing.
        """
        if rank not in self.incident.turnover.counted:
            self.incident.turnover.counted.add(rank)
            self.history.troubles.setdefault(rank, []).append(self.timing.now)

    def flapping(self, rank: int) -> str:
        """
        Return a sentence for operators if a rank has caused too many incidents lately: more than
        `policy.flaps` within `policy.flap_window` seconds. Otherwise return an empty text.
        """
        since = self.timing.now - self.policy.flap_window
        recent = self.history.recent(rank, since)
        if recent <= self.policy.flaps:
            return ""
        return (
            f"rank {rank} was the cause of {recent} incidents within "
            f"{self.policy.flap_window:.0f} s"
        )

    # ---------------------------------------------------------------- states and orders to ranks

    def move(self, state: State) -> None:
        """
        Move the job from its present state to `state`, and drop the deadline of the present state.
        Raises `InternalError` if the table `TRANSITIONS` does not allow this move.
        """
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"the state machine has no transition from {self.state} to {state}")
        self.state = state
        self.timing.deadline = None

    @property
    def fault_reaction(self) -> Reaction:
        """
        What the job does about a fault in the present state of the job.
        """
        return FAULTS[self.state]

    def new_round(self) -> None:
        """
        Begin a new round of the incident, in which answers to orders of the round before are
        ignored. Give up the process groups that ranks may be forming.
        """
        self.incident.round += 1
        self.incident.tasks.pop("regroup", None)

    def step_to(self, state: State, order: RankOrder, *, longer: float = 0.0) -> None:
        """
        Move the job to `state`, and send the order that belongs to this state. Do not wait for the
        answers to earlier orders any more. The ranks get `longer` seconds more than the usual limit
        to answer.
        """
        self.move(state)
        self.incident.tasks = {}
        self.issue(order, longer=longer)

    def to_all(self, order: Callable[..., RankOrder], **facts: object) -> RankOrder:
        """
        Return an order of the class `order` that is addressed to every rank that takes part in
        training. `facts` are the fields that only this class of order has. The order is not sent
        yet.
        """
        return order(**self.key(), to=tuple(sorted(self.ranks.members)), **facts)

    def key(self) -> dict[str, Any]:  # Any: the fields of an order have different types
        """
        Return the values of the fields that all orders to ranks have, by name of the field: epoch,
        incident, round, and the incarnations of the ranks.
        """
        return {
            "epoch": self.timing.epoch,
            "incident": self.incident.number,
            "round": self.incident.round,
            "incarnations": {
                s.rank: s.incarnation for s in self.ranks.states.values() if s.incarnation > 0
            },
        }

    def issue(self, *orders: RankOrder, longer: float = 0.0) -> None:
        """
        Send an order to the ranks to which it is addressed. If there are several `orders`, they
        must be of the same class. The ranks must answer within the limit that the table `ORDERS`
        has for this kind of order, plus `longer` seconds. If `longer` is infinite, the time limit
        begins only when the method `limit` is called.
        """
        name = ORDER_NAMES[type(orders[0])]
        limit = ORDERS[name].seconds(self.policy) + longer
        self.incident.tasks[name] = Task(
            orders=orders,
            waiting={rank for order in orders for rank in order.to},
            issued=self.timing.now,
            limit=limit,
            deadline=self.timing.now + limit,
        )
        self.said.extend(orders)

    def limit(self, order: OrderName) -> None:
        """
        Begin the time limit of an unanswered order that was sent without a time limit. If the time
        limit of the order runs already, do nothing.
        """
        task = self.incident.tasks[order]
        if task.limit == inf:
            task.limit = ORDERS[order].seconds(self.policy)
            task.deadline = self.timing.now + task.limit

    def answered_all(self, *orders: OrderName) -> bool:
        """
        Return True if every rank that must answer these orders has done so. An order that was not
        sent counts as answered.
        """
        tasks = self.incident.tasks
        return not any(tasks[order].waiting for order in orders if order in tasks)

    def forms_groups_in_vain(self) -> bool:
        """
        Return True if ranks are forming process groups with a rank that has lost its process since
        the order to form them. Then these groups can never be formed.
        """
        task = self.incident.tasks.get("regroup")
        states = [self.ranks.states[r] for order in task.orders for r in order.to] if task else []
        return any(not state.ready or state.process.terminating for state in states)

    def excuse(self, rank: int) -> None:
        """
        Remove a rank from all unanswered orders: the job does not wait for answers of this rank any
        more.
        """
        for task in self.incident.tasks.values():
            task.waiting.discard(rank)

    def issued(self, order: OrderName) -> float:
        """
        Return the time at which this order was sent to the ranks. If the order was not sent, or was
        dropped since, return the present time.
        """
        task = self.incident.tasks.get(order)
        return self.timing.now if task is None else task.issued

    # ---------------------------------------------------------------- orders to agents

    def spawn(self, rank_state: RankState, node: int, cause: str) -> None:
        """
        Order the agent of `node` to start a process for a rank. `cause` is the reason that the
        agent gets. If `rank_state` is not the state of the process that holds the rank, the new
        process is a successor, which will take the rank over later.
        """
        successor = not self.ranks.holds_rank(rank_state)
        self.settle(rank_state, node)
        self.processes.handed[rank_state.rank] = self.processes.handed.get(rank_state.rank, -1) + 1
        rank_state.order(self.processes.handed[rank_state.rank], self.timing.now)
        self.processes.starts(rank_state, self.timing.now)
        if self.incident.is_open:
            self.incident.turnover.started += 1
        self.order_node(
            Spawn(
                epoch=self.timing.epoch,
                node=node,
                rank=rank_state.rank,
                incarnation=rank_state.incarnation,
                cause=cause,
                successor=successor,
            )
        )

    def respawn(self, rank_state: RankState) -> None:
        """
        Start another process for a rank that has lost its process, if a node has a place for the
        new process.
        """
        node = self.home(rank_state)
        self.succession.switch -= {rank_state.rank}
        if node is not None:
            self.incident.turnover.given_another(rank_state.rank)
            self.spawn(rank_state, node, f"rank {rank_state.rank} has lost its process")

    def waits_for_starters(self) -> bool:
        """
        Return True if the process of any rank that takes part in training is still starting.
        """
        return any(self.ranks.is_current(*process) for process in self.processes.starting)

    def kill(self, rank_state: RankState, why: str, *, last_words: bool) -> None:
        """
        Order the agent of the node to end the process of a rank. `why` is the reason that the agent
        gets. With `last_words`, the process first writes the stacks of its threads.
        """
        if rank_state.node is not None:
            self.order_node(
                Kill(
                    epoch=self.timing.epoch,
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
        self.nodes.orders.setdefault(order.rank, []).append(order)
        self.said.append(order)

    # ---------------------------------------------------------------- reports and events

    def phase(self, name: str, rank: int | None, start: float, end: float) -> None:
        """
        Add the time span of a phase, such as `freeze`, to the incident, so that the report shows
        it. Do nothing if the incident is closed.
        """
        if self.incident.closed is None:
            self.incident.phases.append(Phase(name=name, rank=rank, start=start, end=end))

    def say(self, order: Order) -> None:
        """
        Send an order without adding it to `incident.tasks`, the orders that ranks still have to
        answer.
        """
        self.said.append(order)

    def tell(self, event: str, **facts: object) -> None:
        """
        Write an entry into the log for operators: the name of an event, and facts about the event.
        """
        self.said.append(Tell(event=event, facts=facts))
