"""
The limits of the system that matter to tft.
"""

from tests.exhausted import no_more_threads
from tft.limits import can_start_threads


def test_no_more_threads_is_noticed_before_they_are_needed() -> None:
    """When the system has no more threads, then this is said, and no error is raised."""
    assert can_start_threads(4)
    with no_more_threads():
        assert not can_start_threads(4)
    assert can_start_threads(4)
