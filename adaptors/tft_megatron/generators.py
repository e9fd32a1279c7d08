"""
Converts the random generator states of all ranks to the form in which Megatron's own training keeps
them. The input is the rank-local state that each rank has captured. The output has one object
`rng_state` for every part of the model, with the states of its data-parallel ranks.

Also reads the number of consumed samples, which each rank has captured too.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor

from tft.spi import unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """
    A part of the model, and the ranks that have it.
    """

    pipeline: tuple[int, int]
    """The place of this part among the pipeline stages, and the number of stages."""
    tensor: tuple[int, int]
    """The same for tensor parallelism."""
    experts: int
    """The number of ranks over which experts are spread."""
    ranks: tuple[int, ...]
    """The data-parallel ranks, in their order."""


def generators(parts: Sequence[ModelPart], captured: Mapping[int, bytes]) -> dict[str, Any]:
    """
    Return the objects with the generator states, by megatron-core's unique keys. `captured` is the
    rank-local state of each rank.

    If the rank-local state of a rank is lost, the state of the first other rank of its part is
    used. The values are `Any`, in the form in which Megatron keeps them.
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
            # as Megatron does it: ranks with different experts draw different numbers
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
    them. None: the script keeps another data position.
    """
    counted: list[int | None] = [unpack(each).get("consumed") for each in captured.values()]
    return next((found for found in counted if found is not None), None)


def of_rank(local_state: bytes) -> dict[str, Any]:
    """
    Return the generator states of a rank, in Megatron's form. `local_state` is the rank-local state of
    the rank.

    Megatron needs a state for every generator, but only generators that training draws from were
    captured. For Python's and numpy's generators, the state of this process is used instead. For
    CUDA's generator, the captured state of torch's CPU generator is used. The values are `Any`:
    each generator has its own form.
    """
    told = unpack(local_state)
    kept = unpack(told["torch"])
    return {
        "random_rng_state": _python(kept.get("python")),
        "np_rng_state": _numpy(kept.get("numpy")),
        "torch_rng_state": _bytes(kept["torch"]),
        "cuda_rng_state": _bytes((kept.get("devices") or [kept["torch"]])[0]),
        "rng_tracker_states": {name: _bytes(state) for name, state in told["tracker"].items()},
    }


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _python(kept: Any) -> Any:  # Any: as Python keeps it
    if kept is None:
        return random.getstate()
    version, words, gauss = kept
    return version, tuple(words), gauss


def _numpy(kept: Any) -> Any:  # Any: as numpy keeps it
    if kept is None:
        return numpy.random.get_state()
    name, words, *rest = kept
    return (name, numpy.frombuffer(words, numpy.uint32), *rest)
