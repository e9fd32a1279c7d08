"""
Copy the rank-local state of the ranks of each node to another node (the keeper), over a bus that
loses messages. A capture is the rank-local state (generators, data position) of one rank at one
step.

The agent of a node sends the captures of its ranks to the keeper (`Sending`). The agent of the
keeper answers which captures it has (`Keeping`). Each message lists all present captures of a rank,
not only new ones. So the next message makes up for a lost message.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tft.protocol.messages import Capture, LocalStates, LocalStatesKept, Recall, Recalled

Version = tuple[int, int]
"""The version of the captures of one rank: the newest incarnation of the rank on its node, and how
many captures were written to the rank's page. If the version has not changed, neither have the
captures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captures:
    """
    The valid captures of a rank, as its agent has read them from the page of the rank (shared
    memory between agent and rank).
    """

    rank: int
    version: Version
    attempt: tuple[int, int]
    """The incident and the round in which the rank was last rolled back."""
    changes: bool
    """True if the rank-local state of this rank was seen to change between the all-reduces of a
    step and the end of the step."""
    captures: tuple[Capture, ...]
    contents: Mapping[str, bytes]
    """By digest of the content: the content of a capture. Captures with the same content share one
    entry."""


@dataclass(slots=True)
class _Sent:
    """
    What the sending agent knows about the captures of one rank: which of them were sent to the
    keeper, and which of them the keeper has.
    """

    version: Version = (-1, 0)
    """The version of the captures that were sent to the keeper last. (-1, 0): none were sent."""
    kept: Version = (-1, 0)
    """The newest version of the captures that the keeper is known to have completely."""
    contents: frozenset[str] = frozenset()
    """The digests of the contents that the keeper has, so that they need not be sent again."""


class Sending:
    """
    The side that sends captures to the keeper (the node that keeps them). Tracks which captures of
    the ranks of this node were sent, and which of them the keeper has.
    """

    def __init__(self, node: int, pid: int) -> None:
        self._node, self._pid = node, pid
        self._sent: dict[int, _Sent] = {}
        self.keeper: int | None = None
        """The node that keeps the captures of this node. None: there is no other node."""

    def send_to(self, keeper: int | None) -> bool:
        """
        Set the node that keeps the captures. Return True if the keeper has changed. Then all
        captures must be sent again, because it is not known what the new keeper has.
        """
        if keeper == self.keeper:
            return False
        self.keeper, self._sent = keeper, {}
        return True

    def is_sent(self, rank: int, version: Version) -> bool:
        """
        Return True if this version of the captures of a rank was sent to the keeper, even if the
        keeper has not acknowledged it.
        """
        return self._of(rank).version == version

    def is_kept(self, rank: int, version: Version) -> bool:
        """
        Return True if the keeper has acknowledged that it has this version of the captures of a
        rank.
        """
        return self._of(rank).kept == version

    def message(self, captures: Captures) -> LocalStates:
        """
        Return the message that sends these captures to the keeper, and record the version of the
        captures as sent. Contents that the keeper already has are left out.
        """
        sent = self._of(captures.rank)
        sent.version = captures.version
        incident, round_ = captures.attempt
        return LocalStates(
            node=self._node,
            pid=self._pid,
            rank=captures.rank,
            incarnation=captures.version[0],
            incident=incident,
            round=round_,
            number=captures.version[1],
            changes=captures.changes,
            captures=captures.captures,
            contents={
                digest: content.hex()
                for digest, content in captures.contents.items()
                if digest not in sent.contents
            },
        )

    def heard(self, message: LocalStatesKept) -> Version | None:
        """
        Record an answer of the keeper. Return the newest version of the rank's captures that the
        keeper has completely. Return None if the answer says that contents are missing, comes from
        another keeper, or is not meant for this agent.
        """
        if (message.keeper, message.node, message.pid) != (self.keeper, self._node, self._pid):
            return None
        sent = self._of(message.rank)
        sent.contents = frozenset(message.contents)
        if not message.complete:
            return None
        sent.kept = max(sent.kept, (message.incarnation, message.number))
        return sent.kept

    def _of(self, rank: int) -> _Sent:
        return self._sent.setdefault(rank, _Sent())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """
    The captures that a node keeps for one rank of another node.
    """

    message: LocalStates
    """The newest message about the rank. The field `contents` of this message also has contents
    from earlier messages, if a capture in this message refers to them."""

    def local_states(self) -> dict[int, str]:
        """
        Return, for each step, the captured rank-local state (hexadecimal). If a step has two
        captures, return the one that was taken after the update window of the step had closed.
        """
        return {each.step: self.message.contents[each.content] for each in self._usable()}

    def early(self) -> tuple[int, ...]:
        """
        Return the steps whose usable captures were all taken before the step had ended. Such a
        capture may be out of date if this rank was seen to change its rank-local state late in a
        step (`LocalStates.changes`). If this was never seen, return no steps.
        """
        if not self.message.changes:
            return ()
        ended = {each.step for each in self._usable() if each.ended}
        return tuple(sorted({each.step for each in self._usable()} - ended))

    def _usable(self) -> list[Capture]:
        """
        Return the captures that may be used (`Capture.sure`) and whose content has arrived. They
        are sorted by step. Within a step, the capture that was taken after the update window had
        closed comes last.
        """
        there = [
            each
            for each in self.message.captures
            if each.sure and each.content in self.message.contents
        ]
        return sorted(there, key=lambda each: (each.step, each.closed))


class Keeping:
    """
    The side that keeps captures: holds the captures that other nodes have sent to this node.
    """

    def __init__(self, node: int) -> None:
        self._node = node
        self._kept: dict[tuple[int, int], _Kept] = {}

    def take(self, message: LocalStates) -> LocalStatesKept | None:
        """
        Keep the captures of a rank, and drop earlier captures that the message does not list.
        Return the answer, or None if a newer message of the same agent has arrived before.

        Captures that an earlier agent of the node has sent are kept until the present agent sends a
        message about the rank, because the controller may still ask for them.
        """
        key = (message.node, message.rank)
        old = self._kept.get(key)
        before = {} if old is None else old.message.contents
        if (
            old is not None
            and old.message.pid == message.pid
            and (old.message.incarnation, old.message.number)
            > (message.incarnation, message.number)
        ):
            return None
        wanted = {each.content for each in message.captures}
        contents = {d: c for d, c in {**before, **message.contents}.items() if d in wanted}
        self._kept[key] = _Kept(message=replace(message, contents=contents))
        return LocalStatesKept(
            keeper=self._node,
            node=message.node,
            pid=message.pid,
            rank=message.rank,
            incarnation=message.incarnation,
            number=message.number,
            complete=contents.keys() == wanted,
            contents=tuple(sorted(contents)),
        )

    def forget(self, kept_by: Mapping[int, int]) -> None:
        """
        Drop the captures of each node that now has another keeper than this node. `kept_by` maps
        each node that is not lost to its keeper. Do not drop the captures of a node that has no
        entry in `kept_by`.
        """
        for node, rank in [
            key for key in self._kept if kept_by.get(key[0], self._node) != self._node
        ]:
            del self._kept[node, rank]

    def recalled(self, order: Recall, at: float) -> list[Recalled]:
        """
        Return one report for each rank in `order`, with the captures that this node keeps of the
        rank. `at` is the time to put into the reports.
        """
        return [self.report(order.lost, rank, at) for rank in order.ranks]

    def report(self, lost: int, rank: int, at: float) -> Recalled:
        """
        Return the report of the captures that this node keeps of a rank of the lost node. `at` is
        the time to put into the report. If nothing is kept, the report has incarnation -1.
        """
        kept = self._kept.get((lost, rank))
        if kept is None:
            return Recalled(
                node=self._node, lost=lost, rank=rank, incarnation=-1, incident=0, round=0,
                local_state={}, at=at,
            )  # fmt: skip
        return Recalled(
            node=self._node,
            lost=lost,
            rank=rank,
            incarnation=kept.message.incarnation,
            incident=kept.message.incident,
            round=kept.message.round,
            local_state=kept.local_states(),
            early=kept.early(),
            at=at,
        )
