"""
Converts the random generator states of all ranks to the form in which Megatron's training program
stores them in a checkpoint. The input is the rank-local state of each rank. The output has, for
every part of the model, one object `rng_state` with the states of all data-parallel ranks that have
this part.

This module also reads the number of consumed samples from the rank-local state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from tft_pytorch.tensor_metadata import byte_tensor

from tft.spi import unpack
from tft.spi.generators import global_states, numpy_state, python_state


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """
    A part of the model, such as a pipeline stage, and the ranks that have this part.
    """

    pipeline: tuple[int, int]
    """The index of the pipeline stage of this part, and the number of stages."""
    tensor: tuple[int, int]
    """The tensor-parallel index of this part, and the tensor-parallel size."""
    experts: int
    """The expert-parallel size: the number of ranks over which the experts are spread."""
    ranks: tuple[int, ...]
    """The ranks that hold this part of the model, in the order of their data-parallel index."""


def generators(parts: Sequence[ModelPart], captured: Mapping[int, bytes]) -> dict[str, Any]:
    """
    Return the objects with the generator states, by the keys under which megatron-core stores them.
    `captured` has the rank-local state of each rank.

    If the rank-local state of a rank is lost, the object has the state of another rank in its
    place: the first rank of the same part whose state is known. (`Any`: the values have the form in
    which Megatron stores them.)
    """
    found: dict[str, Any] = {}
    for part in parts:
        known = {rank: of_rank(captured[rank]) for rank in part.ranks if rank in captured}
        if not known:
            continue
        first = next(iter(known.values()))
        states = [known.get(rank, first) for rank in part.ranks]
        (stage, stages), (slice_, slices) = part.pipeline, part.tensor
        if part.experts > 1:
            # As in Megatron, each rank gets its own object `rng_state`, because ranks with
            # different experts draw different random numbers.
            for place, state in enumerate(states):
                shape, at = (stages, slices, len(states)), (stage, slice_, place)
                one = ShardedObject("rng_state", [state], shape, at)
                found[one.unique_key] = [one.data]
        else:
            one = ShardedObject("rng_state", states, (stages, slices), (stage, slice_))
            found[one.unique_key] = [one.data]
    return found


def consumed(captured: Mapping[int, bytes]) -> int | None:
    """
    Return the number of samples that the whole job has consumed, as `tft_megatron.Data` counts
    them. Return None if the script uses another object for its data position.
    """
    counted: list[int | None] = [unpack(each).get("consumed") for each in captured.values()]
    return next((found for found in counted if found is not None), None)


def of_rank(local_state: bytes) -> dict[str, Any]:
    """
    Return the generator states of a rank, in the form in which Megatron stores them. `local_state`
    is the rank-local state of the rank.

    Megatron needs a state for every generator, but the rank-local state has only the generators
    that training draws from. For a missing generator of Python or numpy, the result has the present
    state of that generator in this process. For a missing CUDA generator, the result has the state
    of torch's CPU generator. (`Any`: each generator has a state of another type.)
    """
    told = unpack(local_state)
    kept = {**global_states(), **unpack(told["torch"])}
    return {
        "random_rng_state": python_state(kept["python"]),
        "np_rng_state": numpy_state(kept["numpy"]),
        "torch_rng_state": byte_tensor(kept["torch"]),
        "cuda_rng_state": byte_tensor((kept.get("devices") or [kept["torch"]])[0]),
        "rng_tracker_states": {name: byte_tensor(state) for name, state in told["tracker"].items()},
    }
