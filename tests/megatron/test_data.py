"""
Where a Megatron job is in its data, and what becomes of that in a rollback.
"""

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from megatron.core import num_microbatches_calculator as calculator
from tft_megatron.data import Data

from tft.errors import MalformedMessage, UsageError

MICRO = 2
PARALLEL = 3
"""Samples in a micro-batch, and data-parallel ranks: a round of micro-batches takes 6 samples."""

Calculate = Callable[..., None]


def from_there(consumed: int) -> Iterator[int]:
    """
    The micro-batches of rank 0, each by its first sample.
    """
    return count(consumed, MICRO * PARALLEL)


@pytest.fixture
def calculate() -> Iterator[Calculate]:
    """
    Makes Megatron's calculator, for a global batch of this size, and with this ramp-up.
    """

    def make(batch: int = 12, rampup: list[int] | None = None, *, decrease: bool = False) -> None:
        calculator.destroy_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(1, rampup, batch, MICRO, PARALLEL, decrease)

    make()
    yield make
    calculator.destroy_num_microbatches_calculator()


def trained(data: Data, steps: range) -> list[list[int]]:
    """
    What the micro-batches of each step were.
    """
    drawn = []
    for step in steps:
        batches = data.begin(step)
        assert not isinstance(batches, list)
        drawn.append([next(batches) for _ in range(calculator.get_num_microbatches())])
    return drawn


def test_steps_follow_each_other(calculate: Calculate) -> None:
    """
    When steps are trained, then each draws its micro-batches of one iterator, and the position is that of
    the step's end from its beginning on.
    """
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


def test_a_job_that_goes_on_begins_where_it_was(calculate: Calculate) -> None:
    """
    When samples were consumed before, then the first iterator begins behind them.
    """
    assert trained(Data(from_there, consumed=24), range(3, 4)) == [[24, 30]]


@pytest.mark.parametrize("drawn", [0, 1, 2])
def test_a_step_is_drawn_again_after_a_rollback(drawn: int, calculate: Calculate) -> None:
    """
    When a step is cut off, however much of it was drawn, then after the rollback it draws the same as an
    undisturbed one.
    """
    data = Data(from_there)
    trained(data, range(1, 3))
    at_the_end = data.state_dict()
    batches = data.begin(3)
    assert not isinstance(batches, list)
    for _ in range(drawn):
        next(batches)
    data.load_state_dict(at_the_end)
    assert trained(data, range(3, 5)) == [[24, 30], [36, 42]]


def test_what_is_captured_within_a_step_is_its_end(calculate: Calculate) -> None:
    """
    When a rank is lost after it has contributed to its all-reduces, and the others complete the step, then its replacement
    goes on with the next step; it is a new object, which has seen nothing.
    """
    data = Data(from_there)
    trained(data, range(1, 3))
    replacement = Data(from_there)
    replacement.load_state_dict(data.state_dict())
    assert trained(replacement, range(3, 4)) == [[24, 30]]


def test_ranks_that_read_nothing_move_with_the_others(calculate: Calculate) -> None:
    """
    When a rank gets its micro-batches from others, then its position is theirs all the same.
    """
    data = Data(lambda _: None)
    for step in (1, 2):
        data.begin(step)
    assert data.consumed == 24


def test_it_may_be_said_more_than_once_that_a_step_begins(calculate: Calculate) -> None:
    """
    When each forward step says which step it is of, as in a loop of Megatron's own, which has been handed
    the iterators once, then the position moves once in a step.
    """
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


def test_the_batch_grows_as_it_did(calculate: Calculate) -> None:
    """
    When the global batch ramps up, then each step has the number of micro-batches of its position, after a
    rollback to an earlier size, too, before the step begins.
    """
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


def test_a_batch_that_is_decreased_counts_as_what_was_trained(calculate: Calculate) -> None:
    """
    When Megatron makes the global batch smaller to fit the ranks, then what it leaves out was not consumed.
    """
    calculate(15, decrease=True)
    data = Data(from_there)
    assert trained(data, range(1, 3)) == [[0, 6], [12, 18]]
    assert data.consumed == 24


def test_batches_can_be_left_out(calculate: Calculate) -> None:
    """
    When batches are skipped after a rollback, then so many global batches are, each of the size of its
    position; a second rollback is not moved by the first one's skip.
    """
    calculate(24, [6, 6, 60])
    data = Data(from_there)
    trained(data, range(1, 3))
    at_the_end = data.state_dict()
    for _ in range(2):
        data.load_state_dict(at_the_end)
        data.skip(3)
        assert data.consumed == 36
        assert trained(data, range(3, 4)) == [[36, 42]]


def test_several_chunks_have_an_iterator_each(calculate: Calculate) -> None:
    """
    When a rank has several chunks of the model, then each has its own iterator, and all are made anew; where
    a rank reads nothing, none are.
    """
    data = Data(lambda consumed: [from_there(consumed), None, from_there(consumed)], chunks=3)
    batches = data.begin(1)
    assert isinstance(batches, list)
    assert [next(batches[0]), next(batches[2]), next(batches[0]), next(batches[2])] == [0, 0, 6, 6]
    data.load_state_dict({"consumed": 12})
    assert data.begin(2) == batches
    assert next(batches[2]) == 12
    assert len(Data(lambda _: None, chunks=2).begin(1)) == 2  # type: ignore[arg-type]  # a list, with chunks


def test_a_step_that_draws_some_of_its_micro_batches_is_refused(calculate: Calculate) -> None:
    """
    When a step has drawn less than its micro-batches, or more, then the next one says so.
    """
    for drawn in (1, 3):
        data = Data(from_there)
        batches = data.begin(1)
        assert not isinstance(batches, list)
        for _ in range(drawn):
            next(batches)
        with pytest.raises(UsageError, match=f"step 1 has drawn {drawn} micro-batches .* it has 2"):
            data.begin(2)


@pytest.mark.parametrize(
    ("build", "chunks", "sentence"),
    [
        (lambda _: [iter(()), iter(())], None, "has made 2 iterators; expected is one"),
        (lambda _: [iter(())], 2, "has made 1 iterators; expected are 2"),
        (lambda _: iter(()), 2, "has made one iterator; expected are 2"),
    ],
)
def test_another_number_of_iterators_is_refused(
    build: Callable[[int], Iterator[int]], chunks: int | None, sentence: str, calculate: Calculate
) -> None:
    """
    When `build` makes other than an iterator for each chunk, then it is said how many are expected.
    """
    with pytest.raises(UsageError, match=sentence):
        Data(build, chunks=chunks).begin(1)


def test_what_is_drawn_outside_of_a_step_is_refused(calculate: Calculate) -> None:
    """
    When a micro-batch is drawn before any step has begun, or where nothing was made, then it is said what
    to call.
    """
    data = Data(lambda _: None)
    batches = data.iterators
    assert not isinstance(batches, list)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"data.begin\(step\) is to be called"):
            next(batches)
        data.begin(1)


def test_the_position_of_another_object_is_refused(calculate: Calculate) -> None:
    """
    When what is put back was captured from another object, then it is said what came.
    """
    with pytest.raises(MalformedMessage, match="a data position with epoch in it"):
        Data(from_there).load_state_dict({"epoch": 3})


def test_without_a_calculator_it_is_said_what_to_call() -> None:
    """
    When Megatron's calculator is not there, then there is no position, and it is said what makes it.
    """
    calculator.destroy_num_microbatches_calculator()
    with pytest.raises(
        UsageError, match=r"call megatron.core.num_microbatches_calculator.init_num"
    ):
        Data(from_there)
