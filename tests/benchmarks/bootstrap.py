"""
The 95 % interval of what is computed from samples, by drawing the samples again (bootstrap).
"""

import random
from collections.abc import Callable, Sequence

DRAWS = 2000
"""How often the samples are drawn again."""


def interval_95(statistic: Callable[..., float], *samples: Sequence[float]) -> tuple[float, float]:
    """
    Return the ends of the 95 % interval of `statistic`, which takes as many sequences of samples as
    are given.
    """
    rng = random.Random(0)
    found = sorted(
        statistic(*(rng.choices(each, k=len(each)) for each in samples)) for _ in range(DRAWS)
    )
    return found[int(0.025 * DRAWS)], found[int(0.975 * DRAWS)]
