"""
Functions of the user that are called after steps, such as evaluations and logging. They are not
part of training: they must not change the training state. All ranks call them after the same steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pluggy
import structlog

from tft.clock import SystemClock
from tft.errors import UsageError
from tft.spi.types import Guard
from tft.worker.audit import DATA
from tft.worker.records import Records

log = structlog.get_logger()

_CLOCK = SystemClock()

LIMIT = 3600.0
"""The default time limit for one function, in seconds. It is enough for the evaluation of a large
model."""

_SHARE = 0.01
"""The share of the time that tft spends on digests of the state before and after a function, apart
from those of the calls 1, 2, 4, 8 and so on."""
_SMALL, _LARGE = 256 * 1024**2, 4 * 1024**3
"""The most bytes of parameters of which a copy is kept during a call: for any function, and for a
function that was seen to write to the state and to restore it."""

Digests = Callable[[], Mapping[str, Mapping[str, str]]]


@dataclass(slots=True, kw_only=True)
class AfterStep:
    """
    One user function that is called after steps, with its interval and its time limit.
    """

    function: Callable[[int], object]
    every: int
    """The function is called after each step whose number is a multiple of this number."""
    limit: float
    """The time in seconds that the function may take."""
    calls: int = 0
    writes: bool = False
    """True if the function was seen to write to the state. It has restored the state, because it
    would have been refused otherwise."""
    looked: float = -math.inf
    """The time at which the state was last digested before and after a call."""
    cost: float = 0.0
    """The time in seconds that this took."""

    @property
    def name(self) -> str:
        """
        The name of the function for error messages.
        """
        return getattr(self.function, "__qualname__", repr(self.function))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    """
    What is known about the state before a call of a function.
    """

    after: AfterStep
    step: int
    before: Mapping[str, Mapping[str, str]] | None
    """Digests of the state before the call, or None if it was not digested."""
    guard: Guard | None
    """Watches the state in the adaptor. None if the adaptor cannot do that."""

    @property
    def written(self) -> bool:
        """
        Return True if the function may have written to the state, as far as that can be known.
        """
        return self.before is not None if self.guard is None else self.guard.written()

    def changes(self, digests: Digests) -> list[tuple[str, list[str]]]:
        """
        Return the shards that the function has changed, each with the changed parts. Return nothing
        if the state was not digested before the call.
        """
        found = []
        for shard, parts in (digests() if self.before is not None else {}).items():
            before = (self.before or {})[shard]
            # a part without a digest belongs to this rank alone, and is put back after the call
            changed = sorted(n for n, digest in parts.items() if digest not in ("", before.get(n)))
            if changed:
                found.append((shard, changed))
        return found

    def refuse_changes(self, digests: Digests) -> None:
        """
        Raise `UsageError` if the function has changed the state and has returned.
        """
        found = [f"{', '.join(parts)} of shard {shard!r}" for shard, parts in self.changes(digests)]
        if not found and self.guard is not None:
            found = [", ".join(self.guard.changed())]
        if any(found):
            raise UsageError(
                f"the function {self.after.name} has changed {found[0]} after step {self.step}: a "
                "function that is called after a step must not change the state, because it may be "
                "called again. Change the state in the training loop"
            )

    def end(self) -> None:
        """
        Drop copies of the state, because the effect of the function is known.
        """
        if self.guard is not None:
            self.guard.end()


class AfterSteps:
    """
    All functions of one rank that are called after steps. `hook` has the adaptor's hooks.
    """

    def __init__(self, hook: pluggy.HookRelay) -> None:
        self._hook = hook
        self._sets_aside = bool(hook.tft_set_aside.get_hookimpls())
        self._functions: list[AfterStep] = []
        self._left: _Watch | None = None
        """The call that an exception has left, until its effect on the state is known."""

    @property
    def limit(self) -> float:
        """
        Return the sum of the time limits of all functions in seconds; 0 if there are no functions.
        """
        return sum(each.limit for each in self._functions)

    def add(self, function: Callable[[int], object], every: int, limit: float) -> None:
        """
        Register a function, to be called after every `every` steps, for at most `limit` seconds.

        Raises `UsageError` if the function is not callable or was registered before, or if `every`
        is less than 1, or if `limit` is not more than 0.
        """
        if not callable(function):
            raise UsageError(
                "session.after_step takes a function that is called with the number of a step, not "
                f"a {type(function).__name__}"
            )
        if every < 1 or not 0 < limit < math.inf:
            raise UsageError(
                f"a function to call after steps was given every={every} and limit={limit}: "
                "`every` must be at least 1, and `limit` more than 0 seconds, and no infinite number"
            )
        known = [each for each in self._functions if each.function == function]
        if known:
            raise UsageError(
                f"the function {known[0].name} was registered with session.after_step before: "
                "register functions once, before session.run, not in `train`, which is called "
                "again after an incident"
            )
        self._functions.append(AfterStep(function=function, every=every, limit=limit))

    def due(self, step: int) -> list[AfterStep]:
        """
        Return the functions that must be called after this step.
        """
        return [each for each in self._functions if step % each.every == 0]

    def call(self, after: AfterStep, step: int, digests: Digests) -> None:
        """
        Call a function, and restore random generators and module modes afterwards.

        An exception of the function is raised unchanged. Raises `UsageError` if the function has
        changed the training state, or has moved the data position. It takes time to digest the
        state, so the digests are compared only in the calls 1, 2, 4, 8 and so on of the function,
        in all calls of a function that was seen to write to the state, and in all other calls
        before which enough time has passed.
        """
        after.calls += 1
        began = _CLOCK.now()
        rare = after.cost <= _SHARE * (began - after.looked)
        # a function that writes, such as an evaluation with averaged weights, is always compared: an
        # incident may break it off, and it may have put everything back in a `finally`
        looks = rare or after.writes or not after.calls & (after.calls - 1)
        watch = self._watch(after, step, digests() if looks else None)
        took = _CLOCK.now() - began
        try:
            self._run(after, step)
            returned = _CLOCK.now()
            watch.refuse_changes(digests)
        except BaseException as error:
            self._left = watch
            if watch.guard is not None and watch.written:
                error.add_note(
                    f"(tft) The function {after.name} has written to the training state, and this "
                    "exception has left it before its end. What it does not put back in a `finally` "
                    "can be put back only from a copy, and the state does not count without one"
                )
            raise
        after.writes = after.writes or (watch.guard is not None and watch.written)
        watch.end()
        if looks:
            after.looked = _CLOCK.now()
            after.cost = took + after.looked - returned

    def settle(self, digests: Digests) -> bool:
        """
        Return True if an exception has left a function and the state is not that before its call.
        Called when the rank has left its loop and `tft_clear` has put back what it can.
        """
        left, self._left = self._left, None
        if left is None:
            return False
        changed = left.written
        try:
            if changed and left.before is not None:
                changed = bool(left.changes(digests))
        except Exception:
            log.warning("state_not_compared", step=left.step, exc_info=True)
        left.end()
        if changed:
            log.warning(
                "state_changed_after_step",
                step=left.step,
                why=f"the function {left.after.name} was left by an exception before it had put back "
                "the state, and there is no copy to put back: this rank has no complete state, until "
                "it gets that of another rank, of a copy in host memory or of a checkpoint",
            )
        return changed

    def _watch(
        self, after: AfterStep, step: int, before: Mapping[str, Mapping[str, str]] | None
    ) -> _Watch:
        room = 0 if before is None else _LARGE if after.writes else _SMALL
        guard: Guard | None = self._hook.tft_guard(room=room)
        return _Watch(after=after, step=step, before=before, guard=guard)

    def _run(self, after: AfterStep, step: int) -> None:
        """
        Call the function, and put back what is no part of the training state. Raises `UsageError`
        if the function has moved the data position.
        """
        position = self._data_position()
        put_back: Callable[[], None] = (
            self._hook.tft_set_aside() if self._sets_aside else _nothing_to_do
        )
        try:
            after.function(step)
            moved = self._data_position() != position
        finally:
            put_back()
        if moved:
            raise UsageError(
                f"the function {after.name} has moved the position of the adopted data after step "
                f"{step}, as if it had taken batches from it: training would go on with other "
                "batches, and after an incident with these batches again. Let the function read its "
                "batches from a loader of its own"
            )

    def _data_position(self) -> str | None:
        """
        Return a digest of the data position, or None if the adaptor gives none.
        """
        found: Mapping[str, str] = self._hook.tft_generators() or {}
        return found.get(DATA)


class AfterPhase:
    """
    Calls the functions of this rank that are due when a step has ended.

    `digests` returns digests of the training state. `records` stores the rows (records of a script)
    that a function writes. `called` is called when the functions have returned or failed.
    """

    def __init__(
        self,
        functions: AfterSteps,
        records: Records,
        digests: Digests,
        called: Callable[[], None],
    ) -> None:
        self.functions = functions
        self.running = False
        """True while a function of `session.after_step` runs."""
        self._records = records
        self._digests = digests
        self._called = called

    def due(self, step: int) -> list[AfterStep]:
        """
        Return the functions that must be called after this step.
        """
        return self.functions.due(step)

    def call(
        self,
        after: Sequence[AfterStep],
        step: int,
        expect: Callable[[float], None],
        complete: Callable[[], None],
    ) -> None:
        """
        Call the functions in `after`, which are due after this step. Before each call,
        `expect(seconds)` announces how long the function may take, so that the rank does not count
        as hanging. After each call, `complete()` raises an exception if collectives of the function
        may have been aborted on the device, because the results of aborted collectives are wrong.
        """
        self._records.begin_after(step)
        self.running = True
        try:
            for each in after:
                expect(each.limit)
                self.functions.call(each, step, self._digests)
                complete()
        finally:
            self.running = False
            self._called()
        self._records.end_after()

    def settle(self) -> bool:
        """
        Return True if an exception has left a function and the state is not that before its call.
        """
        return self.functions.settle(self._digests)

    def drop_records(self, step: int) -> None:
        """
        Drop the rows that user functions have recorded after this step, because these functions are
        called again.
        """
        self._records.drop_after(step)


def _nothing_to_do() -> None:
    pass
