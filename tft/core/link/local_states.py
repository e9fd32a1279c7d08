"""
Keep the rank-local state of each node on another node, over a bus that loses messages.

The agent of a node sends the captures of its ranks to the node that keeps them (`Sending`). That
node answers with what it has (`Keeping`). Both messages are levels: the newest one counts, and a
later one makes up for a lost one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tft.protocol.messages import Capture, LocalStates, LocalStatesKept, Recall, Recalled

Version = tuple[int, int]
"""The newest incarnation of a rank on its node, and how often its captures have changed. Together
they say whether captures are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captures:
    """
    The valid captures of a rank, as its agent has read them from the page of the rank.
    """

    rank: int
    version: Version
    attempt: tuple[int, int]
    """Incident and round of the last rollback of the rank."""
    changes: bool
    """True if captures of this rank were seen to change after the all-reduces of their step."""
    captures: tuple[Capture, ...]
    contents: Mapping[str, bytes]
    """By digest: the content of the captures."""


@dataclass(slots=True)
class _Sent:
    """
    What is known of the captures of one rank at the keeper.
    """

    version: Version = (-1, 0)
    """The captures that were sent last."""
    kept: Version = (-1, 0)
    """The newest captures that the keeper has completely."""
    contents: frozenset[str] = frozenset()
    """The contents that the keeper has."""


class Sending:
    """
    The captures of all ranks of a node, and how much of them its keeper has.
    """

    def __init__(self, node: int, pid: int) -> None:
        self._node, self._pid = node, pid
        self._sent: dict[int, _Sent] = {}
        self.keeper: int | None = None
        """The node that keeps the captures. None: no node does."""

    def send_to(self, keeper: int | None) -> bool:
        """
        Set the node that keeps the captures. Return True if it is another one than before: nothing
        is known of what it has, so all captures must be sent to it.
        """
        if keeper == self.keeper:
            return False
        self.keeper, self._sent = keeper, {}
        return True

    def is_sent(self, rank: int, version: Version) -> bool:
        """
        Return True if these captures of a rank were sent, whether the keeper has them or not.
        """
        return self._of(rank).version == version

    def is_kept(self, rank: int, version: Version) -> bool:
        """
        Return True if the keeper has these captures of a rank.
        """
        return self._of(rank).kept == version

    def message(self, captures: Captures) -> LocalStates:
        """
        Return the message with these captures. Contents that the keeper has are left out.
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
        Take an answer of the keeper. Return the captures of the rank that the keeper has completely
        now. None: the answer does not say that.
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
    What a node has of one rank of another node.
    """

    message: LocalStates
    """The newest message about the rank, with the contents of all its captures that were sent."""

    def local_states(self) -> dict[int, str]:
        """
        Return the captures by step. If a step has two captures, return the one that was taken when
        its window closed.
        """
        return {each.step: self.message.contents[each.content] for each in self._usable()}

    def early(self) -> tuple[int, ...]:
        """
        Return the steps of which only a capture from before their end is there, if the captures of
        this rank change until then.
        """
        if not self.message.changes:
            return ()
        ended = {each.step for each in self._usable() if each.ended}
        return tuple(sorted({each.step for each in self._usable()} - ended))

    def _usable(self) -> list[Capture]:
        """
        Return the captures whose content is there and will not change before the all-reduces of the
        step. For each step, that of the closed window comes last.
        """
        there = [
            each
            for each in self.message.captures
            if each.sure and each.content in self.message.contents
        ]
        return sorted(there, key=lambda each: (each.step, each.closed))


class Keeping:
    """
    What a node has of the rank-local state of other nodes.
    """

    def __init__(self, node: int) -> None:
        self._node = node
        self._kept: dict[tuple[int, int], _Kept] = {}

    def take(self, message: LocalStates) -> LocalStatesKept | None:
        """
        Keep the captures of a rank, and drop earlier ones that the message does not list. Return
        the answer. None: a newer message of the same agent was there before.

        What another agent of the node has sent stays until the present agent sends a capture of the
        rank, because the controller may still ask for it.
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
        Drop what another node keeps now. `kept_by` is the keeper of each node that is not lost.
        """
        for node, rank in [
            key for key in self._kept if kept_by.get(key[0], self._node) != self._node
        ]:
            del self._kept[node, rank]

    def recalled(self, order: Recall, at: float) -> list[Recalled]:
        """
        Return the reports of what this node has of the ranks of a lost node. `at` is the time.
        """
        return [self.report(order.lost, rank, at) for rank in order.ranks]

    def report(self, lost: int, rank: int, at: float) -> Recalled:
        """
        Return the report of what this node has of a rank of the lost node. `at` is the time.
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
