"""
Tests of the generator states that are kept, and of those in a checkpoint, in the form in which
Megatron's own training reads them for all ranks.
"""

import inspect
import random

import numpy
import torch
from tft_megatron import enable
from tft_megatron.generators import ModelPart, consumed, generators
from tft_megatron.rank_local_state import RankLocalState
from tft_megatron.training import Training
from torch import nn

from tft.protocol.codec import pack


def captured(rank: int, data: object = None, **more: object) -> bytes:
    """
    Return rank-local state in the adaptor's packed form, with generator states unique to this rank.
    """
    drawn = {"torch": bytes([rank]), "data": data}
    tracker = {"dropout": bytes([rank])}
    return pack({"form": "megatron.1", "torch": pack(drawn), "tracker": tracker, **more})


def part(*ranks: int, stage: int = 0, experts: int = 1) -> ModelPart:
    """
    Return the place of `ranks` in a job of two pipeline stages.
    """
    return ModelPart(pipeline=(stage, 2), tensor=(0, 1), experts=experts, ranks=ranks)


def test_each_pipeline_stage_has_the_generator_states_of_its_ranks() -> None:
    """When each of two pipeline stages has two ranks, then each stage has a list of two states, in
    the order of the ranks. Another rank's state stands in for a lost one, and a stage without any
    state is left out."""
    local_state = {rank: captured(rank) for rank in (0, 2, 3)}
    found = generators([part(0, 1), part(2, 3, stage=1), part(8, 9, stage=1)], local_state)
    assert {
        key: [int(state["torch_rng_state"]) for state in states] for key, [states] in found.items()
    } == {"rng_state/shard_0.0_2.1": [0, 0], "rng_state/shard_1.0_2.1": [2, 3]}
    [[first, _]] = found["rng_state/shard_0.0_2.1"]
    assert torch.equal(first["rng_tracker_states"]["dropout"], torch.tensor([0], dtype=torch.uint8))


def test_ranks_with_different_experts_have_one_object_each() -> None:
    """When experts are spread over ranks, then there is one object for each data-parallel rank."""
    found = generators([part(0, 1, experts=2)], {rank: captured(rank) for rank in (0, 1)})
    assert [int(state["torch_rng_state"]) for [[state]] in found.values()] == [0, 1]
    assert list(found) == ["rng_state/shard_0.0.0_2.1.2", "rng_state/shard_0.0.1_2.1.2"]


def test_the_sample_count_is_that_of_megatrons_data() -> None:
    """When the data position is that of `tft_megatron.Data`, then the count is Megatron's. For any
    other data there is no count, whatever names it uses."""
    assert consumed({1: captured(1, consumed=48), 0: captured(0)}) == 48
    assert consumed({0: captured(0, data={"consumed": 3}), 1: captured(1, data=None)}) is None


def test_the_generators_of_torch_python_and_numpy_are_kept_by_default() -> None:
    """When a script says nothing about generators and goes back to an earlier state, then all three
    draw the same numbers again."""

    def drawn() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    names = ("torch", "python", "numpy")
    training = Training(chunks=(nn.Linear(2, 2),), optimizer=None, scheduler=None, data=None)
    state = RankLocalState(training)
    captured = state.capture(closing=True)
    first = drawn()
    assert drawn() != first
    state.rollback(captured)
    assert drawn() == first
    assert training.rngs == inspect.signature(enable).parameters["rng"].default == names


def test_a_generator_without_a_seed_counts_only_when_a_script_draws_from_it() -> None:
    """When two jobs have another state of numpy's generator, then their digests are equal until one
    of them draws from it, also in a replacement process."""
    training = Training(chunks=(nn.Linear(2, 2),), optimizer=None, scheduler=None, data=None)
    numpy.random.seed(1)
    state = RankLocalState(training)
    captured, digests = state.capture(closing=True), pack(state.digestible())
    numpy.random.seed(2)
    other = RankLocalState(training)
    assert pack(other.digestible()) == digests
    other.rollback(captured)
    assert pack(other.digestible()) == digests
    numpy.random.rand()
    assert pack(other.digestible()) != digests
