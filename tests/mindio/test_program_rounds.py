"""
Programs of several ranks in rounds of an incident, over a real hub. The ranks are threads.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from mindio_ttp.exchange import Hub
from mindio_ttp.handlers import Handlers
from mindio_ttp.program import FUNCTIONS, Program

from tft.errors import OrderRefused


@dataclass
class Rank:
    """
    The program of one rank, with functions that count their calls and may fail once.
    """

    rank: int
    incarnation: int = 0
    called: "Counter[str]" = field(default_factory=Counter)
    failing: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        handlers = Handlers()
        for name in ("stop", "clean", "repair", "rollback", *FUNCTIONS):
            handlers.register(name, self.function(name), None)
        self.step = 0
        self.program = Program(
            rank=self.rank, world=3, handlers=handlers, strategies=("retry", "scale_in"),
            incarnation=self.incarnation, completed=lambda: self.step,
        )  # fmt: skip
        self.program.settle_strategies()

    def function(self, name: str) -> Callable[..., int]:
        """
        Return the function that the program registers as `name`.
        """

        def call(*told: object) -> int:
            self.called[name] += 1
            if name in self.failing:
                self.failing.discard(name)
                raise OSError(f"{name} cannot, this once")
            return 0

        return call


class Ranks:
    """
    The ranks of a job, which carry out the orders of a round at the same time.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.round = count()
        self.ranks = {rank: Rank(rank) for rank in range(3)}

    def train(self, *members: int) -> list[str]:
        """
        Let `members` carry out a round, each up to the order that it cannot carry out, and train a
        step. Return the errors.
        """
        name = f"job/1.{next(self.round)}"
        with ThreadPoolExecutor(3) as pool:
            formed = pool.map(lambda rank: self.formed(rank, name, members), members)
            errors = [error for error in formed if error]
            if not errors:
                errors = [error for error in pool.map(self.rolled_back, members) if error]
        for rank in members if not errors else ():
            self.ranks[rank].step += 1
            self.ranks[rank].program.base = 0
        return errors

    def formed(self, rank: int, name: str, members: tuple[int, ...]) -> str:
        """
        Let a rank leave its loop, form groups and exchange what is lacking.
        """
        program = self.ranks[rank].program
        try:
            program.left()
            program.regroup(name, "127.0.0.1", self.port, members.index(rank), len(members))
            program.rebuild()
        except (OSError, OrderRefused) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def rolled_back(self, rank: int) -> str:
        """
        Let a rank roll back.
        """
        one = self.ranks[rank]
        one.step = max(each.step for each in self.ranks.values())
        one.program.base = one.program.base or 0  # a new process receives the number with its state
        try:
            one.program.rollback(b"\xc0")
        except (OSError, OrderRefused) as error:
            return f"{type(error).__name__}: {error}"
        return ""


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """
    Yield the three ranks of a job, which have a hub.
    """
    with Hub("127.0.0.1", 0) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield Ranks(int(hub.server_address[1]))
        finally:
            hub.shutdown()
            thread.join()


@pytest.mark.parametrize("failing", [1, 2])
def test_failed_upgrade_is_repeated_as_an_upgrade(ranks: Ranks, failing: int) -> None:
    """When a rank comes back and the rollback function for that fails on one rank, also on the one
    that comes back, then all ranks call the functions of an upgrade again. None calls its usual
    rollback function before the next incident."""
    assert ranks.train(0, 1, 2) == []
    assert ranks.train(0, 1) == []
    ranks.ranks[2] = Rank(2, incarnation=1)
    ranks.ranks[failing].failing = {"zit_upgrade_rollback"}
    assert ranks.train(0, 1, 2) == ["OSError: zit_upgrade_rollback cannot, this once"]
    assert ranks.train(0, 1, 2) == []
    for one in ranks.ranks.values():
        assert one.called["zit_upgrade_rebuild"] == one.called["zit_upgrade_rollback"] == 2
        assert one.called["rollback"] == 0
    assert ranks.train(0, 1, 2) == []
    assert [one.called["rollback"] for one in ranks.ranks.values()] == [1, 1, 1]


@pytest.mark.parametrize("calls_once", [False, True])
def test_failed_rollback_with_fewer_ranks_is_repeated(ranks: Ranks, calls_once: bool) -> None:
    """When ranks leave, and the rollback function of one of the others fails, then the function is
    called again in the next round. The function with which the ranks left is called once, because
    a program of MindSpeed cannot call it again."""
    assert ranks.train(0, 1, 2) == []
    for one in ranks.ranks.values():
        one.program.calls_once = calls_once
    one = ranks.ranks[1]
    one.program._overwritten = True  # the rank has received its state
    one.failing = {"rollback"}
    assert ranks.train(0, 1) == ["OSError: rollback cannot, this once"]
    assert ranks.train(0, 1) == []
    assert (one.called["rollback"], one.called["zit_downgrade_rebuild"]) == (2, 1)


def test_stop_function_that_exits_has_failed(ranks: Ranks) -> None:
    """When the function `stop` calls `sys.exit`, on a thread of tft or on the training thread, then
    the stop has failed. The thread does not end without a word."""

    def leave(*told: Any) -> None:  # Any: the arguments of the function
        sys.exit("no device")

    program = ranks.ranks[0].program
    program.handlers.register("stop", leave, None)
    for first in (program.interrupt, lambda: None):
        first()
        with pytest.raises(OrderRefused, match="stop function has failed: SystemExit: no device"):
            program.left()
