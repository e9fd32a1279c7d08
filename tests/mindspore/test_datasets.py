"""
Positions in MindSpore's datasets: whoever goes on from one gets the batches that would have come.
"""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
from mindspore import dataset
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from tft_mindspore import Rows

from tft.errors import UsageError

KINDS: dict[str, Callable[[], Any]] = {  # Any: MindSpore has no types
    "slices": lambda: NumpySlicesDataset({"x": numpy.arange(12)}, shuffle=True).batch(3),
    "sharded": lambda: NumpySlicesDataset(
        {"x": numpy.arange(24)}, shuffle=True, num_shards=2, shard_id=1
    ).batch(3),
    "generator": lambda: (
        GeneratorDataset(list(range(12)), ["x"], shuffle=True).map(lambda x: x * 2).batch(3)
    ),
    "shuffled later": lambda: (
        NumpySlicesDataset({"x": numpy.arange(12)}, shuffle=False).shuffle(6).batch(3)
    ),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    dataset.config.set_seed(7)


def drawn(rows: Rows, count: int) -> list[list[int]]:
    """
    The next batches.
    """
    return [rows.next()[0].tolist() for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, 1, 4, 6, 11])
def test_a_position_is_gone_on_from(kind: str, position: int) -> None:
    """
    When a new process, or the same one after it has gone further, goes back to a position, then it draws
    what comes from there on, over the ends of epochs, shuffled as they were.
    """
    whole = drawn(Rows(KINDS[kind](), 3, output_numpy=True), 12)
    assert whole[:4] != whole[4:8]
    dataset.config.set_seed(7)
    other = Rows(KINDS[kind](), 3, output_numpy=True)
    other.load_state_dict({"position": position})
    assert drawn(other, 12 - position) == whole[position:]
    assert other.state_dict() == {"position": 12}

    other.load_state_dict({"position": position})
    assert drawn(other, 12 - position) == whole[position:]
    with pytest.raises(StopIteration):
        other.next()


def test_batches_are_left_out() -> None:
    """
    When batches are skipped, then the one after them comes next.
    """
    whole = drawn(Rows(KINDS["slices"](), 3, output_numpy=True), 12)
    dataset.config.set_seed(7)
    rows = Rows(KINDS["slices"](), 3, output_numpy=True)
    rows.next()
    rows.skip(2)
    assert drawn(rows, 2) == whole[3:5]


def test_what_is_no_dataset_is_refused() -> None:
    """
    When something else is given, then that is said.
    """
    with pytest.raises(UsageError, match=r"takes a dataset of mindspore\.dataset"):
        Rows([1, 2], 3)
