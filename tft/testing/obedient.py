"""
A scripted rank, for tests. It behaves like a rank, but has no process, framework or clock. It
carries out each order at once.

The rank also records whether its state is really right, which the job machine cannot see. So a test
fails when a rank resumes with a wrong state, or gets a state from a rank that does not hold this
state.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from tft.core.job.orders import ORDERS
from tft.protocol.messages import (
    Answered,
    Check,
    Compare,
    Fetch,
    Freeze,
    Hold,
    Load,
    OrderName,
    Position,
    RankOrder,
    Rebuild,
    Regroup,
    Release,
    Reload,
    Restore,
    Resume,
    Rollback,
    Save,
    SavedFile,
    Stop,
    Verdict,
)

ON_DEVICE = (Fetch, Load, Rebuild, Reload, Restore, Resume, Rollback, Save)
"""The orders that a rank cannot carry out without its device (such as a GPU)."""


@dataclass(slots=True)
class ScriptedState:
    """
    The training state that a scripted rank holds, and the copies of this state.
    """

    keeps: int = 0
    """The number of earlier steps of which the rank keeps copies."""
    torn: bool = False
    spoiled: bool = False
    """True if the state in use is wrong, whether the rank knows this or not."""
    backups: tuple[int, ...] = ()
    """The earlier steps of which the rank keeps a copy."""
    bad_copies: frozenset[int] = frozenset()
    """The steps whose copies were damaged by a memory fault of the rank."""
    finds: int | None = None
    """The step of the newest checkpoint that the rank writes without tft. None if there is no such
    checkpoint."""
    promises: bool = False
    """True if the rank uses a fetched state only after the `Rebuild` order. Until then the state of
    the rank counts as incomplete."""
    promised: int | None = None
    """The step of the fetched state that the rank will use after the `Rebuild` order. None if no
    such state was fetched."""
    content: str = "right"
    """A text that stands for the content of the copies. Ranks that hold the same shard must have
    equal content. Empty: the rank cannot compute digests of its copies."""
    settings: str = "right"
    """A text that stands for the part `description` of the state, which has a digest of its own.
    Ranks that hold the same shard must have equal descriptions."""
    shards: tuple[str, ...] = ()
    odd: dict[int, str] = field(default_factory=dict)
    """By rank: why this rank cannot fetch shards from that rank."""


@dataclass(slots=True)
class ScriptedLoop:
    """
    The position of a rank in its training loop, and the behaviour of the loop.
    """

    window: bool = False
    tails: bool = False
    """True if the loop marks the end of its steps, so that each step has a tail (a part after its
    update window)."""
    tail: bool = False
    """True if the rank is in the tail of a step: the update window has closed, and the step has not
    ended."""
    cut: bool = False
    """True if a `Stop` order interrupts the tail of the rank's step (the part after its update
    window). False if the rank ends the tail before it stops."""
    line: str = ""
    """The place (FILE:LINE) where the loop is interrupted."""
    after: bool = False
    """True if the step has ended, and the functions that the script calls after the step are still
    running."""
    inexact: tuple[str, ...] = ()
    """Sentences about actions of the loop after its update windows that an incident cannot undo or
    repeat exactly."""
    lost: str = ""
    """A sentence about rank-local state that a rollback of this rank could not restore."""
    done: bool = False
    """True when the training function of the script has returned."""
    announce: bool = False
    waiting: bool = True


@dataclass(slots=True)
class ScriptedHearing:
    """
    The record of the orders that a scripted rank has received.
    """

    key: tuple[int, int] = (-1, 0)
    """The newest round of which the rank has received an order: (incident, round). Orders of older
    rounds, and repeated orders, are ignored."""
    epoch: int = 0
    names: set[OrderName] = field(default_factory=set)
    """The orders of the round `key` that the rank has received."""


@dataclass(slots=True)
class ScriptedRank:
    """
    One process of a scripted rank, which carries out orders without a real process.
    """

    rank: int
    incarnation: int = 0
    node: int = 0
    alive: bool = False
    step: int = 0
    training: bool = False
    limit: float = math.inf
    """The last step that the rank may complete, because the rank is frozen or got a `Hold` order.
    Infinite: there is no limit."""
    without: tuple[int, ...] = ()
    """The ranks that take no part in this rank's process groups."""
    hung: bool = False
    """True if the rank hangs: it answers nothing and trains nothing until it is killed."""
    stopped: bool = False
    """True if the process is stopped (SIGSTOP). The agent notices the stop when it ends the
    process."""
    context_lost: bool = False
    """True if the device of the rank accepts no more work from this process."""
    loop: ScriptedLoop = field(default_factory=ScriptedLoop)
    state: ScriptedState = field(default_factory=ScriptedState)
    orders: ScriptedHearing = field(default_factory=ScriptedHearing)

    def must_stop_before(self, order: RankOrder) -> bool:
        """
        Return True if `order` is a compare or regroup order that must wait for a stop order: the
        rank was frozen in the same round, and has carried out no stop order since. A real worker
        too carries out these orders only after the stop order.
        """
        heard = self.orders
        return (
            isinstance(order, Compare | Regroup)
            and heard.key == (order.incident, order.round)
            and "freeze" in heard.names
            and ("stop" not in heard.names or self.training)
        )

    @property
    def held(self) -> int | None:
        """
        The step of the complete state in memory. None inside the update window, or when the state
        is incomplete. The session of a real rank has the same property.
        """
        return None if self.loop.window or self.state.torn else self.step

    @property
    def position(self) -> Position:
        """
        The position of the rank in its steps. The session of a real rank has the same property.
        """
        return Position(
            step=self.step, window=self.loop.window, tail=self.loop.tail, after=self.loop.after
        )

    def sound_steps(self) -> frozenset[int]:
        """
        Return the steps of which this rank can give the right state to other ranks.
        """
        if self.context_lost:
            return frozenset()
        live = () if self.held is None or self.state.spoiled else (self.held,)
        return frozenset((*live, *self.state.backups)) - self.state.bad_copies

    def complete(self) -> None:
        """
        Complete the current step: close the update window and keep a copy if the rank keeps copies.
        """
        if self.state.keeps:
            self.state.backups = (*self.state.backups, self.step)[-self.state.keeps :]
            self.state.bad_copies -= {self.step}
        self.step, self.loop.window, self.loop.tail, self.loop.after = (
            self.step + 1,
            False,
            False,
            False,
        )

    # ---------------------------------------------------------------- how the rank obeys orders

    def hears(self, order: RankOrder, name: OrderName) -> bool:
        """
        Return True if the order is for this process and was not received before. If so, record the
        order as received.
        """
        key = (order.incident, order.round)
        meant = order.incarnations.get(self.rank, 0) == self.incarnation
        if not self.alive or self.hung or not meant:
            return False
        heard = self.orders
        if (
            order.epoch < heard.epoch
            or key < heard.key
            or (key == heard.key and name in heard.names)
        ):
            return False
        heard.names = heard.names | {name} if key == heard.key else {name}
        heard.key, heard.epoch = key, order.epoch
        return True

    def obey(
        self, order: RankOrder, gives: Callable[[int], frozenset[int]], *, stuck: bool
    ) -> str | None:
        """
        Carry out an order. Return None, or the reason why the rank could not carry it out.

        `gives(rank)` returns the steps whose state that rank can send to other ranks. `stuck` is
        True if this rank was interrupted in the all-reduces of its next step.
        """
        if self.context_lost and isinstance(order, ON_DEVICE):
            return "AcceleratorError: CUDA error: unspecified launch failure"
        match order:
            case Freeze():
                self.limit = self.step + self.loop.window
            case Hold():
                return self._hold(order.step)
            case Check():
                assert self.loop.done or self.step >= self.limit, f"rank {self.rank} still trains"
            case Release():
                self.limit, self.loop.announce = math.inf, self.training
            case Stop():
                if self.training and self.step < order.finish and not stuck:
                    self.complete()
                self.loop.tail = self.loop.tail and self.loop.cut
                self.training, self.state.promised = False, None
            case Restore():
                if order.step not in self.state.backups:
                    return f"rank {self.rank} keeps no copy of step {order.step}"
                assert order.step not in self.state.bad_copies, f"rank {self.rank} takes a bad copy"
                self._goes_back_to(order.step)
            case Fetch():
                self._fetch(order, gives)
            case Rebuild():
                if self.state.promised is not None:
                    self._goes_back_to(self.state.promised)
                    self.state.promised = None
            case Load():
                self._goes_back_to(order.step)
            case Reload():
                if self.state.finds is None:
                    return f"rank {self.rank} keeps no checkpoint"
                assert not self.training, f"rank {self.rank} loads a checkpoint while it trains"
                self._goes_back_to(self.state.finds)
            case Regroup():
                assert not self.training, f"rank {self.rank} forms groups while it trains"
                self.without = order.without
            case Resume():
                assert self.held == order.step - 1, f"rank {self.rank} resumes with {self.held}"
                assert not self.state.spoiled, f"rank {self.rank} resumes with wrong state"
                self.training = self.loop.announce = True
                self.loop.tail = self.loop.after = False
                self.limit = math.inf
            case Save():
                if order.shards and self.held != order.step:
                    return f"rank {self.rank} holds step {self.held}, not {order.step}"
                if order.shards:
                    assert not self.state.spoiled, f"rank {self.rank} saves wrong state"
            case _:
                pass
        return None

    def _fetch(self, order: Fetch, gives: Callable[[int], frozenset[int]]) -> None:
        for transfer in order.transfers:
            for source in transfer.sources:
                has = gives(source.rank)
                assert order.step in has, f"rank {source.rank} has steps {has}, not {order.step}"
        if self.state.promises:
            self.state.torn, self.state.promised = True, order.step
        else:
            self._goes_back_to(order.step)

    def _hold(self, step: int) -> str | None:
        """
        Complete the steps up to `step`. Return None, or the reason why the rank cannot reach
        `step`.
        """
        self.limit = step
        while self.training and self.step < step:
            self.complete()
        if self.step < step:
            return f"it has left the loop after step {self.step}, before step {step} ended"
        return None

    def _goes_back_to(self, step: int) -> None:
        self.step, self.loop.window, self.state.torn, self.state.spoiled = step, False, False, False
        self.loop.tail = self.loop.after = False
        self.state.backups = tuple(kept for kept in self.state.backups if kept < step)

    def answer(
        self,
        order: RankOrder,
        name: OrderName,
        failure: str | None,
        *,
        found: tuple[Verdict, str],
        at: float,
    ) -> Answered:
        """
        Return the answer to an order. `found` is the result of a check: the verdict and its reason.
        """
        files: tuple[SavedFile, ...] = ()
        if isinstance(order, Save) and failure is None:
            names = (*order.shards, *(f"local-state-{r}" for r in (self.rank, *order.local_state)))
            files = tuple(SavedFile(name=n, size=1, digest="d") for n in names)
        unsaved = isinstance(order, Save) and failure is not None
        captured = (self.step - 1, self.step) if unsaved else ()
        compares = ORDERS[name].digests and failure is None and self.held is not None
        parts = {"model": self.state.content, "description": self.state.settings}
        return Answered(
            rank=self.rank,
            incarnation=self.incarnation,
            incident=order.incident,
            round=order.round,
            order=name,
            failure=failure,
            context_lost=failure is not None and self.context_lost,
            position=self.position,
            held=self.held,
            backups=self.state.backups,
            waiting=self.loop.waiting,
            files=files,
            verdict=found[0],
            finding=found[1],
            local_state=dict.fromkeys(captured, "00"),
            digests=dict.fromkeys(self.state.shards, parts)
            if compares and self.state.content
            else {},
            line=self.loop.line if self.loop.tail and name == "stop" else "",
            odd=self.state.odd if name == "fetch" else {},
            lost=self.loop.lost if name == "rollback" else "",
            inexact=self.loop.inexact,
            tails=self.loop.tails,
            began=at,
            at=at,
        )
