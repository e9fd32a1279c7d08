"""
What is known of a job, and the small parts every decision is made with. Decides nothing.

`TRANSITIONS` is the table: a move that is not in it is our bug.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from tft.core import planner
from tft.core.commands import Command, JobOver, Tell
from tft.core.incident import Incident, Phase, Task
from tft.core.policy import Policy
from tft.core.seats import Process, Seat
from tft.errors import InternalError
from tft.protocol.messages import (
    Commit,
    Complete,
    End,
    Fetch,
    Freeze,
    Kill,
    Load,
    Order,
    OrderName,
    RankOrder,
    Rebuild,
    Regroup,
    Resume,
    Rollback,
    Save,
    SavedFile,
    Spawn,
    Stop,
    StopRequested,
)


class State(StrEnum):
    """
    What the job as a whole is doing.
    """

    AWAITING = "awaiting"
    """Processes are starting; everyone else is parked."""
    REPAIRING = "repairing"
    """Lost state is being copied, groups are being formed."""
    REBUILDING = "rebuilding"
    """Wrappers are being built round the repaired state."""
    ROLLING_BACK = "rolling back"
    """RNG and data positions are being set to the agreed step."""
    RESUMING = "resuming"
    """Training again; success is announced after one more step of every rank."""
    HEALTHY = "healthy"
    FREEZING = "freezing"
    """Every rank is asked where it stands, and held back from its next update."""
    CLEARING = "clearing"
    """The training threads leave the loop and drop the broken groups."""
    DUMPING = "dumping"
    """The survivors write a last checkpoint."""
    EXITING = "exiting"
    """The ranks are leaving."""
    ENDED = "ended"


S = State
TRANSITIONS: dict[State, frozenset[State]] = {
    S.AWAITING: frozenset({S.AWAITING, S.REPAIRING, S.FREEZING, S.DUMPING, S.EXITING}),
    S.REPAIRING: frozenset({S.REBUILDING, S.FREEZING, S.EXITING}),
    S.REBUILDING: frozenset({S.ROLLING_BACK, S.FREEZING, S.EXITING}),
    S.ROLLING_BACK: frozenset({S.RESUMING, S.FREEZING, S.EXITING}),
    S.RESUMING: frozenset({S.HEALTHY, S.FREEZING, S.EXITING}),
    S.HEALTHY: frozenset({S.FREEZING, S.EXITING}),
    S.FREEZING: frozenset({S.CLEARING, S.FREEZING, S.EXITING}),
    S.CLEARING: frozenset({S.AWAITING, S.FREEZING, S.DUMPING, S.EXITING}),
    S.DUMPING: frozenset({S.DUMPING, S.EXITING}),
    S.EXITING: frozenset({S.ENDED}),
    S.ENDED: frozenset(),
}
"""From each state, where it may go. A fault in any state before DUMPING leads to FREEZING again."""

PARKED = frozenset({S.AWAITING, S.DUMPING})
"""Nobody is in the loop or forming a group: a further loss changes the plan, not the others."""
SETTLED = frozenset({S.EXITING, S.ENDED})
"""The outcome is decided."""
RUNNING = frozenset({Process.SPAWNED, Process.JOINED, Process.READY})


class Job:
    """
    One job of `world` ranks. Written by the machine and its course only.
    """

    def __init__(
        self,
        world: int,
        policy: Policy,
        *,
        name: str,
        checkpoints: str,
        at: float,
        resume: tuple[str, int] | None,
        first_incident: int,
    ) -> None:
        self.name = name
        self.policy = policy
        self.checkpoints = checkpoints
        self.resume = resume
        self.state = State.AWAITING
        self.epoch = 0
        self.now = self.led = at
        self.said: list[Command] = []
        self.seats = {rank: Seat(rank=rank) for rank in range(world)}
        self.nodes: dict[int, tuple[int, ...]] = {}
        self.lost_nodes: set[int] = set()
        self.node_orders: dict[int, list[Order]] = {}
        """`Spawn` and `Kill`, by rank, until they are answered."""
        self.store: tuple[str, int] | None = None
        self.incident = Incident(number=0, opened=at, strategy="start")
        self.incidents: list[Incident] = []
        self.next_number = first_incident
        self.last_step = 0 if resume is None else resume[1]
        self.virgin = True
        """No rank has built its wrapper yet: every fresh state is as good as another."""
        self.loaded = False
        """The checkpoint that the job was resumed from has been taken by all."""
        self.trained: set[int] = set()
        """The ranks that have done a step since the last resume."""
        self.saved: dict[str, SavedFile] = {}
        self.stop: StopRequested | None = None
        self.outcome: JobOver | None = None
        self.ending: list[Order] = []
        self.deadline: float | None = None
        """When the ranks must have left, once the outcome is decided."""

    def anyone_joined(self) -> bool:
        """
        Some rank has called `tft.init`.
        """
        return any(s.process in (Process.JOINED, Process.READY) for s in self.seats.values())

    def dying(self) -> bool:
        """
        Someone was told to be ended and its end has not come in: what it left is not known.
        """
        return any(s.doomed and s.process is not Process.GONE for s in self.seats.values())

    def agreed(self) -> int | str:
        """
        The step everyone can be brought to, or why there is none.
        """
        return planner.agreed_step(self.groups(), self.holders())

    def move(self, state: State) -> None:
        """
        From one state to the next. Raises `InternalError` for a move that is not in the table.
        """
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"no way leads from {self.state} to {state}")
        self.state = state

    def step_to(self, state: State, order: RankOrder, limit: float) -> bool:
        """
        The next state, whose work is this one order.
        """
        self.move(state)
        self.incident.tasks = {}
        self.issue(order, limit=limit)
        return True

    def to_all(self, order: Callable[..., RankOrder], **facts: int) -> RankOrder:
        """
        An order for every rank.
        """
        return order(**self.key(), to=tuple(self.seats), **facts)

    def key(self) -> dict[str, Any]:  # Any: the fields' own types
        """
        What every order to ranks carries.
        """
        return {
            "epoch": self.epoch,
            "incident": self.incident.number,
            "round": self.incident.round,
            "seats": {s.rank: s.incarnation for s in self.seats.values() if s.incarnation > 0},
        }

    def issue(self, *orders: RankOrder, limit: float) -> None:
        """
        Says an order; it is owed an answer within `limit` seconds.
        """
        waiting = {rank for order in orders for rank in order.to}
        self.incident.tasks[_name(orders[0])] = Task(
            orders=orders,
            waiting=waiting,
            issued=self.now,
            limit=limit,
            deadline=self.now + limit,
        )
        self.said.extend(orders)

    def answered_all(self, order: OrderName) -> bool:
        """
        Nobody owes an answer to this order.
        """
        task = self.incident.tasks.get(order)
        return task is None or not task.waiting

    def issued(self, order: OrderName) -> float:
        """
        When an order was said.
        """
        task = self.incident.tasks.get(order)
        return self.now if task is None else task.issued

    def spawn(self, seat: Seat, cause: str) -> None:
        """
        Has another process started for a rank.
        """
        if seat.node is None:
            return
        seat.order(self.now)
        if self.incident.number or self.incident.faults:
            self.incident.started += 1
        self.order_node(
            Spawn(
                epoch=self.epoch,
                node=seat.node,
                rank=seat.rank,
                incarnation=seat.incarnation,
                cause=cause,
            )
        )

    def order_node(self, order: Spawn | Kill) -> None:
        """
        Says an order to an agent; it is repeated until it is answered.
        """
        self.node_orders.setdefault(order.rank, []).append(order)
        self.said.append(order)

    def forget(self, rank: int, *kinds: type) -> None:
        """
        These orders to an agent need no answer any more.
        """
        self.node_orders[rank] = [
            o for o in self.node_orders.get(rank, []) if not isinstance(o, kinds)
        ]

    def every(self, holds: Callable[[Seat], bool]) -> bool:
        """
        Something holds for every rank.
        """
        return all(holds(seat) for seat in self.seats.values())

    def groups(self) -> dict[str, tuple[int, ...]]:
        """
        The shard groups, as the ranks named them.
        """
        return {shard: ranks for s in self.seats.values() for shard, ranks in s.shards.items()}

    def holders(self) -> dict[int, planner.Holder]:
        """
        The ranks that can hold state, as the planner sees them.
        """
        return {s.rank: s.holder() for s in self.seats.values() if s.ready and not s.doomed}

    def phase(self, name: str, rank: int | None, start: float, end: float) -> None:
        """
        A stretch of time for the report.
        """
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


def _name(order: RankOrder) -> OrderName:
    names: dict[type, OrderName] = {
        Freeze: "freeze", Stop: "stop", Load: "load", Fetch: "fetch", Regroup: "regroup",
        Rebuild: "rebuild", Rollback: "rollback", Resume: "resume", Save: "save",
        Commit: "commit", Complete: "complete", End: "end",
    }  # fmt: skip
    return names[type(order)]
