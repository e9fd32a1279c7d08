"""
What the parts of a simulated cluster share: the time, the dice, the network, the disk, and the
truth that nobody in it can see.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, NamedTuple

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

Digests = dict[str, dict[str, str]]
"""Of what a rank holds, by shard and part."""

START = 100.0
"""The cluster's clock when a run begins."""


class Content(NamedTuple):
    """
    What a rank holds of a shard.
    """

    model: float
    """A whole number is the truth of some step; one and a quarter is what a polluted update has made of
    it; one and an eighth what a corruption has that nobody was told of; and a half is torn, corrupted or lost."""
    settings: float
    """What describes it, such as the learning rate: a whole number, or one and an eighth."""

    @property
    def flipped(self) -> bool:
        """
        A corruption that nobody was told of has touched it, or what it was copied or computed from.
        """
        return self.model % 1 == FLIPPED or self.settings % 1 == FLIPPED

    @property
    def spoilt(self) -> bool:
        """
        It comes of a polluted update.
        """
        return self.model % 1 == SPOILT

    @property
    def wrong(self) -> bool:
        """
        It is torn, corrupted with an exception, or lost.
        """
        return self.model % 1 == WRONG

    def digests(self) -> dict[str, str]:
        """
        By part, as a rank says them.
        """
        return {"model": repr(self.model), "settings": repr(self.settings)}


SPOILT, FLIPPED, WRONG = 0.25, 0.125, 0.5
RANGE = 1 << 40
"""Of numbers that have room for an eighth."""


class Truth:
    """
    What every shard holds, and every rank's data position is, at the end of each step of the
    undisturbed run: undisturbed but for what was decided, to leave batches out, or to go on with
    fewer ranks; or from what nobody can know to be wrong, or is told to be inexact.

    In the tail of a step a shard is first what the update window has left (its settings are still those of the
    step before), then it has its settings, and at the end of the step it is whole.
    """

    def __init__(self, seed: int, *, tails: bool = False) -> None:
        self._values = [hash((seed, 0))]
        self._tails = tails
        self._bends: dict[str, dict[int, Content]] = {}
        """By shard and step: what all went on from instead."""
        self._data = [0]
        self._left_out: dict[int, int] = {}
        self._without: dict[int, tuple[int, ...]] = {0: ()}
        self._wrong = 0

    def value(self, step: int, shard: str) -> Content:
        """
        The right content of a shard at the end of `step`.
        """
        self._until(step)
        bends = self._bends.get(shard)
        since = max((at for at in bends if at <= step), default=None) if bends else None
        if bends is None or since is None:
            return Content(self._values[step], step)
        content = bends[since]
        for at in range(since + 1, step + 1):
            content = self._next(content, at)
        return content

    def stages(self, step: int, shard: str) -> tuple[Content, ...]:
        """
        What a shard is from the end of the update window of `step` to the end of the step, in turn.
        """
        end = self.value(step, shard)
        if not self._tails:
            return (end,)
        model = hash((end.model, 1))
        return Content(model, end.settings - 1), Content(model, end.settings), end

    def bend(self, step: int, shard: str, content: Content) -> None:
        """
        All go on from this content as if it were right.
        """
        self._bends.setdefault(shard, {})[step] = content

    def _next(self, content: Content, step: int) -> Content:
        """
        What the update of `step`, and its tail, make of it.
        """
        facts = (content.model, self._data[step], self._without_after(step - 1))
        return Content(hash(facts), content.settings + 1)

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

    def wrong(self) -> Content:
        """
        Content that nothing else is equal to.
        """
        self._wrong += 1
        return Content(self._wrong + WRONG, 0)

    def spoilt(self, step: int) -> Content:
        """
        What everybody has after a step in which somebody has contributed what it should not have.
        """
        self._wrong += 1
        return Content(step + SPOILT, step)

    def flipped(self, content: Content, *, settings: bool) -> Content:
        """
        What a corruption makes of it that nobody is told of: of its settings, or else of the rest.
        """
        self._wrong += 1
        if settings:
            return content._replace(settings=self._wrong * 100 + FLIPPED)
        return content._replace(model=self._wrong + FLIPPED)

    def goes_on(self, content: Content, before: Content, after: Content, step: int) -> Content:
        """
        What a rank makes of its own content where the right one goes from `before` to `after`.
        """
        if content == before:
            return after
        if not content.flipped:
            return content if content.spoilt else self.wrong()
        model = content.model
        if after.model != before.model:
            model = hash((content, step)) % RANGE + FLIPPED
        return Content(model, content.settings + after.settings - before.settings)

    def _forget_after(self, step: int) -> None:
        del self._values[step + 1 :], self._data[step + 1 :]

    def unbend_after(self, step: int) -> None:
        """
        All go back to `step`: what they went on from later is over.
        """
        for bends in self._bends.values():
            for later in [at for at in bends if at > step]:
                del bends[later]

    def _without_after(self, last: int) -> tuple[int, ...]:
        """
        The ranks that take no part after the end of step `last`.
        """
        return self._without[max(at for at in self._without if at <= last)]

    def _until(self, step: int) -> None:
        while len(self._values) <= step:
            last = len(self._values) - 1
            self._data.append(self.begin(last) + 1)
            facts = (self._values[last], self._data[-1], self._without_after(last))
            self._values.append(hash(facts))


Written = Content | float
"""What a file holds: a shard, or the data position that a rank has for itself."""


@dataclass(slots=True)
class Disk:
    """
    The shared file system.
    """

    parts: dict[str, dict[str, Written]] = field(default_factory=dict)
    """Directory to file to content, while savers write."""
    copies: dict[str, dict[int, Digests]] = field(default_factory=dict)
    """Directory to rank to what it says of its copies, while the ranks write a periodic checkpoint."""
    whole: dict[str, dict[str, Written]] = field(default_factory=dict)
    """The same of checkpoints that are there whole."""
    unreadable: set[str] = field(default_factory=set)
    """Those of them that cannot be read."""
    own: dict[int, dict[int, dict[str, Written]]] = field(default_factory=dict)
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
    begun: bool = False
    """Some rank has entered the loop: before that every fresh state is as good as another."""
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
