"""
The exchange of rank-local state between nodes. This node keeps the rank-local state of ranks of
other nodes, and another node keeps that of its own ranks, in case a node is lost.

A rank that has captured its rank-local state wakes the agent through a pipe (the bell). The agent
reads the page of the rank (its shared memory), and sends new captures to the node that the
controller has named for this (`Lead.kept_by`).
"""

import asyncio
import os
from collections.abc import Callable

import xxhash

from tft.agent.ranks import Ranks
from tft.core.link.local_states import Captures, Keeping, Sending, Version
from tft.page import Page
from tft.protocol import topics
from tft.protocol.messages import (
    AgentMessage,
    Capture,
    Lead,
    LocalStates,
    LocalStatesKept,
    Recall,
    Recalled,
)

Publish = Callable[[bytes, AgentMessage], None]
"""A function that sends a message to a topic."""


class LocalStateExchange:
    """
    Sends the captures of this node's ranks to another node, and keeps captures of other nodes'
    ranks.
    """

    def __init__(self, node: int, ranks: Ranks, publish: Publish) -> None:
        self._node = node
        self._ranks = ranks
        self._publish = publish
        self._sending = Sending(node, os.getpid())
        self._keeping = Keeping(node)
        self._bell: int | None = None

    def listen(self, bell: int) -> None:
        """
        Send new captures whenever a rank writes to the pipe whose reading end is `bell`.
        """
        self._bell = bell
        asyncio.get_running_loop().add_reader(bell, self._rung, bell)

    def close(self) -> None:
        """
        Stop listening, because the pages of the ranks will be closed.
        """
        if self._bell is not None:
            asyncio.get_running_loop().remove_reader(self._bell)

    def _rung(self, bell: int) -> None:
        while len(os.read(bell, 4096)) == 4096:
            pass
        for rank, version, page in self._captured():
            if not self._sending.is_sent(rank, version):
                self._send(rank, version, page)

    def repeat(self) -> None:
        """
        Send the newest captures of a rank again if the other node has not confirmed them.
        """
        for rank, version, page in self._captured():
            if not self._sending.is_kept(rank, version):
                self._send(rank, version, page)

    def led(self, lead: Lead) -> None:
        """
        Follow a `Lead` message: if it names a new node to keep this node's captures, send all
        captures there. Forget captures of other nodes that this node no longer has to keep.
        """
        self._keeping.forget(lead.kept_by)
        if self._sending.send_to(lead.kept_by.get(self._node)):
            for _, _, page in self._ranks.pages():
                page.is_elsewhere(0)
            self.repeat()

    def hear(self, message: AgentMessage) -> None:
        """
        Handle a message of another agent. Keep the captures in it, or record that the other node
        has got captures of a rank of this node.
        """
        if isinstance(message, LocalStates):
            answer = self._keeping.take(message)
            if answer is not None:
                self._publish(topics.agent(message.node), answer)
        else:
            self._kept(message)

    def _kept(self, message: LocalStatesKept) -> None:
        version = self._sending.heard(message)
        if version is None:
            return
        for rank, _, page in self._ranks.pages():
            if rank == message.rank:
                page.is_elsewhere(version[1])

    def recalled(self, order: Recall, at: float) -> list[Recalled]:
        """
        Return reports with the captures that this node keeps for the ranks of a lost node.
        """
        return self._keeping.recalled(order, at)

    def _captured(self) -> list[tuple[int, Version, Page]]:
        """
        Return each rank with captures, their version, and the page of the rank. Return nothing if
        no other node keeps captures of this node.
        """
        if self._sending.keeper is None:
            return []
        return [
            (rank, (incarnation, number), page)
            for rank, incarnation, page in self._ranks.pages()
            if (number := page.captured())
        ]

    def _send(self, rank: int, version: Version, page: Page) -> None:
        keeper = self._sending.keeper
        assert keeper is not None
        found = page.captures()
        at = found.position
        digests = {
            key: xxhash.xxh3_128_hexdigest(state) for key, state in found.local_states.items()
        }
        captures = Captures(
            rank=rank,
            version=version,
            attempt=found.attempt,
            changes=found.changes,
            captures=tuple(
                Capture(
                    step=step,
                    closed=closed,
                    content=digest,
                    sure=found.steady or closed or step <= at.step + at.window,
                    ended=step <= at.step - at.tail,
                )
                for (step, closed), digest in digests.items()
            ),
            contents={digests[key]: state for key, state in found.local_states.items()},
        )
        self._publish(topics.agent(keeper), self._sending.message(captures))
