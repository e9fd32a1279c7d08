"""
Tests of the data position of a Megatron job, and of the effect of a rollback on this position.
"""

import random
from collections.abc import Callable, Iterator
from itertools import count

import numpy
import pytest
import torch
from megatron.core import num_microbatches_calculator as calculator
from tft_megatron.data import Batches, Data
from torch.utils.data import DataLoader

from tft.errors import MalformedMessage, UsageError

MICRO = 2
PARALLEL = 3
"""Samples in a micro-batch, and data-parallel ranks: a round of micro-batches takes 6 samples."""

Calculate = Callable[..., None]


def from_there(consumed: int) -> Iterator[int]:
    """
    Yield the micro-batches of rank 0 from sample `consumed` on, each as the number of its first
    sample.
    """
    return count(consumed, MICRO * PARALLEL)


@pytest.fixture
def calculate() -> Iterator[Calculate]:
    """
    Return a function that installs Megatron's micro-batch calculator for a global batch and a
    ramp-up.
    """

    def make(batch: int = 12, rampup: list[int] | None = None, *, decrease: bool = False) -> None:
        calculator.destroy_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(1, rampup, batch, MICRO, PARALLEL, decrease)

    make()
    yield make
    calculator.destroy_num_microbatches_calculator()


def trained(data: Data, steps: range) -> list[list[int]]:
    """
    Draw the micro-batches of each step from `data` and return them.
    """
    drawn = []
    for step in steps:
        batches = data.begin(step)
        assert not isinstance(batches, list)
        drawn.append([next(batches) for _ in range(calculator.get_num_microbatches())])
    return drawn


def test_each_step_draws_its_micro_batches_from_one_iterator(calculate: Calculate) -> None:
    """When steps are trained, then each step draws its micro-batches from one iterator. From the
    beginning of a step on, the reported position is that of its end."""
    made: list[int] = []

    def build(consumed: int) -> Iterator[int]:
        made.append(consumed)
        return from_there(consumed)

    data = Data(build)
    assert data.state_dict() == {"consumed": 0}
    assert trained(data, range(1, 4)) == [[0, 6], [12, 18], [24, 30]]
    data.begin(4)
    assert data.state_dict() == {"consumed": 48}
    assert made == [0]


def test_a_resumed_job_begins_after_the_consumed_samples(calculate: Calculate) -> None:
    """When samples were consumed before, then the first iterator begins after them."""
    assert trained(Data(from_there, consumed=24), range(3, 4)) == [[24, 30]]


@pytest.mark.parametrize("drawn", [0, 1, 2])
def test_a_step_is_drawn_again_after_a_rollback(drawn: int, calculate: Calculate) -> None:
    """When a step is interrupted after any number of its micro-batches, then after the rollback it
    draws the same ones as an undisturbed step."""
    data = Data(from_there)
    trained(data, range(1, 3))
    at_the_end = data.state_dict()
    batches = data.begin(3)
    assert not isinstance(batches, list)
    for _ in range(drawn):
        next(batches)
    data.load_state_dict(at_the_end)
    assert trained(data, range(3, 5)) == [[24, 30], [36, 42]]


def test_the_position_captured_within_a_step_is_the_steps_end(calculate: Calculate) -> None:
    """When a rank is lost after it has contributed to its all-reduces, and the others complete the
    step, then a new data object in the replacement continues with the next step."""
    data = Data(from_there)
    trained(data, range(1, 3))
    replacement = Data(from_there)
    replacement.load_state_dict(data.state_dict())
    assert trained(replacement, range(3, 4)) == [[24, 30]]


def test_ranks_that_read_no_data_have_the_position_of_the_others(calculate: Calculate) -> None:
    """When a rank gets its micro-batches from other ranks, then its position is the same as
    theirs."""
    data = Data(lambda _: None)
    for step in (1, 2):
        data.begin(step)
    assert data.consumed == 24


def test_a_step_begun_several_times_moves_the_position_once(calculate: Calculate) -> None:
    """When each forward step reports its step, as in Megatron's own loop, which gets the iterators
    once, then the position advances once in a step."""
    data = Data(from_there)
    batches = data.iterators
    assert not isinstance(batches, list)
    for step in (1, 2, 3):
        drawn = []
        for _ in range(2):
            data.begin(step)
            drawn.append(next(batches))
        assert drawn == [12 * step - 12, 12 * step - 6]
        if step == 2:
            data.load_state_dict({"consumed": 24})
    assert data.consumed == 36


def test_the_ramp_up_of_the_batch_size_follows_the_position(calculate: Calculate) -> None:
    """When the global batch ramps up, then the position of a step decides its number of
    micro-batches. This also holds for the first step after a rollback to a smaller batch."""
    calculate(24, [6, 6, 60])
    data = Data(from_there)
    undisturbed, ends = [], []
    for step in range(1, 9):
        undisturbed += trained(data, range(step, step + 1))
        ends.append(data.state_dict())
    assert [len(step) for step in undisturbed] == [1, 1, 1, 1, 2, 2, 3, 4]
    assert ends[-1] == {"consumed": 90}

    data.load_state_dict(ends[2])
    assert calculator.get_num_microbatches() == 1
    assert trained(data, range(4, 9)) == undisturbed[3:]
    assert data.state_dict() == ends[-1]
    assert trained(data, range(9, 10)) == [[90, 96, 102, 108]]


def loader(consumed: int) -> "DataLoader[int]":
    """
    Return a loader of the samples from `consumed` on. Its iterator draws a seed from torch's default
    generator when it is made.
    """
    return DataLoader(range(consumed, 1000), batch_size=None)  # type: ignore[arg-type]  # a range serves as a dataset


def iterator_of_a_loader(consumed: int) -> Iterator[int]:
    return iter(loader(consumed))


def generator_function(consumed: int) -> Iterator[int]:
    yield from loader(consumed)


def build_that_draws(consumed: int) -> Iterator[int]:
    random.random()
    numpy.random.random()
    return iterator_of_a_loader(consumed)


@pytest.mark.parametrize("build", [iterator_of_a_loader, generator_function, build_that_draws])
def test_new_iterators_leave_the_random_numbers_of_training_as_they_are(
    build: Callable[[int], Batches], calculate: Calculate
) -> None:
    """When iterators are made, at the beginning of a job and after a rollback, then training draws
    the same random numbers as without them."""

    def numbers() -> list[float]:
        return [float(torch.rand(())), random.random(), float(numpy.random.random())]

    def seeded() -> Data:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        return Data(build)

    seeded()
    expected = numbers()
    data = seeded()
    assert trained(data, range(1, 2)) == [[0, 1]]
    assert numbers() == expected
    data = seeded()
    data.load_state_dict({"consumed": 12})
    assert trained(data, range(2, 4)) == [[12, 13], [14, 15]]
    assert numbers() == expected


def test_a_generator_function_that_draws_each_micro_batch_is_refused(calculate: Calculate) -> None:
    """When a generator function draws each micro-batch from the random generators of the process,
    then the second micro-batch of the job raises an error."""

    def drawn(_: int) -> Iterator[float]:
        while True:
            yield random.random()

    batches = Data(drawn).begin(1)
    assert not isinstance(batches, list)
    next(batches)
    with pytest.raises(UsageError, match="seeded by the number of the sample"):
        next(batches)


def test_samples_left_out_of_a_decreased_batch_are_not_consumed(calculate: Calculate) -> None:
    """When Megatron decreases the global batch to fit the ranks, then the samples that it leaves
    out do not count as consumed."""
    calculate(15, decrease=True)
    data = Data(from_there)
    assert trained(data, range(1, 3)) == [[0, 6], [12, 18]]
    assert data.consumed == 24


def test_global_batches_can_be_skipped(calculate: Calculate) -> None:
    """When batches are skipped after a rollback, then that number of global batches is skipped,
    each of the size of its position. The skip of a first rollback does not change a second one."""
    calculate(24, [6, 6, 60])
    data = Data(from_there)
    trained(data, range(1, 3))
    at_the_end = data.state_dict()
    for _ in range(2):
        data.load_state_dict(at_the_end)
        data.skip(3)
        assert data.consumed == 36
        assert trained(data, range(3, 4)) == [[36, 42]]


def test_each_model_chunk_has_an_iterator_of_its_own(calculate: Calculate) -> None:
    """When a rank has several chunks of the model, then each chunk has its own iterator, and a
    rollback makes all iterators anew. A rank that reads no data makes no iterator."""
    data = Data(lambda consumed: [from_there(consumed), None, from_there(consumed)], chunks=3)
    batches = data.begin(1)
    assert isinstance(batches, list)
    assert [next(batches[0]), next(batches[2]), next(batches[0]), next(batches[2])] == [0, 0, 6, 6]
    data.load_state_dict({"consumed": 12})
    assert data.begin(2) == batches
    assert next(batches[2]) == 12
    assert len(Data(lambda _: None, chunks=2).begin(1)) == 2  # type: ignore[arg-type]  # with several chunks it is a list


def test_a_step_with_a_wrong_number_of_drawn_micro_batches_is_refused(calculate: Calculate) -> None:
    """When a step has drawn fewer or more than its micro-batches, then the next step raises an
    error."""
    for drawn in (1, 3):
        data = Data(from_there)
        batches = data.begin(1)
        assert not isinstance(batches, list)
        for _ in range(drawn):
            next(batches)
        with pytest.raises(UsageError, match=f"step 1 has drawn {drawn} of the 2 micro-batches"):
            data.begin(2)


@pytest.mark.parametrize(
    ("build", "chunks", "sentence"),
    [
        (lambda _: [iter(()), iter(())], None, "has returned 2 iterators, but one is expected"),
        (lambda _: [iter(())], 2, "has returned 1 iterators; expected are 2"),
        (lambda _: iter(()), 2, "has returned one iterator; expected are 2"),
    ],
)
def test_a_wrong_number_of_iterators_is_refused(
    build: Callable[[int], Iterator[int]], chunks: int | None, sentence: str, calculate: Calculate
) -> None:
    """When `build` does not make one iterator for each chunk, then the error gives the expected
    number."""
    with pytest.raises(UsageError, match=sentence):
        Data(build, chunks=chunks).begin(1)


def test_a_micro_batch_drawn_outside_a_step_is_refused(calculate: Calculate) -> None:
    """When a micro-batch is drawn before any step has begun, or where no iterator was made, then
    the error names the function to call."""
    data = Data(lambda _: None)
    batches = data.iterators
    assert not isinstance(batches, list)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"call data.begin\(step\)"):
            next(batches)
        data.begin(1)


def test_the_position_of_another_object_is_refused(calculate: Calculate) -> None:
    """When a restored position was captured from another object, then the error names that object's
    type."""
    with pytest.raises(MalformedMessage, match="the saved data position contains epoch, but"):
        Data(from_there).load_state_dict({"epoch": 3})


def test_a_missing_calculator_is_reported_with_the_function_to_call() -> None:
    """When Megatron's calculator does not exist, then there is no position, and the error names the
    function that makes the calculator."""
    calculator.destroy_num_microbatches_calculator()
    with pytest.raises(
        UsageError, match=r"call megatron.core.num_microbatches_calculator.init_num"
    ):
        Data(from_there)
