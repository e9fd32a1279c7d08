"""
What a rank concludes from the newest step whose copies are known to be equal.
"""

import pytest

from tft.worker.control import Compared


@pytest.mark.parametrize(
    ("cycle", "every", "copies"),
    [(0, 10, 2), (48, 50, 3), (48, 95, 3), (48, 96, 2), (48, 500, 2), (1, 1, 3), (1, 2, 2)],
)
def test_third_copy_is_kept_where_a_comparison_takes_half_the_interval(
    cycle: int, every: int, copies: int
) -> None:
    """When a copy is known to be equal only after more than half the interval, then three are kept.
    Without slices, or with a longer interval, two are."""
    compared = Compared()
    compared.cycle = cycle
    assert compared.copies(every) == copies


def test_every_step_counts_as_equal_without_slices() -> None:
    """When the rank digests no slices, then each step counts as equal. When it does, then only the
    steps do that the controller has named; without a shard of several holders, all of them do."""
    compared = Compared()
    assert compared.sound(7) == 7
    compared.cycle, compared.step = 8, 3
    assert (compared.sound(7), compared.sound(2)) == (3, 2)
    compared.step = None
    assert compared.sound(7) == 7
