"""
Tests of positions in MindSpore's datasets: training from a saved position gets the same batches.
"""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from mindspore import dataset
from mindspore.dataset import DistributedSampler, GeneratorDataset, NumpySlicesDataset
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
    Return the next `count` batches.
    """
    return [rows.next()[0].tolist() for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, 1, 4, 6, 11])
def test_a_restored_position_gives_the_same_batches(kind: str, position: int) -> None:
    """When a new process, or the same one after it has gone further, restores a position, then it
    draws the same shuffled batches from there on, across the ends of epochs."""
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


def test_skipped_batches_are_not_drawn() -> None:
    """When batches are skipped, then the batch after them comes next."""
    whole = drawn(Rows(KINDS["slices"](), 3, output_numpy=True), 12)
    dataset.config.set_seed(7)
    rows = Rows(KINDS["slices"](), 3, output_numpy=True)
    rows.next()
    rows.skip(2)
    assert drawn(rows, 2) == whole[3:5]


def test_an_object_that_is_no_dataset_is_refused() -> None:
    """When an object of another type is given, then the error says so."""
    with pytest.raises(UsageError, match=r"takes a dataset of mindspore\.dataset"):
        Rows([1, 2], 3)


SILENT: dict[str, Callable[[], Any]] = {  # Any: MindSpore has no types
    "shuffled by default": lambda: NumpySlicesDataset([1, 2]).batch(2),
}
UNSHUFFLED: dict[str, Callable[[], Any]] = {  # Any: MindSpore has no types
    "slices": lambda: NumpySlicesDataset({"x": numpy.arange(12)}, shuffle=False).batch(3),
    "sharded": lambda: NumpySlicesDataset(
        {"x": numpy.arange(12)}, sampler=DistributedSampler(2, 1, shuffle=False)
    ).batch(3),
    "mapped": lambda: (
        GeneratorDataset(list(range(12)), ["x"], shuffle=False).map(lambda x: x * 2).repeat(2)
    ),
    "iterator": lambda: GeneratorDataset(lambda: iter([(1,), (2,)]), ["x"]).batch(2),
    "zipped": lambda: dataset.zip(
        tuple(NumpySlicesDataset({name: numpy.arange(4)}, shuffle=False) for name in "xy")
    ),
}


@pytest.mark.parametrize("kind", [*KINDS, *SILENT])
def test_a_dataset_that_shuffles_without_a_seed_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a dataset shuffles its rows and no seed was set, so that each process would have another
    order, then the error says which call is missing."""
    monkeypatch.setattr(dataset.config, "get_seed", lambda: 5489)
    with pytest.raises(UsageError, match=r"call mindspore\.set_seed\(1\) before"):
        Rows({**KINDS, **SILENT}[kind](), 3)


@pytest.mark.parametrize("kind", UNSHUFFLED)
def test_a_dataset_that_does_not_shuffle_needs_no_seed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a dataset does not shuffle its rows, then it is accepted without a seed."""
    monkeypatch.setattr(dataset.config, "get_seed", lambda: 5489)
    Rows(UNSHUFFLED[kind](), 3)


def test_mindspore_has_the_number_that_stands_for_no_seed() -> None:
    """When no seed was set in a process, then MindSpore has the number for which the adaptor
    looks."""
    asks = "from mindspore.dataset import config; print(config.get_seed())"
    said = subprocess.run(
        [sys.executable, "-c", asks], check=True, capture_output=True, text=True
    ).stdout
    assert said.split()[-1] == "5489"
