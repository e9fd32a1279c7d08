"""
Own what the controller knows of the nodes of a job.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tft.protocol.messages import Kill, Spawn


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
