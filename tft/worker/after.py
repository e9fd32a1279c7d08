"""
Functions of the user's that are called after steps: evaluations, logs, whatever has to happen once per step on
every rank, and is no part of training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pluggy

from tft.errors import UsageError

LIMIT = 3600.0
"""Seconds that one may take, if nothing else is said: an evaluation of a large model."""

Digests = Callable[[], Mapping[str, Mapping[str, str]]]


@dataclass(slots=True, kw_only=True)
class AfterStep:
    """
    One of them.
    """

    function: Callable[[int], object]
    every: int
    """It is called after every so many steps."""
    limit: float
    """Seconds that it may take."""
    calls: int = 0

    @property
    def name(self) -> str:
        """
        For a sentence.
        """
        return getattr(self.function, "__qualname__", repr(self.function))


class AfterSteps:
    """
    Those of one rank. `hook` is the adaptor's.
    """

    def __init__(self, hook: pluggy.HookRelay) -> None:
        self._hook = hook
        self._sets_aside = bool(hook.tft_set_aside.get_hookimpls())
        self._functions: list[AfterStep] = []

    @property
    def limit(self) -> float:
        """
        Seconds that all of them may take together; 0 where there are none.
        """
        return sum(each.limit for each in self._functions)

    def add(self, function: Callable[[int], object], every: int, limit: float) -> None:
        """
        Call this one, too. Raises `UsageError` for what cannot be called, or not so often.
        """
        if not callable(function):
            raise UsageError(
                f"what is to be called after a step is a function of the step, not a {type(function).__name__}"
            )
        if every < 1 or limit <= 0:
            raise UsageError(
                f"a function is called after every {every} steps and may take {limit} s: the one is at least 1, the "
                "other more than 0"
            )
        known = [each for each in self._functions if each.function == function]
        if known:
            raise UsageError(
                f"{known[0].name} was given before: hand functions over once, before session.run, since `train` is "
                "called again after an incident"
            )
        self._functions.append(AfterStep(function=function, every=every, limit=limit))

    def due(self, step: int) -> list[AfterStep]:
        """
        Those that are to be called after this step.
        """
        return [each for each in self._functions if step % each.every == 0]

    def call(self, after: AfterStep, step: int, digests: Digests) -> None:
        """
        Call it, and put generators and modes back. Raises what it raises, and `UsageError` where it has changed the state:
        that is looked at in the first call, the second, the fourth and so on.
        """
        after.calls += 1
        looks = not after.calls & (after.calls - 1)
        before = digests() if looks else {}
        put_back: Callable[[], None] = (
            self._hook.tft_set_aside() if self._sets_aside else _nothing_to_do
        )
        try:
            after.function(step)
        finally:
            put_back()
        for shard, parts in (digests() if looks else {}).items():
            changed = sorted(part for part in parts if parts[part] != before[shard].get(part))
            if changed:
                raise UsageError(
                    f"{after.name} has changed {', '.join(changed)} of shard {shard!r} after step {step}: what is called "
                    "after a step must leave the state as it is, since it may be called again. Change the state "
                    "in the loop"
                )


def _nothing_to_do() -> None:
    pass
