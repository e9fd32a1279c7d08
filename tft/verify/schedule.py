"""
Decides which rank `tft verify` kills in which phase of which step. All functions are pure.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

PHASES = ("forward", "backward", "collective", "update", "between", "tail", "evaluation")
"""The phases of a step in which a rank is killed. The names are those of the plugin `tft_chaos`,
which carries out the kills."""

FIRST = 2
"""The first step in which a rank is killed. At step 2 all ranks have completed step 1, so the job
can return to the end of step 1."""
APART = 2
"""The number of steps from one kill to the next. It is 2, so that there is a step without a kill
between any two kills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """
    One kill: the phase, and the rank and step at which it happens.
    """

    phase: str
    rank: int
    step: int

    @property
    def spec(self) -> str:
        """
        The kill as a text for the option `--chaos` of the command `tft run`.
        """
        return f"kill:rank={self.rank},step={self.step},phase={self.phase}"


def schedule(
    phases: Sequence[str],
    *,
    ranks: int,
    last: int,
    evaluated: Collection[int],
    others: bool = False,
) -> tuple[Kill, ...]:
    """
    Return the kills of one run of `last` steps: one kill for each of `phases`, as far as the run
    has enough steps.

    `evaluated` lists the steps after which functions of the user are called. A kill in the phase
    `evaluation` can happen only at one of these steps. With `others`, rank 0 is known not to call
    the model there. Then each other rank is killed in this phase, as far as the run has enough
    steps. No rank is killed in the step `last` or later.
    """
    kills: list[Kill] = []
    step = FIRST
    for phase in phases:
        for rank in _victims(phase, ranks, others=others):
            if phase != "evaluation":
                at: int | None = step
            else:
                at = min((each for each in evaluated if each >= step), default=None)
            if at is None or at >= last:
                break
            kills.append(Kill(phase=phase, rank=rank, step=at))
            step = at + APART
    return tuple(kills)


def _victims(phase: str, ranks: int, *, others: bool) -> Sequence[int]:
    """
    Return the ranks to kill in a phase, one after the other.

    Different phases kill different ranks. Rank 0 is killed in `tail` and in `evaluation`, where it
    often does what no other rank does. If another rank evaluates alone, it is the last one most
    often, so the others begin with that.
    """
    if phase == "evaluation":
        return range(ranks - 1, 0, -1) if others else (0,)
    return ((PHASES.index("tail") - PHASES.index(phase)) % ranks,)


def steps_for(phases: Sequence[str]) -> int:
    """
    Return how many steps a run needs to kill one rank in each of `phases`.
    """
    return FIRST + APART * len(phases) + 1
