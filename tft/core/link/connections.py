"""
Detect nodes of which all connections to the bus have ended at once. The code is pure: it reads no
clock and does no I/O.

The kernel of a node ends the connections of a process when the process is killed. So if the agent,
the launcher and all ranks of a node are gone together, the node is lost. The ended connections show
this long before the missing heartbeats of the node do.

A network that resets connections looks the same at first, but the processes then connect again. A
node that was given up too early may be missing for the rest of the job. So the class `Connections`
waits longer before it gives up a node whose ranks have no room elsewhere.

A node that is only silent is not reported here. Its connections end only when ZeroMQ's own
heartbeats have got no answer for 1.5 s. By then the last heartbeat of its agent is older than
`FRESH`.
"""

from collections.abc import Callable

HURRIED, PATIENT = 0.25, 2.0
"""The time in seconds for which all connections of a node must have been gone. It is `HURRIED` if
an incident is open and the ranks of the node have room elsewhere, otherwise `PATIENT`. `PATIENT` is
long enough for a failed attempt to connect, which takes a second, and for the next attempt."""
FRESH = 1.0
"""The longest time in seconds between the last heartbeat of a node and the end of its connections,
if the processes were killed. Agents send ten heartbeats in a second."""
BLOCKED = 0.25
"""The longest normal time, in seconds, between two calls of `lost`. If it was longer, the
controller's process was blocked or stopped. Meanwhile nodes may have connected again, and the
controller has not read it yet. So the wait of `HURRIED` or `PATIENT` seconds begins anew for each
node."""

AGENT, LAUNCHER, RANK = "node", "run", "rank"
"""The beginnings of the names that agents, launchers and ranks have on the bus. A dot and the
number of the node, or of the rank, come next, as in `rank.3`."""


class Connections:
    """
    The connections of all nodes of a job to the bus. The controller tells this object when a
    participant of the bus connects or is gone, and when a heartbeat arrives.

    `home` returns the node on which the process of a rank runs, or None if it has no process.
    """

    def __init__(self, home: Callable[[int], int | None]) -> None:
        self._home = home
        self._present: set[tuple[str, int, str]] = set()
        self._heard: dict[int, float] = {}
        self._cut: dict[int, float] = {}
        """For each node whose agent is gone: the time at which the last connected process of the
        node was found to be gone, too."""
        self._looked = 0.0

    def present(self, sender: str) -> None:
        """
        Record that the participant `sender` is connected.
        """
        if (who := _who(sender)) is not None:
            self._present.add(who)
            if who[0] == AGENT:
                self._cut.pop(who[1], None)

    def heard(self, node: int, at: float) -> None:
        """
        Record that a heartbeat of `node` arrived at time `at`.
        """
        self._heard[node] = at

    def gone(self, sender: str, at: float) -> None:
        """
        Record that the participant `sender` is not connected any more since time `at`.
        """
        if (who := _who(sender)) is None:
            return
        self._present.discard(who)
        kind, number, _ = who
        if kind == AGENT and any(other[:2] == (kind, number) for other in self._present):
            return  # the node is not lost: a new agent has connected in place of the lost one
        node = self._node(kind, number)
        fresh = kind == AGENT and at - self._heard.pop(number, float("-inf")) <= FRESH
        if node is not None and (fresh or node in self._cut):
            self._cut[node] = at
        if not self._present:
            # the broker is lost, or the connection of this process to it: this says nothing about
            # the nodes
            self._cut.clear()

    def lost(self, at: float, hurried: Callable[[int], bool]) -> list[int]:
        """
        Return the nodes that are lost at time `at`, because all their connections have been gone
        for long enough. Each lost node is returned by one call only. `hurried` returns True for a
        node for which the wait is `HURRIED`, and False if it is `PATIENT`.
        """
        if at - self._looked > BLOCKED:
            self._cut = dict.fromkeys(self._cut, at)
        self._looked = at
        if not self._cut:
            return []
        there = self.nodes()
        lost = [
            node
            for node, since in self._cut.items()
            if node not in there and at - since > (HURRIED if hurried(node) else PATIENT)
        ]
        for node in lost:
            del self._cut[node]
        return sorted(lost)

    def nodes(self) -> set[int | None]:
        """
        Return the nodes that have a connected process. If the function `home` has returned None
        for a connected rank, None is among the returned values.
        """
        return {self._node(kind, number) for kind, number, _ in self._present}

    def _node(self, kind: str, number: int) -> int | None:
        return self._home(number) if kind == RANK else number


def _who(sender: str) -> tuple[str, int, str] | None:
    """
    Split the name of a participant of the bus into what it is, its number, and the rest. Return
    None for a participant that belongs to no node, such as a command of the operator.
    """
    name, _, rest = sender.partition("/")
    kind, _, number = name.partition(".")
    if kind not in (AGENT, LAUNCHER, RANK) or not number.isdecimal():
        return None
    return kind, int(number), rest
