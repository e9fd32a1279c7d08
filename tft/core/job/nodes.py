"""
Define what the controller knows about the nodes of a job.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tft.protocol.messages import Kill, Recall, Spawn


@dataclass(slots=True, kw_only=True)
class Recalling:
    """
    An unanswered order to a node that has kept the rank-local state (generators, data position) of
    a lost node. The order is to report that state.
    """

    order: Recall
    waiting: set[int]
    """The ranks of the lost node whose rank-local state is not reported yet."""
    incarnations: dict[int, int]
    """By rank: the incarnation of the process that held the rank when the node was lost."""
    issued: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProcess:
    """
    The agent of a node. A later agent of the same node has another name on the bus (`sender`), but
    perhaps the same host and pid, because each start of a container may give the same ones.
    """

    host: str
    pid: int
    sender: str


@dataclass(slots=True, kw_only=True)
class Nodes:
    """
    The nodes that have joined the job, the agents of these nodes, and the free places for ranks on
    the nodes.
    """

    ranks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By node that has joined: the ranks whose first processes are started on this node."""
    agents: dict[int, AgentProcess] = field(default_factory=dict)
    """By node: the agent of the node."""
    came: dict[int, float] = field(default_factory=dict)
    """By node: the time at which the present agent of the node joined the job, by the clock of the
    node."""
    room: dict[int, int] = field(default_factory=dict)
    """By node: the number of further ranks for which the node has a free place."""
    lost: set[int] = field(default_factory=set)
    """The nodes that are lost or were given up. No process is started on these nodes. A node is
    removed from this set when an agent joins the job from this node again."""
    silent: set[int] = field(default_factory=set)
    """The nodes of `lost` that were silent and were not given up on purpose. The agent of such a
    node may still run. Then it joins the job again."""
    isolated: set[int] = field(default_factory=set)
    """The nodes that were given up for good. An agent that joins the job from such a node is
    ignored."""
    orders: dict[int, list[Spawn | Kill]] = field(default_factory=dict)
    """By rank: the `Spawn` and `Kill` orders that agents have not answered yet."""
    recalls: dict[int, Recalling] = field(default_factory=dict)
    """By lost node: the unanswered order to its keeper (the node that keeps a copy of the
    rank-local state of the lost node) to report that state."""
    overdue: dict[int, Recalling] = field(default_factory=dict)
    """By lost node: an unanswered order, as in `recalls`, for whose answer the job does not wait
    any more. A late answer is still used until the ranks roll back."""
    stores: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By node: the address (host, port) of the rendezvous store on this node. The store that was
    opened last is the last entry."""
    gathered: float | None = None
    """The time at which the most recent node joined. None: no node has joined yet."""

    @property
    def store(self) -> tuple[str, int] | None:
        """
        The address of the rendezvous store with which the ranks form their next process groups.
        This is the newest store on a node that is not lost or, if all their nodes are lost, the
        newest of all stores. None: no store is known.
        """
        there = [store for node, store in self.stores.items() if node not in self.lost]
        known = there or list(self.stores.values())
        return known[-1] if known else None

    def keeper(self, node: int) -> int | None:
        """
        Return the keeper of `node`: the other node that keeps a copy of the rank-local state of its
        ranks. This is the node with the next higher number that has joined and is not lost. For the
        node with the highest number, it is the node with the lowest. Return None if there is no
        other node.
        """
        ring = sorted(other for other in self.ranks if other not in self.lost and other != node)
        return next((other for other in ring if other > node), ring[0] if ring else None)

    def kept_by(self) -> dict[int, int]:
        """
        Return the keeper of each node that has joined and is not lost: the other node that keeps a
        copy of the rank-local state of its ranks. Return an empty dictionary if fewer than two such
        nodes exist.
        """
        ring = sorted(node for node in self.ranks if node not in self.lost)
        return dict(zip(ring, [*ring[1:], *ring[:1]], strict=True)) if len(ring) > 1 else {}

    def with_room(self, excluded: Collection[int | None], room: Mapping[int, int]) -> int | None:
        """
        Return a node that is not lost, is not in `excluded`, and has a place for one more rank.
        Return None if there is no such node. `room` has the number of free places by node.
        """
        barred = {*self.lost, *excluded}
        return next((n for n in sorted(room) if room[n] > 0 and n not in barred), None)

    def forget(self, rank: int, incarnation: int, *kinds: type) -> None:
        """
        Remove the orders of these kinds (`Spawn`, `Kill`) for one process, so that they are not
        sent to the agent again. Call this when the orders are answered or not needed any more.
        """
        self.orders[rank] = [
            order
            for order in self.orders.get(rank, [])
            if order.incarnation != incarnation or not isinstance(order, kinds)
        ]
