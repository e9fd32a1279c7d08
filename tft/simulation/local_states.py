"""
The data positions that simulated nodes keep for each other. If a node is lost, its ranks resume
from the positions that another node has kept. The messages are made and handled by the same code as
in a real agent, and are sent over the simulated network.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from tft.core.link.local_states import Captures, Keeping, Sending, Version
from tft.protocol.messages import Capture, Lead, LocalStates, LocalStatesKept, Recall, Recalled
from tft.simulation.mail import Link
from tft.simulation.page import Page
from tft.simulation.stage import Stage

REPEAT = 0.3
"""The time in seconds between two repetitions of data positions that the keeping node has not
confirmed. A real agent repeats them every 0.1 s."""


class _Owner(Protocol):
    """
    The node whose captured data positions a `LocalStateExchange` sends.
    """

    number: int
    pid: int
    alive: bool

    @property
    def link(self) -> Link:
        """
        The connection of the node to the broker.
        """

    def incarnations(self) -> Iterable[tuple[int, int, Page]]:
        """
        Return each rank of the node, its newest incarnation there, and its page (the shared memory
        with its data positions).
        """


class LocalStateExchange:
    """
    Sends the data positions that the ranks of one node have captured to another node, and keeps the
    data positions of other nodes' ranks.
    """

    def __init__(self, stage: Stage, node: _Owner) -> None:
        self._stage = stage
        self._node = node
        self._sending = Sending(node.number, node.pid)
        self._keeping = Keeping(node.number)
        self._timed = False

    @property
    def keeper(self) -> int | None:
        """
        The number of the node that keeps the data positions of this node's ranks. None if the
        controller has named no such node.
        """
        return self._sending.keeper

    def rung(self) -> None:
        """
        Send the data positions that the ranks have captured and that were not sent yet. They go to
        the node that keeps the data positions of this node's ranks.
        """
        if self._sending.keeper is None or not self._node.alive:
            return
        for rank, version, page in self._captured():
            if not self._sending.is_sent(rank, version):
                self._send(rank, version, page)
        if not self._timed:
            self._timed = True
            self._stage.clock.after(REPEAT, self._again)

    def _again(self) -> None:
        self._timed = False
        if self._sending.keeper is None or not self._node.alive:
            return
        missing = [each for each in self._captured() if not self._sending.is_kept(*each[:2])]
        for rank, version, page in missing:
            self._send(rank, version, page)
        if missing:
            self._timed = True
            self._stage.clock.after(REPEAT, self._again)

    def _captured(self) -> list[tuple[int, Version, Page]]:
        return [
            (rank, (incarnation, page.captured), page)
            for rank, incarnation, page in self._node.incarnations()
            if page.captured
        ]

    def led(self, lead: Lead) -> None:
        """
        Handle a `Lead` message. If the controller names another node to keep the data positions of
        this node's ranks, send all of them to that node.
        """
        self._keeping.forget(lead.kept_by)
        if self._sending.send_to(lead.kept_by.get(self._node.number)):
            self.rung()

    def hear(self, message: LocalStates | LocalStatesKept) -> None:
        """
        Handle a message of another node about captured data positions.
        """
        if not self._node.alive:
            return
        if isinstance(message, LocalStates):
            answer = self._keeping.take(message)
            if answer is not None:
                self._to(message.node, answer)
        else:
            self._sending.heard(message)

    def recalled(self, order: Recall, at: float) -> list[Recalled]:
        """
        Return reports of the rank-local state that this node keeps for the ranks of a lost node.
        """
        return self._keeping.recalled(order, at)

    def kept(self, lost: int, rank: int) -> Mapping[int, str]:
        """
        Return the data positions, by step, that this node keeps for a rank of another node
        (`lost`).
        """
        return self._keeping.report(lost, rank, 0.0).local_state

    def _send(self, rank: int, version: Version, page: Page) -> None:
        found = page.captures()
        states = {key: data.to_bytes(8, "big") for key, data in found.items()}
        message = self._sending.message(
            Captures(
                rank=rank,
                version=version,
                attempt=page.attempt,
                changes=False,
                captures=tuple(
                    Capture(step=step, closed=closed, content=state.hex(), sure=True, ended=closed)
                    for (step, closed), state in states.items()
                ),
                contents={state.hex(): state for state in states.values()},
            )
        )
        if self._sending.keeper is not None:
            self._to(self._sending.keeper, message)

    def _to(self, node: int, message: LocalStates | LocalStatesKept) -> None:
        stage = self._stage
        there = stage.cluster.nodes[node]
        for moment in stage.network.across(stage.clock.now, self._node.link, there.connection.link):
            stage.clock.at(moment, there.hear_agent, message)
