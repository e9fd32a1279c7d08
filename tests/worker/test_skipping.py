"""
Data that can leave out batches, and data that cannot.
"""

import pytest

from tft.errors import UsageError
from tft.worker.session import refuse_without_skip


class Skips:
    """
    Data that can leave out batches.
    """

    def skip(self, batches: int) -> None:
        """
        Leave out batches.
        """


class Fixed:
    """
    Data that cannot leave out batches.
    """

    skip = None


@pytest.mark.parametrize("data", [Fixed(), [], None])
def test_data_that_cannot_leave_out_batches_is_refused(data: object) -> None:
    """When batches are to be left out, then data without a method for it are refused with a
    sentence."""
    refuse_without_skip(Skips())
    with pytest.raises(UsageError, match=r"has no method skip\(batches\)"):
        refuse_without_skip(data)
