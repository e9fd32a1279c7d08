"""
The rank-local state of other nodes: what this node keeps for them, and what another node keeps for
it.

A rank that has captured its state wakes the agent through a pipe. The agent reads the page of the
rank and sends what is new to the node that keeps it (`Lead.kept_by`).
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
    Sends the captures of the ranks of this node to another node, and keeps those of others.
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
        Send the captures again that the other node has not confirmed.
        """
        for rank, version, page in self._captured():
            if not self._sending.is_kept(rank, version):
                self._send(rank, version, page)

    def led(self, lead: Lead) -> None:
        """
        Send all captures to another node from now on, if the controller names another one. Forget
        what another node keeps now.
        """
        self._keeping.forget(lead.kept_by)
        if self._sending.send_to(lead.kept_by.get(self._node)):
            for _, _, page in self._ranks.pages():
                page.is_elsewhere(0)
            self.repeat()

    def hear(self, message: AgentMessage) -> None:
        """
        Keep the captures of a rank of another node, or note that another node has those of a rank.
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
        Return the reports of what this node has of the ranks of a lost node.
        """
        return self._keeping.recalled(order, at)

    def _captured(self) -> list[tuple[int, Version, Page]]:
        """
        Return the ranks that have captured anything, if another node keeps it.
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
