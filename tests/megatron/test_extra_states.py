"""
Tests that the extra states of modules (`get_extra_state`) are kept.
"""

from typing import Any

import pytest
from tft_megatron.rank_local_state import RankLocalState
from tft_megatron.training import Training
from torch import nn

from tests.megatron.extra import Counter
from tft.errors import UsageError


class Telling(nn.Module):
    """
    A module that returns an extra state but has no method to restore it.
    """

    def get_extra_state(self) -> object:
        """
        Return a number.
        """
        return 1


class Layer(nn.Module):
    """
    A module with the methods of a linear layer of Megatron or TransformerEngine.
    """

    def get_extra_state(self) -> object:
        """
        Fail, because such a layer is not to be asked.
        """
        raise AssertionError

    def set_extra_state(self, state: dict[str, int]) -> None:
        """
        Do nothing.
        """


def state_of(*chunks: nn.Module) -> RankLocalState:
    """
    Return the rank-local state of a rank that trains these model chunks.
    """
    return RankLocalState(Training(chunks=chunks, optimizer=None, scheduler=None, data=None))


def rank(*counts: int) -> tuple[list[Counter], RankLocalState]:
    """
    Return the counters of a rank, and its rank-local state. The rank has one model chunk for each
    counter.
    """
    counters = [Counter(count) for count in counts]
    return counters, state_of(*(nn.Sequential(nn.Linear(2, 2), each) for each in counters))


def test_a_replacement_counts_on_from_the_captured_extra_states() -> None:
    """When a rank with two model chunks is replaced, then the modules of both chunks have the
    extra states that the lost process had at its last capture."""
    counters, state = rank(5, 6)
    captured = state.capture(closing=False)
    replacements, fresh = rank(0, 0)
    assert state.extra != fresh.extra
    fresh.rollback(captured)
    assert [each.count for each in replacements] == [each.count for each in counters] == [5, 6]
    assert state.extra == fresh.extra


def test_an_unfinished_step_leaves_no_extra_state() -> None:
    """When a step is interrupted, then the extra states are those of the end of the step before.
    When they have come from a checkpoint since, then they stay."""
    (counter,), state = rank(5)
    state.capture(closing=True)
    counter.count = 6
    state.capture(closing=False)
    state.rewind()
    assert counter.count == 5
    counter.count = 9
    state.forget()
    state.rewind()
    assert counter.count == 9


def test_an_extra_state_that_a_tail_changes_is_kept() -> None:
    """When the tail of a step changes an extra state, then the end of the step has it, with the
    data position and generators of the update window. When it changes none, nothing is noted."""
    (counter,), state = rank(5)
    state.capture(closing=True)
    assert state.end_step() is None
    counter.count = 6
    ended = state.end_step()
    assert ended is not None
    counter.count = 7
    state.rewind()
    assert counter.count == 6
    (replacement,), fresh = rank(0)
    fresh.rollback(ended)
    assert replacement.count == 6


@pytest.mark.parametrize(
    "name", ["megatron.core.tensor_parallel.layers", "transformer_engine.pytorch.module.base"]
)
def test_layers_without_content_are_not_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer has the extra state of Megatron or TransformerEngine, then it is left out of the
    rank-local state. A subclass with an extra state of its own is not."""
    monkeypatch.setattr(Layer.get_extra_state, "__module__", name)
    assert state_of(nn.Sequential(Layer())).extra is None

    class Counting(Counter, Layer):
        pass

    assert state_of(nn.Sequential(Layer(), Counting(3))).extra is not None


def test_an_extra_state_that_cannot_be_kept_is_refused() -> None:
    """When an extra state cannot be moved to another process, or not be restored, then the error
    names the module."""
    wrong: Any = {1, 2}
    with pytest.raises(UsageError, match=r"module 1\.0 \(Counter\) .* cannot be kept: .*\.set"):
        state_of(nn.Linear(2, 2), nn.Sequential(Counter(wrong)))
    with pytest.raises(UsageError, match=r"module 0\.0 \(Telling\) has .* no set_extra_state"):
        state_of(nn.Sequential(Telling()))
