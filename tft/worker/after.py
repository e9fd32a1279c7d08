"""
Functions of the user that are called after steps, such as evaluations and logging. They are not
part of training: they must not change the training state. All ranks call them after the same steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pluggy

from tft.errors import UsageError
from tft.worker.audit import DATA
from tft.worker.records import Records

LIMIT = 3600.0
"""The default time limit for one function, in seconds. It is enough for the evaluation of a large
model."""

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

    @property
    def name(self) -> str:
        """
        The name of the function for error messages.
        """
        return getattr(self.function, "__qualname__", repr(self.function))


class AfterSteps:
    """
    All functions of one rank that are called after steps. `hook` has the adaptor's hooks.
    """

    def __init__(self, hook: pluggy.HookRelay) -> None:
        self._hook = hook
        self._sets_aside = bool(hook.tft_set_aside.get_hookimpls())
        self._functions: list[AfterStep] = []

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
        changed the training state, or has moved the data position. The state is compared only in
        the calls 1, 2, 4, 8 and so on of the function, because it takes time to digest the state.
        """
        after.calls += 1
        looks = not after.calls & (after.calls - 1)
        before = digests() if looks else {}
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
        for shard, parts in (digests() if looks else {}).items():
            changed = sorted(part for part in parts if parts[part] != before[shard].get(part))
            if changed:
                raise UsageError(
                    f"the function {after.name} has changed {', '.join(changed)} of shard "
                    f"{shard!r} after step {step}: a function that is called after a step must not "
                    "change the state, because it may be called again. Change the state in the "
                    "training loop"
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

    def drop_records(self, step: int) -> None:
        """
        Drop the rows that user functions have recorded after this step, because these functions are
        called again.
        """
        self._records.drop_after(step)


def _nothing_to_do() -> None:
    pass
