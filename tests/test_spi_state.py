"""
What the training states of adaptors have in common.
"""

import subprocess
import sys

import pytest

from tft.errors import OrderRefused, UsageError
from tft.spi import check_parts, skip_batches


class Data:
    """
    A data object that can leave batches out.
    """

    position = 0

    def skip(self, batches: int) -> None:
        """
        Leave out batches.
        """
        self.position += batches


def test_unknown_part_of_the_training_state_is_refused() -> None:
    """When a script hands over a part that an adaptor does not know, then the error names it, and
    the parts that the adaptor takes."""
    check_parts({"model": 1}, {"model", "data"}, "mine")
    with pytest.raises(UsageError, match="was given loader; the adaptor mine takes data, model"):
        check_parts({"model": 1, "loader": 2}, {"model", "data"}, "mine")


def test_data_without_the_method_skip_leaves_no_batch_out() -> None:
    """When the data object has a method `skip`, then it is called. Otherwise the order is refused
    with the name of its class."""
    data = Data()
    skip_batches(data, 2)
    assert data.position == 2
    with pytest.raises(OrderRefused, match=r"the object data is a list, which has no method skip"):
        skip_batches([], 1)


def test_extensions_need_no_numpy() -> None:
    """When an extension imports `tft.spi`, then numpy is not imported: only the adaptors that need it
    anyway import the two modules that do."""
    program = "import sys, tft.spi; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
