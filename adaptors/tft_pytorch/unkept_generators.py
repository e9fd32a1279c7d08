"""
Finds draws from the global generators of Python and numpy that the script has not handed over.
"""

from collections.abc import Collection, Mapping
from typing import Any

from tft.spi.generators import GLOBAL, global_states

_MODULES = {"python": "random", "numpy": "numpy.random"}


class UnkeptGenerators:
    """
    Compares the states of the global generators that tft does not keep, at the ends of steps.
    """

    def __init__(self, kept: Collection[str]) -> None:
        """
        `kept` has the names of the generators that tft keeps.
        """
        self._names = [name for name in GLOBAL if name not in kept]
        self._kept = tuple(name for name in GLOBAL if name in kept)
        self._before: Mapping[str, Any] | None = None
        """The states at the end of the last step. None if they are not known."""

    def moved(self) -> dict[str, str]:
        """
        Return the names of the generators that have moved since the end of the last step, each with a
        sentence for the user. Called at the end of a step.
        """
        before, self._before = self._before, self._read()
        if before is None:
            return {}
        moved = [name for name in self._names if self._before[name] != before[name]]
        return {_MODULES[name]: self._sentence(name) for name in moved}

    def rest(self) -> None:
        """
        Note that what was drawn since the end of the last step is no part of training.
        """
        if self._before is not None:
            self._before = self._read()

    def forget(self) -> None:
        """
        Forget the states, because an incident has come between two steps.
        """
        self._before = None

    def _read(self) -> Mapping[str, Any]:
        return global_states(self._names) if self._names else {}

    def _sentence(self, name: str) -> str:
        rng = ", ".join(f'"{each}"' for each in ("torch", *self._kept, name))
        return (
            f"random numbers were drawn from {_MODULES[name]} within a step, and tft does not keep "
            "this generator: a step that is computed again draws other numbers, and a replacement "
            "process begins numbers of its own. Hand it over with "
            f"session.adopt(..., rng=({rng})), also if it is a library that draws"
        )
