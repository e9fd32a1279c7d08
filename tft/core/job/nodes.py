"""
Own what the controller knows of the nodes of a job.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tft.protocol.messages import Kill, Recall, Spawn


@dataclass(slots=True, kw_only=True)
class Recalling:
    """
    An order to report the rank-local state of a lost node, which is not fully answered.
    """

    order: Recall
    waiting: set[int]
    """The ranks whose state is not reported yet."""
    incarnations: dict[int, int]
    """By rank: the process that held the rank when the node was lost."""
    issued: float


@dataclass(slots=True, kw_only=True)
class Nodes:
    """
    The nodes that have joined, their agents, and the free places on them.
    """

    ranks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By node that has joined: the ranks whose first processes are started there."""
    agents: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By node: host and pid of the agent of the node."""
    came: dict[int, float] = field(default_factory=dict)
    """By node: the time at which its present agent started, by the clock of the node."""
    room: dict[int, int] = field(default_factory=dict)
    """By node: how many more ranks the node has room for."""
    lost: set[int] = field(default_factory=set)
    """The nodes that are lost, and the nodes on which no process is to be started any more."""
    isolated: set[int] = field(default_factory=set)
    """The nodes that were given up for good. An agent that joins from such a node is ignored."""
    orders: dict[int, list[Spawn | Kill]] = field(default_factory=dict)
    """By rank: the `Spawn` and `Kill` orders that agents have not answered yet."""
    recalls: dict[int, Recalling] = field(default_factory=dict)
    """By lost node: the order to report what its keeper has of it."""
    overdue: dict[int, Recalling] = field(default_factory=dict)
    """As `recalls`: orders that are not waited for any more, and whose answers still count until
    the ranks roll back."""
    stores: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By node: the address (host, port) of its rendezvous store. The store that was opened last
    comes last."""
    gathered: float | None = None
    """The time at which the last node joined. None: no node has joined yet."""

    @property
    def store(self) -> tuple[str, int] | None:
        """
        The address of the rendezvous store to use for the next process groups. A store on a lost
        node is taken only if there is no other. None: no store is known.
        """
        there = [store for node, store in self.stores.items() if node not in self.lost]
        known = there or list(self.stores.values())
        return known[-1] if known else None

    def keeper(self, node: int) -> int | None:
        """
        Return the node that keeps the rank-local state of the ranks of `node`: the next one that
        has joined and is not lost, in the ring of node numbers. None: there is no other node.
        """
        ring = sorted(other for other in self.ranks if other not in self.lost and other != node)
        return next((other for other in ring if other > node), ring[0] if ring else None)

    def kept_by(self) -> dict[int, int]:
        """
        Return the keeper of each node that has joined and is not lost, if it has one.
        """
        ring = sorted(node for node in self.ranks if node not in self.lost)
        return dict(zip(ring, [*ring[1:], *ring[:1]], strict=True)) if len(ring) > 1 else {}

    def with_room(self, excluded: Collection[int | None], room: Mapping[int, int]) -> int | None:
        """
        Return a node that is neither lost nor `excluded` and has a place for one more rank. None:
        there is no such node. `room` is the number of free places by node.
        """
        barred = {*self.lost, *excluded}
        return next((n for n in sorted(room) if room[n] > 0 and n not in barred), None)

    def forget(self, rank: int, incarnation: int, *kinds: type) -> None:
        """
        Remove the orders of these kinds for one process: the agent need not answer them any more.
        """
        self.orders[rank] = [
            order
            for order in self.orders.get(rank, [])
            if order.incarnation != incarnation or not isinstance(order, kinds)
        ]
