"""
What the parts of a simulated cluster share: the time, the dice, the network, the disk, and the
truth that nobody in it can see.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from tft.core.commands import JobOver
from tft.testing.cluster.clock import Clock
from tft.testing.cluster.mail import Network
from tft.testing.cluster.schedule import Schedule

if TYPE_CHECKING:
    from tft.testing.cluster.auditor import Auditor
    from tft.testing.cluster.group import Groups
    from tft.testing.cluster.invariants import Invariants
    from tft.testing.cluster.leader import Leader, Seen
    from tft.testing.cluster.mishaps import Mishaps
    from tft.testing.cluster.node import Node, Outside
    from tft.testing.cluster.process import Process
    from tft.testing.cluster.story import SharedStory

START = 100.0
"""The cluster's clock when a run begins."""


class Truth:
    """
    What every shard holds, and every rank's data position is, at the end of each step of the
    undisturbed run: undisturbed but for what was decided, to leave batches out, or to go on with
    fewer ranks.
    """

    def __init__(self, seed: int) -> None:
        self._values = [hash((seed, 0))]
        self._data = [0]
        self._left_out: dict[int, int] = {}
        self._without: dict[int, tuple[int, ...]] = {0: ()}
        self._wrong = 0

    def value(self, step: int) -> int:
        """
        The right content of a shard at the end of `step`.
        """
        self._until(step)
        return self._values[step]

    def data(self, step: int) -> int:
        """
        How many batches were drawn by the end of `step`.
        """
        self._until(step)
        return self._data[step]

    def begin(self, step: int) -> int:
        """
        How many batches are gone when the step after `step` begins.
        """
        return self.data(step) + self._left_out.get(step, 0)

    def leave_out(self, step: int, batches: int) -> None:
        """
        It is decided to go on from the end of `step`, without so many batches.
        """
        if batches != self._left_out.get(step, 0) or any(at > step for at in self._left_out):
            self._forget_after(step)
        self._left_out = {at: n for at, n in self._left_out.items() if at < step}
        if batches:
            self._left_out[step] = batches

    def go_on_without(self, step: int, ranks: tuple[int, ...]) -> None:
        """
        It is decided to go on from the end of `step`, without these ranks.
        """
        before = {at: who for at, who in self._without.items() if at <= step}
        if before[max(before)] != ranks or len(before) != len(self._without):
            self._forget_after(step)
            self._without = {**before, step: ranks}

    def wrong(self) -> float:
        """
        Content that nothing else is equal to.
        """
        self._wrong += 1
        return self._wrong + 0.5

    def spoilt(self, step: int) -> float:
        """
        What everybody has after a step in which somebody has contributed what it should not have.
        """
        self._wrong += 1
        return step + 0.25

    def _forget_after(self, step: int) -> None:
        del self._values[step + 1 :], self._data[step + 1 :]

    def _until(self, step: int) -> None:
        while len(self._values) <= step:
            last = len(self._values) - 1
            without = self._without[max(at for at in self._without if at <= last)]
            self._data.append(self.begin(last) + 1)
            self._values.append(hash((self._values[last], self._data[-1], without)))


Content = float
"""Of a shard. A whole number is the truth of some step; one and a quarter is what a polluted update
has made of it; and a half is torn, corrupted or lost."""


@dataclass(slots=True)
class Disk:
    """
    The shared file system.
    """

    parts: dict[str, dict[str, Content]] = field(default_factory=dict)
    """Directory to file to content, while savers write."""
    whole: dict[str, dict[str, Content]] = field(default_factory=dict)
    """The same of checkpoints that are there whole."""
    unreadable: set[str] = field(default_factory=set)
    """Those of them that cannot be read."""
    own: dict[int, dict[int, dict[str, Content]]] = field(default_factory=dict)
    """By step and rank: what the ranks keep without saying so, with the private state under an empty
    name."""

    def found(self, world: int, not_after: int | None) -> int | None:
        """
        The newest step that all ranks have kept, and that is not too late.
        """
        whole = [step for step, parts in self.own.items() if len(parts) == world]
        return max((s for s in whole if not_after is None or s <= not_after), default=None)


@dataclass(slots=True)
class Stage:
    """
    One simulated cluster's common parts.
    """

    schedule: Schedule
    clock: Clock
    rng: Random
    network: Network
    truth: Truth
    disk: Disk
    groups: "Groups" = field(init=False)
    invariants: "Invariants" = field(init=False)
    auditor: "Auditor" = field(init=False)
    mishaps: "Mishaps" = field(init=False)
    story: "SharedStory" = field(init=False)
    outside: "Outside" = field(init=False)
    nodes: dict[int, "Node"] = field(default_factory=dict)
    leaders: list["Leader"] = field(default_factory=list)
    """Every controller that lives, those that only stand by too."""
    processes: list["Process"] = field(default_factory=list)
    """Every process there ever was."""
    by_address: dict[str, "Process"] = field(default_factory=dict)
    polluted: int | None = None
    """The step whose update has spread something wrong to everyone; None: none has."""
    known: bool = False
    """That it has is known to the controller."""
    learnt: tuple[int, int] = (0, 0)
    """The incident and round in which that came out: what was said in earlier ones was said before."""
    pids: int = 1000
    controllers: int = 0
    seen: "Seen" = field(default_factory=Counter)
    over: JobOver | None = None

    def takes(self, least: float, most: float) -> float:
        """
        How long something takes.
        """
        return least + (most - least) * self.rng.random()

    def serving(self, address: str) -> "Process | None":
        """
        The process that gives its shards away there, if it lives.
        """
        process = self.by_address.get(address)
        return process if process is not None and process.alive else None

    def pid(self) -> int:
        """
        Of a new process.
        """
        self.pids += 1
        return self.pids
