"""
Own what the controller knows of the nodes of a job.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tft.protocol.messages import Kill, Recall, Spawn


@dataclass(slots=True, kw_only=True)
class Recalling:
    """
    An order to another node to report the rank-local state that it has kept of a lost node, while
    some answers are missing.
    """

    order: Recall
    waiting: set[int]
    """The ranks whose state is not reported yet."""
    incarnations: dict[int, int]
    """By rank: the incarnation of the process that held the rank when the node was lost."""
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
    """By node: the time at which its present agent joined, by the clock of the node."""
    room: dict[int, int] = field(default_factory=dict)
    """By node: how many more ranks the node has room for."""
    lost: set[int] = field(default_factory=set)
    """The nodes that are lost, and the nodes that were given up, so that no process is started
    there. A node is removed from this set when an agent joins from it again."""
    isolated: set[int] = field(default_factory=set)
    """The nodes that were given up for good. An agent that joins from such a node is ignored."""
    orders: dict[int, list[Spawn | Kill]] = field(default_factory=dict)
    """By rank: the `Spawn` and `Kill` orders that agents have not answered yet."""
    recalls: dict[int, Recalling] = field(default_factory=dict)
    """By lost node: the open order to its keeper (the node that has kept its rank-local state) to
    report that state."""
    overdue: dict[int, Recalling] = field(default_factory=dict)
    """By lost node: an order as in `recalls` for which the job does not wait any more. A late
    answer is still used until the ranks roll back."""
    stores: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By node: the address (host, port) of its rendezvous store. The entry of the store that was
    opened last comes last."""
    gathered: float | None = None
    """The time at which the most recent node joined. None: no node has joined yet."""

    @property
    def store(self) -> tuple[str, int] | None:
        """
        The address of the rendezvous store to use for the next process groups: the newest store on
        a node that is not lost, or else the newest of all. None: no store is known.
        """
        there = [store for node, store in self.stores.items() if node not in self.lost]
        known = there or list(self.stores.values())
        return known[-1] if known else None

    def keeper(self, node: int) -> int | None:
        """
        Return the node that keeps the rank-local state of the ranks of `node`: the node with the
        next higher number (after the highest, the lowest) that has joined and is not lost. Return
        None if there is no other node.
        """
        ring = sorted(other for other in self.ranks if other not in self.lost and other != node)
        return next((other for other in ring if other > node), ring[0] if ring else None)

    def kept_by(self) -> dict[int, int]:
        """
        Return, by node that has joined and is not lost, the node that keeps its rank-local state.
        Return nothing if there is only one such node.
        """
        ring = sorted(node for node in self.ranks if node not in self.lost)
        return dict(zip(ring, [*ring[1:], *ring[:1]], strict=True)) if len(ring) > 1 else {}

    def with_room(self, excluded: Collection[int | None], room: Mapping[int, int]) -> int | None:
        """
        Return a node that is neither lost nor `excluded` and has a place for one more rank, or None
        if there is no such node. `room` is the number of free places by node.
        """
        barred = {*self.lost, *excluded}
        return next((n for n in sorted(room) if room[n] > 0 and n not in barred), None)

    def forget(self, rank: int, incarnation: int, *kinds: type) -> None:
        """
        Remove the open orders of these kinds (`Spawn`, `Kill`) for one process, so that they are
        not sent again: they are answered or have no purpose any more.
        """
        self.orders[rank] = [
            order
            for order in self.orders.get(rank, [])
            if order.incarnation != incarnation or not isinstance(order, kinds)
        ]
