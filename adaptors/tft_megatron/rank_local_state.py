"""
Captures and restores the rank-local state of a rank, which no other rank has. This state contains
the data position and the random generators. Among the generators are those of Megatron's tracker,
which dropout uses. The state also contains the extra states of modules, and the buffers that a
forward pass changes, such as the number of tokens that each expert has received.
"""

from collections.abc import Callable
from typing import Any

import torch
import xxhash
from tft_pytorch.forward_buffers import RunningBuffers
from tft_pytorch.rank_local_state import RankLocalState as TorchRankLocalState
from tft_pytorch.tensor_metadata import byte_tensor
from tft_pytorch.trees import Plain, expect
from torch import nn

from tft.errors import MalformedMessage
from tft.spi import pack, unpack
from tft_megatron.data import Data
from tft_megatron.training import Training

_FORM = "megatron.1"

_CONSTANT = ("megatron.core.tensor_parallel.layers", "transformer_engine")
"""The beginnings of the names of Python modules whose extra states need not be kept. The linear
layers of Megatron return None. The layers of TransformerEngine return settings of their 8-bit
numbers. Settings of Megatron with which scales would be among them are refused (`fp8_recipe`)."""


class RankLocalState:
    """
    Captures and restores the state of which no other rank has a copy.
    """

    def __init__(self, training: Training) -> None:
        self._data = training.data
        model = nn.ModuleList(training.chunks)
        self._torch = TorchRankLocalState(model, training.data, training.rngs)
        self._torch.extra.watch(model, _is_constant)
        self._closed: dict[str, object] = {}
        """The rank-local state that was captured when the last update window closed."""
        self._begun = self._process_wide()
        """Digests of the states of Python's and numpy's generators when training began in the first
        process of this rank, by name. A generator that still has this digest has not been used, so
        `digestible` leaves it out."""

    @property
    def running(self) -> RunningBuffers:
        """
        Return the buffers that a forward pass changes.
        """
        return self._torch.running

    @property
    def extra(self) -> Plain:
        """
        Return the extra states of modules as plain values, or None if no module has one.
        """
        noted: Plain = self._torch.extra.noted()[0]
        return noted

    def capture(self, *, closing: bool) -> bytes:
        """
        Return the present rank-local state as bytes. Pass `closing=True` when an update window
        closes.
        """
        state: dict[str, object] = {
            "form": _FORM,
            "torch": self._torch.capture(closing=closing),
            "begun": self._begun,
            **self._own(),
        }
        if isinstance(self._data, Data):
            state["consumed"] = self._data.consumed
        if closing:
            self._closed = state
        return pack(state)

    def end_step(self) -> bytes | None:
        """
        Return the rank-local state at the end of a step, with the extra states and buffers that the
        tail of the step has changed. Return None if it has changed none.
        """
        ended = self._torch.end_step(tail=False)  # no gradients, because a rollback drops them all
        return None if ended is None else pack({**self._closed, "torch": ended})

    def rewind(self) -> None:
        """
        Undo the changes of buffers and extra states that an unfinished step has made.
        """
        self._torch.rewind()

    def forget(self) -> None:
        """
        Note that the state of this rank now comes from another rank or a checkpoint. Until the next
        rollback the method `rewind` does nothing.
        """
        self._torch.forget()

    def rollback(self, local_state: bytes) -> str | None:
        """
        Restore a captured rank-local state. Return a sentence if a part of it was lost. Raises
        `MalformedMessage` if this adaptor did not capture `local_state`.
        """
        state = unpack(local_state)
        if not isinstance(state, dict) or state.get("form") != _FORM:
            raise MalformedMessage(
                "the rank-local state (random generators, data position) that tft wants to restore "
                "was not captured by the adaptor megatron"
            )
        lost = self._torch.rollback(state["torch"])
        self._begun = state.get("begun", {})
        tracker = _tracker()
        present = tracker.get_states()
        tracker.set_states(
            {name: _as(present.get(name), kept) for name, kept in state["tracker"].items()}
        )
        return lost

    def set_aside(self, training: Training) -> Callable[[], None]:
        """
        Save the present state of the random generators, the modes of the modules, and the buffers
        that the forward pass changes. Return a function that restores them.
        """
        put_torch_back, tracked = self._torch.set_aside(), self._own()["tracker"]
        modes = [(m, m.training) for chunk in training.chunks for m in chunk.modules()]

        def put_back() -> None:
            put_torch_back()
            tracker = _tracker()
            present = tracker.get_states()
            tracker.set_states({name: _as(present.get(name), k) for name, k in tracked.items()})
            for module, mode in modes:
                module.training = mode

        return put_back

    def skip(self, batches: int) -> None:
        """
        Make the user's data object leave out its next `batches` batches.
        """
        self._torch.skip(batches)

    def digestible(self) -> dict[str, object]:
        """
        Return the values from which the digests named `rng` and `data` are computed. `rng` has the
        states of the random generators, and `data` has the data position.

        A generator of Python or numpy is left out if nothing was drawn from it since training
        began. The script need not seed such a generator, so its state may differ between two jobs
        that train exactly alike.
        """
        found = self._torch.digestible()
        same = {n for n, digest in self._process_wide().items() if self._begun.get(n) == digest}
        rng = expect(found["rng"], dict, "states of the random generators")
        drawn = {name: state for name, state in rng.items() if name not in same}
        return {"rng": [drawn, self._own()], "data": found["data"]}

    def generators(self) -> dict[str, str]:
        """
        Return a digest of each random generator, by name. The generators of Megatron's tracker have
        the names that Megatron gives them.
        """
        tracked = {name: _bytes(kept) for name, kept in _tracker().get_states().items()}
        return {
            **self._torch.generators(),
            **{name: xxhash.xxh3_128_hexdigest(kept) for name, kept in tracked.items()},
        }

    def _process_wide(self) -> dict[str, str]:
        found = self._torch.generators()
        return {name: found[name] for name in ("python", "numpy") if name in found}

    def _own(self) -> dict[str, dict[str, bytes]]:
        return {
            "tracker": {name: _bytes(kept) for name, kept in _tracker().get_states().items()},
        }


def _is_constant(module: nn.Module) -> bool:
    """
    Return whether the extra state of `module` has nothing that changes while the module is trained.
    """
    return type(module).get_extra_state.__module__.startswith(_CONSTANT)


def _tracker() -> Any:  # Any: an object of Megatron, which gives mypy no types
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _bytes(kept: Any) -> bytes:  # Any: a tensor, or a torch.Generator if CUDA graphs are used
    state = kept.get_state() if isinstance(kept, torch.Generator) else kept
    found: bytes = state.numpy().tobytes()
    return found


# Any: a tensor, or a torch.Generator if CUDA graphs are used
def _as(present: Any, kept: bytes) -> Any:
    state = byte_tensor(kept)
    if isinstance(present, torch.Generator):
        present.set_state(state)
        return present
    return state
