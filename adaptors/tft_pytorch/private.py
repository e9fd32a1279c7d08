"""
The private state of a rank: its random state, its data position, what its forward pass changes in
the model, and the modes of its modules. Captured at both edges of every update window, so it must cost next to
nothing: 3 us for torch's generator and a small position.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor, nn

from tft.errors import MalformedMessage, OrderRefused, UsageError
from tft.protocol.codec import pack, unpack
from tft_pytorch.described import dtype_name
from tft_pytorch.extra import ExtraStates
from tft_pytorch.gradients import Gradients
from tft_pytorch.memory import readable
from tft_pytorch.modes import Modes
from tft_pytorch.running import INLINE, RunningBuffers
from tft_pytorch.trees import Disassembly, expect, put_together

_TREE = "tft.tree"
"""The key under which a position that was taken apart is kept."""

_FLAT = frozenset({int, str, type(None)})
"""Types of the values of a position that are equal only where they are packed alike."""

RNGS = ("torch", "python", "numpy")
"""The generators that can be kept. torch's always is; the others are read in full at every edge,
8 us and 26 us a time, and are kept when the user says that training draws from them."""


class Private:
    """
    Captures and puts back what no other rank has a copy of.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,  # Any: the user's own object
        rngs: Sequence[str],
    ) -> None:
        unknown = set(rngs) - set(RNGS)
        if unknown:
            raise UsageError(f"rng may name {', '.join(RNGS)}; {', '.join(unknown)} is not known")
        self._model = model
        self._data = data
        self._simple = True
        """The data's position can be packed as it is, which is quick."""
        self._rngs = rngs
        self._only_torch = set(rngs) <= {"torch"}
        self._closed = b""
        """As it was captured when the last window closed."""
        self._left: tuple[object, ...] = (None, None, None, None)
        """What stood in it that the tail of the step may change: modes, extra states, running buffers, and which
        gradients are kept."""
        self._generator = torch.default_generator
        self._bytes_at = (c_char * self._generator.get_state().numel()).from_address
        self._before: dict[str, object] = {}
        """The last capture whose values cannot be changed in place,"""
        self._before_packed = b""
        """and the same packed."""
        self.running = RunningBuffers(model)
        self.extra = ExtraStates()
        self.modes = Modes()
        """These two of no module, before they are told which."""
        self.gradients = Gradients()
        self.gradients.watch(model.parameters())

    def capture(self, *, closing: bool) -> bytes:
        """
        The present private state.
        """
        state: dict[str, object] = self._random()
        modes = self.modes.noted(closing=closing)
        if modes is not None:
            state["modes"] = modes
        extra, size = self.extra.noted(closing=closing)
        if extra is not None:
            state["extra"] = extra
        buffers = self.running.copy(closing=closing, room=INLINE - size)
        if buffers is not None:
            state["buffers"] = buffers
        gradients = self.gradients.noted
        if gradients is not None:
            state["gradients"] = gradients
        if self._data is not None:
            state["data"] = self._data.state_dict()
        if extra is None and buffers is None and self._only_torch:
            packed = self._packed_once(state)
        else:
            packed = self._packed(state)
        if closing:
            self._closed, self._left = packed, (modes, extra, buffers, gradients)
        return packed

    def _packed_once(self, state: dict[str, object]) -> bytes:
        """
        Packed, or what the capture before was packed to where this one is the same, as it is at the edges of most
        windows. Only where no value can be changed in place.
        """
        position = state.get("data")
        if position is None:
            kept = state
        elif type(position) is dict and _FLAT.issuperset(map(type, position.values())):
            if state == self._before:
                return self._before_packed
            kept = {**state, "data": position.copy()}  # the script may go on changing its own
        else:
            return self._packed(state)
        self._before, self._before_packed = kept, self._packed(state)
        return self._before_packed

    def _packed(self, state: dict[str, object]) -> bytes:
        if self._data is None:
            return pack(state)
        position = state["data"]
        if self._simple:
            try:
                return pack(state)
            except UsageError:  # it holds tensors, or what cannot be kept at all
                self._simple = False
        state["data"] = _apart(position)
        return pack(state)

    def end_step(self, *, tail: bool) -> bytes | None:
        """
        The step has ended. What was captured as its window closed, with modes, extra states, running buffers and what is
        left of gradients as they are now; None where these are what they were. With `tail` the loop has said that it has
        ended: else what it makes of its gradients is still to come.
        """
        extra, size = self.extra.noted(closing=True)
        buffers = self.running.again(self._left[2], INLINE - size)
        gradients = self.gradients.ended() if tail else None
        left = (self.modes.noted(closing=True), extra, buffers, gradients)
        if left == self._left or not self._closed:
            return None
        now = dict(zip(("modes", "extra", "buffers", "gradients"), left, strict=True))
        closed = expect(unpack(self._closed), dict, "private state")
        rest = {name: kept for name, kept in closed.items() if name not in now}
        return pack({**rest, **{name: kept for name, kept in now.items() if kept is not None}})

    def rollback(self, private: bytes) -> None:
        """
        Back to what was captured; of gradients are left zeros where the script keeps them, and else none.
        """
        state = unpack(private)
        if not isinstance(state, dict) or "torch" not in state:
            raise MalformedMessage("private state that the adaptor pytorch did not capture")
        if self._data is not None:
            self._data.load_state_dict(_position(state["data"]))
            # a StatefulDataLoader makes its iterator now, and draws for it: the generators are put back later
            self._data.state_dict()
        self._put_random_back(state)
        with torch.no_grad():
            self.running.restore(state.get("buffers"))
        self.extra.put_back(state.get("extra"))
        self.modes.put_back(state.get("modes"))
        self.gradients.put_back(state.get("gradients"))

    def _put_random_back(self, state: Mapping[str, Any]) -> None:  # Any: as `_random` has it
        self._generator.set_state(_byte_tensor(state["torch"]))
        if "cuda" in state:
            torch.cuda.set_rng_state(_byte_tensor(state["cuda"]))
        if "python" in state:
            version, words, gauss = state["python"]
            random.setstate((version, tuple(words), gauss))
        if "numpy" in state:
            name, words, *rest = state["numpy"]
            numpy.random.set_state((name, numpy.frombuffer(words, numpy.uint32), *rest))

    def set_aside(self) -> Callable[[], None]:
        """
        What puts generators and modes back to what they are now.
        """
        random_state, modes = self._random(), self.modes.present()

        def put_back() -> None:
            self._put_random_back(random_state)
            self.modes.set(modes)

        return put_back

    def rewind(self) -> None:
        """
        What a half-done forward pass has changed is put back: this rank may have to give its state away.
        """
        self.running.rewind()
        self.extra.rewind()

    def forget(self) -> None:
        """
        The state now held came from elsewhere.
        """
        self.running.forget()
        self.extra.forget()

    def skip(self, batches: int) -> None:
        """
        Have the user's data leave out what it would give next.
        """
        if not hasattr(self._data, "skip"):
            raise OrderRefused(
                f"no batch can be left out: data is a {type(self._data).__name__}, which has no "
                "skip(batches)"
            )
        self._data.skip(batches)

    def digestible(self) -> dict[str, object]:
        """
        What the digests `rng` and `data` are of.
        """
        return {
            "rng": self._random(),
            "data": None if self._data is None else _apart(self._data.state_dict()),
        }

    def digests(self) -> dict[str, str]:
        """
        Of `rng` and `data`.
        """
        return {
            name: xxhash.xxh3_128_hexdigest(pack(content))
            for name, content in self.digestible().items()
        }

    def generators(self) -> dict[str, str]:
        """
        A digest of each generator, by name.
        """
        return {
            name: xxhash.xxh3_128_hexdigest(pack(state)) for name, state in self._random().items()
        }

    def _random(self) -> dict[str, object]:
        now = self._generator.get_state()
        # through numpy it would take three times as long
        state: dict[str, object] = {"torch": self._bytes_at(now.data_ptr()).raw}
        # asking a generator would initialise CUDA
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types here
            state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
        if "python" in self._rngs:
            state["python"] = random.getstate()
        if "numpy" in self._rngs:
            name, words, *rest = numpy.random.get_state(legacy=True)
            state["numpy"] = [name, numpy.asarray(words).tobytes(), *rest]
        return state


def _apart(position: object) -> object:
    """
    A data position with tensors in it, such as that of torchdata's StatefulDataLoader, which has its
    generator's state in one.
    """
    kept = Disassembly()
    tree = kept.take_apart(position, "data")
    tensors = {
        name: [dtype_name(tensor.dtype), list(tensor.shape), bytes(readable(name, tensor).view)]
        for name, tensor in kept.tensors.items()
    }
    return {_TREE: tree, "tensors": tensors}


def _position(kept: object) -> object:
    if not isinstance(kept, dict) or _TREE not in kept:
        return kept
    tensors = {
        name: _byte_tensor(content).view(getattr(torch, dtype)).view(shape)
        for name, (dtype, shape, content) in kept["tensors"].items()
    }
    return put_together(kept[_TREE], tensors)


def _byte_tensor(content: bytes) -> Tensor:
    if not content:  # which frombuffer refuses
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
