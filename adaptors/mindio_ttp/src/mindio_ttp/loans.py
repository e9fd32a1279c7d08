"""
What the ranks of one group send each other: who has a shard says so, who needs it asks one of them.

The program's own function does the sending and the receiving, on both ranks at once, and one at a time on each.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mindio_ttp import logs
from mindio_ttp.exchange import Body, Membership
from tft.errors import OrderRefused

log = logs.get_logger()

Send = Callable[[str, int, int], None]
"""Sends a shard as it was at the end of a step to a rank."""
GIVEN_UP = "the repair was given up: its order is no longer wanted"


@dataclass(slots=True)
class Loans:
    """
    Those of one rank in one group; a new group has new ones, so that nothing of the old one is heard.
    """

    rank: int
    world: int
    send: Send
    membership: Membership | None = None
    _lenders: dict[tuple[str, int], dict[int, int | None]] = field(default_factory=dict)
    """By shard and step: the ranks that lend it, and the step of its program that each began at."""
    _lent: set[tuple[str, int]] = field(default_factory=set)
    _asked: deque[tuple[int, str, int]] = field(default_factory=deque)
    _failed: str = ""
    _void: bool = False
    _turn: threading.Condition = field(default_factory=threading.Condition)

    def open(self) -> None:
        """
        The group is whole on this rank: what is asked of it can be sent.
        """
        threading.Thread(target=self._serve, name="mindio-send", daemon=True).start()

    def void(self) -> None:
        """
        Nothing of it is wanted any more. From any thread.
        """
        with self._turn:
            self._void = True
            self._turn.notify_all()

    def lend(self, shard: str, step: int, base: int | None) -> None:
        """
        This rank has it; `base` is how its program counts. On a transfer thread.
        """
        with self._turn:
            self._lent.add((shard, step))
        if self.membership is not None:
            self.membership.say({"lends": shard, "step": step, "base": base})

    def lender(self, shard: str, step: int) -> tuple[int, int | None]:
        """
        Waits for one that has it, the next after this rank where several have come; and its base.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._lenders.get((shard, step)) or self._void)
            if self._void:
                raise OrderRefused(GIVEN_UP)
            lenders = dict(self._lenders[shard, step])
        source = min(lenders, key=lambda rank: (rank - self.rank) % self.world)
        return source, lenders[source]

    def ask(self, source: int, shard: str, step: int) -> None:
        """
        Have it sent.
        """
        if self.membership is not None:
            self.membership.say({"borrows": shard, "step": step}, source)

    def settle(self) -> None:
        """
        Waits until all that was asked of this rank is sent. Raises `OrderRefused` where it could not be.
        """
        with self._turn:
            self._turn.wait_for(lambda: not self._asked or self._void)
            if self._asked:
                raise OrderRefused(GIVEN_UP)
            if self._failed:
                raise OrderRefused(f"the program's repair function could not send: {self._failed}")

    def heard(self, rank: int, body: Body) -> None:
        """
        What another rank has said. On a thread of the exchange.
        """
        with self._turn:
            step = int(body["step"])
            if "lends" in body:
                self._lenders.setdefault((body["lends"], step), {})[rank] = body["base"]
            elif (body["borrows"], step) in self._lent:
                self._asked.append((rank, body["borrows"], step))
            self._turn.notify_all()

    def _serve(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._asked or self._void)
                if self._void:
                    return
                to, shard, step = self._asked[0]
            failed = ""
            try:
                self.send(shard, step, to)
            except Exception as error:  # of the program's own function
                failed = f"{type(error).__name__}: {error}"
                log.exception("repair_not_sent", to=to, shard=shard)
            with self._turn:
                self._failed = self._failed or failed
                self._asked.popleft()
                self._turn.notify_all()


def agreed_base(told: Mapping[int, int | None]) -> str:
    """
    Why the ranks do not count the same steps; empty: they do, as far as they have counted any.
    """
    known = {rank: base for rank, base in told.items() if base is not None}
    if len(set(known.values())) < 2:
        return ""
    low, high = min(known, key=lambda rank: known[rank]), max(known, key=lambda rank: known[rank])
    return (
        f"the program's steps are not the same on all ranks: rank {high} is {known[high] - known[low]} "
        f"steps ahead of rank {low}, at the same step of the job; they must start from one checkpoint"
    )
