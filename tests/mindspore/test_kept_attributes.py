"""
Tests of the attributes of callbacks of `Model.train`: what an incident puts back, and what is named
because it cannot be put back.
"""

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from mindspore import Parameter, Tensor, nn, train
from tft_mindspore.kept_attributes import KeptAttributes
from tft_mindspore.rank_local_state import RankLocalState

from tft.spi import pack, unpack
from tft.spi.plain_values import LIMIT

Theirs = Any  # MindSpore has no types


class Table(dict[str, int]):
    """
    A dict of the user.
    """


class Position:
    """
    A data position at step 5.
    """

    def state_dict(self) -> dict[str, int]:
        """
        Return the position.
        """
        return {"step": 5}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Do nothing, because the position is always the same.
        """


class Mean(train.Callback):  # type: ignore[misc]  # MindSpore has no types
    """
    A callback with attributes of various types, which begins anew in `on_train_begin`.
    """

    def __init__(self) -> None:
        self.on_train_begin(None)

    def on_train_begin(self, run_context: Theirs) -> None:
        """
        Set all attributes to their first values.
        """
        self.mean: Theirs = None
        self.weights = numpy.zeros(3)
        self.newest: deque[float] = deque(maxlen=2)
        self.history: dict[str, list[float]] = {}
        self.sizes: set[int] = set()

    def on_train_step_end(self, run_context: Theirs) -> None:
        """
        Change all attributes.
        """
        self.mean = Tensor(numpy.float32(0.5))
        self.weights = self.weights + numpy.float64(0.1)
        self.newest.append(float(self.weights[0]))
        self.history.setdefault("loss", []).append(1.5)
        self.sizes.add(len(self.newest))


def moved(noted: Theirs) -> Theirs:
    """
    Return what was noted as another process gets it.
    """
    return unpack(pack(noted))


def values(callback: Theirs) -> dict[str, str]:
    """
    Return the attributes of a callback in a form that can be compared.
    """
    return {name: repr(value) for name, value in vars(callback).items()}


@pytest.mark.parametrize("fresh", [False, True])
def test_attributes_are_put_back_into_the_same_and_another_process(fresh: bool) -> None:
    """When the loop is entered again after a rollback, then the callbacks have the attributes of
    the end of the step, although `on_train_begin` has set them anew."""
    mean = Mean()
    kept = KeptAttributes([mean], 0)
    mean.on_train_step_end(None)
    mean.on_train_step_end(None)
    noted, expected = moved(kept.note(2, whole=True)), values(mean)
    mean.on_train_step_end(None)

    if fresh:
        mean = Mean()
        kept = KeptAttributes([mean], 0)
    assert kept.rollback(noted, 2) is None
    mean.on_train_begin(None)
    kept.put_back()
    assert values(mean) == expected


def test_an_item_of_a_list_is_not_filled_with_another() -> None:
    """When an attribute refers to another item of a list now than when it was noted, then it gets
    the content of then, and no item changes."""
    mean: Theirs = Mean()
    items = [numpy.zeros(1), numpy.ones(1), numpy.full(1, 2.0)]
    mean.weights = items[0]
    kept = KeptAttributes([mean], 0)
    mean.weights = items[1]
    noted = moved(kept.note(1, whole=True))
    mean.weights = items[2]
    assert kept.rollback(noted, 1) is None
    kept.put_back()
    assert [float(each[0]) for each in items] == [0.0, 1.0, 2.0]
    assert float(mean.weights[0]) == 1.0


def test_generator_of_a_callback_draws_the_same_numbers_in_another_process() -> None:
    """When a callback has a random generator, then a replacement process draws the same numbers
    again, from the generator that its callback has made."""
    ours: Theirs
    theirs: Theirs
    ours, theirs = Mean(), Mean()
    for callback in (ours, theirs):
        callback.chance = numpy.random.default_rng(1)
    kept, replaced = KeptAttributes([ours], 0), KeptAttributes([theirs], 0)
    ours.chance.random()
    noted = moved(kept.note(1, whole=True))
    drawn = [ours.chance.random() for _ in range(3)]
    made = theirs.chance
    assert replaced.rollback(noted, 1) is None
    replaced.put_back()
    assert theirs.chance is made
    assert [made.random() for _ in range(3)] == drawn
    assert list(kept.unkept()) == []


def test_callbacks_of_mindspore_go_on_where_they_were() -> None:
    """When the loop is entered again, then EarlyStopping and ReduceLROnPlateau have counted the
    epochs before, and ModelCheckpoint knows its files."""
    stops = train.EarlyStopping(monitor="loss", patience=3, mode="min")
    reduces = train.ReduceLROnPlateau(monitor="loss", patience=2, mode="min")
    kept = KeptAttributes([stops, reduces, train.LossMonitor()], 0)
    told = {"cur_epoch_num": 1, "net_outputs": Tensor(numpy.float32(2.0))}
    run = SimpleNamespace(original_args=lambda: SimpleNamespace(get=told.get))
    stops.on_train_epoch_end(run)
    stops.on_train_epoch_end(run)
    reduces.wait, reduces.best = 1, 0.25
    kept.note(8, whole=True)
    for each in (stops, reduces):
        each.on_train_begin(run)
    kept.put_back()
    assert (stops.wait, float(stops.best)) == (1, 2.0)
    assert (reduces.wait, reduces.best) == (1, 0.25)
    assert list(kept.unkept()) == []


def test_attributes_that_change_and_cannot_be_kept_are_named_once() -> None:
    """When attributes change that are no plain values or are too large, then each is named once,
    with the reason. Constant ones and the parameters of a network are not named."""
    callback: Theirs = Mean()
    callback.network = nn.Dense(2, 2)
    callback.weight = callback.network.weight
    callback.params = {"constant": object()}
    callback.large = numpy.zeros(LIMIT)
    callback.rows = []
    callback.best = None
    callback.table = numpy.array([object(), object()])
    callback.tables = [Table()]
    callback.names = numpy.array([object(), object()])
    kept = KeptAttributes([callback], 0)
    kept.note(1, whole=True)
    assert list(kept.unkept()) == []

    callback.large[7 * LIMIT // 256] = 1.0
    callback.rows = list(range(LIMIT))
    callback.best = {"w": Parameter(Tensor(1.0))}
    callback.table[1] = object()
    callback.tables.append(Table())
    for step in (2, 3):
        kept.note(step, whole=True)
        found = dict(kept.unkept())
        if step == 2:
            assert sorted(found) == [
                "Mean.best",
                "Mean.large",
                "Mean.rows",
                "Mean.table",
                "Mean.tables",
            ]
            assert "because it is no plain value" in found["Mean.best"]
            assert "because it has more than 32 KiB" in found["Mean.large"]
        else:
            assert found == {}


def test_attributes_without_room_beside_running_statistics_are_named_with_the_reason() -> None:
    """When the running statistics of the model leave room for one of two attributes, then the other
    one is named. The sentence does not say that it is too large by itself."""
    callback: Theirs = Mean()
    callback.first = callback.second = None
    kept = KeptAttributes([callback], 0)
    RankLocalState(nn.BatchNorm2d(28 * 1024), Position(), ("mindspore",), kept)
    callback.first, callback.second = bytes(10 * 1024), bytes(10 * 1024)
    noted = kept.note(1, whole=True)
    found = dict(kept.unkept())
    assert list(found) == ["Mean.second"]
    assert "because it has no room beside the running statistics" in found["Mean.second"]
    assert found["Mean.second"].endswith("each up to 32 KiB, and 16 KiB in all")
    assert "first" in noted["kept"][0]


def test_a_rank_that_is_lost_before_its_callbacks_are_called_says_so() -> None:
    """When a rank goes back to the end of a step that its callbacks have not seen to the end, then
    a sentence names the callbacks. When callbacks have no state, there is no sentence."""
    mean = Mean()
    kept = KeptAttributes([mean], 4)
    state = RankLocalState(nn.Dense(2, 2), Position(), ("mindspore",), kept)
    assert state.end_step() is None
    lost = state.rollback(state.capture(closing=False))
    assert lost is not None
    assert "had seen the end of step 5" in lost
    assert lost.endswith("(Mean)")
    assert state.rollback(state.capture(closing=True)) == lost
    kept.note(5, whole=True)
    ended = state.end_step()
    assert ended is not None
    assert state.rollback(ended) is None

    kept.note(5, whole=True, stopped=True)
    ended = state.end_step()
    assert ended is not None
    assert "had stopped the training" in str(state.rollback(ended))

    nothing = KeptAttributes([train.LossMonitor(), train.Callback()], 4)
    assert nothing.rollback(moved(nothing.note(4, whole=False)), 5) is None
