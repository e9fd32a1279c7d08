"""
The exchange of rank-local state between the agents of a job. Rank-local state is state that no
other rank has, such as random generators and the data position. Each node keeps copies of the
rank-local state of another node's ranks, so that this state survives when that other node is lost.

A capture is a copy of a rank's rank-local state that the rank has written to its page (shared
memory between rank and agent). The rank then wakes its agent through a pipe. The agent reads the
page, and sends new captures to the node that keeps them. The controller chooses that node, and
names it in the field `kept_by` of its `Lead` messages.
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
"""A function that publishes a message on a topic of the bus."""


class LocalStateExchange:
    """
    Sends the captures of this node's ranks to another node, and keeps captures that other nodes
    send.
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
        Stop reading the pipe through which ranks wake the agent. Call this before the pages of the
        ranks are closed.
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
        Send again all captures that the keeping node has not confirmed yet.
        """
        for rank, version, page in self._captured():
            if not self._sending.is_kept(rank, version):
                self._send(rank, version, page)

    def led(self, lead: Lead) -> None:
        """
        Follow a `Lead` message of the controller. The field `kept_by` of the message names, for
        each node, the node that keeps its captures. If a new node keeps the captures of this node,
        send all captures of this node to that new node. Delete the captures that this node has kept
        for nodes whose captures are now kept elsewhere.
        """
        self._keeping.forget(lead.kept_by)
        if self._sending.send_to(lead.kept_by.get(self._node)):
            for _, _, page in self._ranks.pages():
                page.is_elsewhere(0)
            self.repeat()

    def hear(self, message: AgentMessage) -> None:
        """
        Handle a message of another agent. A `LocalStates` message brings captures that this node
        shall keep; this node answers with a `LocalStatesKept` message. A `LocalStatesKept` message
        confirms that the other agent keeps captures that this node has sent.
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
        Return the reports that answer `order`, one for each rank of the lost node. A report
        contains the rank-local state that this node has kept for the rank. `at` is the present time
        in seconds, which the reports state as their time.
        """
        return self._keeping.recalled(order, at)

    def _captured(self) -> list[tuple[int, Version, Page]]:
        """
        Return each rank that has captures, with the version of its captures and its page. Return an
        empty list if no other node keeps the captures of this node.
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
