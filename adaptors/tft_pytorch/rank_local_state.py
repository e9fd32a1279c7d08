"""
Captures and restores the rank-local state. The rank-local state consists of the random state of a
rank, its data position, and the module buffers and extra states that its forward pass changes. It
also has the modes of the modules (training or evaluation) and those of their attributes that have
changed, and says which parameters have gradients at the end of a step.

The rank-local state is captured several times in each step: before the last all-reduce, when the
update window opens, and when the window closes. So a capture must cost next to nothing. A capture
takes 3 us for torch's generator and a small data position.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import c_char
from itertools import chain
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from tft.errors import MalformedMessage, UsageError
from tft.spi import pack, skip_batches, unpack
from tft.spi.generators import GLOBAL, check_names, global_states, restore_global
from tft.spi.plain_values import without_marks
from tft_pytorch.data_position import DataPosition
from tft_pytorch.device import devices_of
from tft_pytorch.extra import ExtraStates
from tft_pytorch.forward_buffers import INLINE, RunningBuffers
from tft_pytorch.gradients import Gradients
from tft_pytorch.memory import readable
from tft_pytorch.modes import Modes
from tft_pytorch.module_attributes import ModuleAttributes
from tft_pytorch.other_statistics import OtherStatistics
from tft_pytorch.tensor_metadata import byte_tensor, dtype_name
from tft_pytorch.trees import Disassembly, expect, put_together

_TREE = "tft.tree"
"""The key of an entry in a packed data position. A data position that contains tensors is packed as
a dict. Under this key the dict has the position in plain form, which refers to the tensors by
name."""

_FLAT = frozenset({int, str, type(None)})
"""Types of values for which Python's `==` suffices to compare data positions: two equal values of
one of these types are always packed to the same bytes."""

_AFTER = ("modes", "extra", "buffers", "gradients", "attributes", "epochs")
"""The keys of the values that the tail of a step may change."""

RNGS = ("torch", *GLOBAL)
"""The random generators that can be kept. torch's generator is always kept. The generators of
Python and numpy are kept only if the user names them, because every capture reads a kept generator
in full."""


class RankLocalState:
    """
    Captures and restores the rank-local state, of which no other rank has a copy.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,  # Any: the user's own data object may have any type
        rngs: Sequence[str],
    ) -> None:
        check_names(rngs, RNGS)
        self._data = None if data is None else DataPosition(data)
        self._simple = True
        """True if the data position can be packed unchanged, because the position has plain values
        only. To pack it unchanged is fast."""
        self._rngs = rngs
        self._only_torch = set(rngs) <= {"torch"}
        self._closed = b""
        """The rank-local state that was captured when the last update window closed."""
        self._left: tuple[object, ...] = (None,) * len(_AFTER)
        """The values in `_closed` that the tail of the step may change: modes, extra states,
        running buffers, the kinds of gradients, attributes of modules, and epochs of samplers."""
        self._generator = torch.default_generator
        self._devices = devices_of(_tensors(model))
        self._bytes_at = (c_char * self._generator.get_state().numel()).from_address
        self._before: dict[str, object] = {}
        """The last captured state of which no value can be changed in place. If the next state is
        equal, `_before_packed` is used again."""
        self._before_packed = b""
        """The bytes of the packed state `_before`."""
        self.running = RunningBuffers(model, lambda: self._devices.at_rest())
        self.statistics = OtherStatistics()
        self.extra = ExtraStates()
        self.modes = Modes()
        """Notes the modes of the modules (training or evaluation). Like `extra`, `modes` has no
        modules until its method `watch` is called."""
        self.attributes = ModuleAttributes()
        """Notes attributes of modules. It has no modules until its method `watch` is called."""
        self.gradients = Gradients()
        self.gradients.watch(model.parameters())

    def watch(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        others: Mapping[str, object],
    ) -> None:
        """
        Keep the rank-local state of `model` from now on: its moving buffers, its extra states, the
        modes of its modules, and the gradients of `parameters`.

        The modes of the modules among `others` are kept too. Raises `UsageError` for an extra state
        that cannot be kept or cannot be restored.
        """
        self._devices = devices_of(_tensors(model))
        self.gradients.watch(parameters)
        self.running.watch(model)
        self.statistics.watch(model, others)
        self.extra.watch(model)
        self.modes.watch(model, *(each for each in others.values() if isinstance(each, nn.Module)))

    def learn(self, model: nn.Module) -> None:
        """
        Find out on which devices the model will be and which buffers it will have. `model` is a
        trial model that the user's factory has made. The random generators of these devices are
        kept from now on.

        Raises `UsageError` if the model is on devices that tft cannot handle.
        """
        self._devices = devices_of(_tensors(model))
        self.running.learn(model)

    def let_go(self) -> None:
        """
        Drop the references to the model. The copies of the model's buffers and extra states stay.
        """
        self.gradients.watch(())
        self.running.let_go()
        self.statistics.watch(nn.Module(), {})
        self.extra.let_go()
        self.modes.watch()
        self.attributes.watch()

    def capture(self, *, closing: bool) -> bytes:
        """
        Return the present rank-local state, packed.

        Pass `closing=True` when the update window closes, which completes a step. Raises
        `UsageError` for state that cannot be kept.
        """
        state: dict[str, object] = self._random()
        modes = self.modes.noted(closing=closing)
        if modes is not None:
            state["modes"] = modes
        extra, size = self.extra.noted(closing=closing)
        if extra is not None:
            state["extra"] = extra
        attributes, more = self.attributes.noted()
        if attributes is not None:
            state["attributes"] = attributes
        buffers = self.running.copy(closing=closing, room=INLINE - size - more)
        if buffers is not None:
            state["buffers"] = buffers
        gradients = self.gradients.noted
        if gradients is not None:
            state["gradients"] = gradients
        if closing:
            self.statistics.note()
        if self.statistics.moving:
            state["statistics"] = self.statistics.moving
        epochs = self._epochs()
        if epochs is not None:
            state["epochs"] = epochs
        if self._data is not None:
            state["data"] = self._data.state_dict()
        if extra is None and buffers is None and self._only_torch:
            packed = self._packed_once(state)
        else:
            packed = self._packed(state)
        if closing:
            self._closed, self._left = (
                packed,
                (modes, extra, buffers, gradients, attributes, epochs),
            )
        return packed

    def _packed_once(self, state: dict[str, object]) -> bytes:
        """
        Return `state` packed. If the previous capture was equal, return the packed bytes of the
        previous capture again.

        The captures at the beginning and the end of an update window are usually equal. Captures
        are compared only if none of their values can be changed in place.
        """
        position = state.get("data")
        if position is None:
            kept = state
        elif type(position) is dict and _FLAT.issuperset(map(type, position.values())):
            if state == self._before:
                return self._before_packed
            # copy the data position, because the script may change its own dict
            kept = {**state, "data": position.copy()}
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
            except UsageError:  # the data position has tensors or other values that `pack` refuses
                self._simple = False
        state["data"] = _apart(position)
        return pack(state)

    def end_step(self, *, tail: bool) -> bytes | None:
        """
        Return the rank-local state at the end of a step, packed. Return None if nothing has changed
        since the update window closed.

        The result is the state that was captured when the update window closed, except for the
        modes, extra states, running buffers, gradients, attributes of modules, and epochs of
        samplers. For these values the present content is used.

        Pass `tail=True` if the loop has marked the end of the tail of the step. Pass `tail=False`
        otherwise: then the loop may still drop its gradients, so no gradient is noted.
        """
        self.statistics.note()
        extra, size = self.extra.noted(closing=True)
        attributes, more = self.attributes.noted()
        buffers = self.running.again(self._left[2], INLINE - size - more)
        gradients = self.gradients.ended() if tail else None
        modes = self.modes.noted(closing=True)
        left = (modes, extra, buffers, gradients, attributes, self._epochs())
        if left == self._left or not self._closed:
            return None
        now = dict(zip(_AFTER, left, strict=True))
        closed = expect(unpack(self._closed), dict, "rank-local state")
        rest = {name: kept for name, kept in closed.items() if name not in now}
        return pack({**rest, **{name: kept for name, kept in now.items() if kept is not None}})

    def rollback(self, local_state: bytes) -> str | None:
        """
        Restore a captured rank-local state. Gradients that the script keeps as zeros are set to
        zero. All other gradients are dropped. Return a sentence if a part of the state was lost.

        Raises `MalformedMessage` if the adaptor `pytorch` did not capture `local_state`, and
        `UsageError` if `local_state` does not have the epoch of a sampler.
        """
        state = unpack(local_state)
        if not isinstance(state, dict) or "torch" not in state:
            raise MalformedMessage(
                "the rank-local state (random generators, data position) that tft wants to restore "
                "was not captured by the adaptor pytorch"
            )
        if self._data is not None:
            # This may draw random numbers, so the random generators are restored after it.
            self._data.load_state_dict(_position(state["data"]))
            self._data.set_present(state.get("epochs"))
        self._put_random_back(state)
        with torch.no_grad():
            lost = [self.running.restore(state.get("buffers"))]
        lost.append(self.statistics.lost(state.get("statistics")))
        self.extra.put_back(state.get("extra"))
        self.modes.put_back(state.get("modes"))
        lost.append(self.attributes.put_back(state.get("attributes")))
        self.gradients.put_back(state.get("gradients"))
        return "; ".join(filter(None, lost)) or None

    def _put_random_back(self, state: Mapping[str, Any]) -> None:  # Any: unpacked from bytes
        self._generator.set_state(byte_tensor(state["torch"]))
        self._devices.restore_generators(state.get("devices", ()))
        restore_global(state)

    def set_aside(self) -> Callable[[], None]:
        """
        Save the present state of the random generators, the modes of the modules (training or
        evaluation), their extra states, and the moving buffers. Return a function that restores all
        of these.
        """
        random_state, modes = self._random(), self.modes.present()
        buffers, extra = self.running.set_aside(), self.extra.noted()[0]

        def put_back() -> None:
            self._put_random_back(random_state)
            self.modes.set(modes)
            with torch.no_grad():
                buffers()
            if self.extra.noted()[0] != extra:
                self.extra.put_back(extra)

        return put_back

    def rewind(self) -> None:
        """
        Undo the changes of buffers and extra states that an unfinished forward pass has made. The
        reason: this rank may have to give its state to another rank, and these changes must not be
        given.
        """
        self.running.rewind()
        self.extra.rewind()

    def forget(self) -> None:
        """
        Note that the state of this rank now comes from another rank or a checkpoint. Until the next
        rollback the method `rewind` does nothing.
        """
        self.running.forget()
        self.statistics.fetched()
        self.extra.forget()

    def skip(self, batches: int) -> None:
        """
        Make the user's data object leave out its next `batches` batches.

        Raises `OrderRefused` if the data object has no method `skip(batches)`.
        """
        skip_batches(None if self._data is None else self._data.source, batches)

    def digestible(self) -> dict[str, object]:
        """
        Return the values from which `digests` computes its digests: the random state `rng` and the
        data position `data`.
        """
        return {
            "rng": self._random(),
            "data": None if self._data is None else _apart(without_marks(self._data.state_dict())),
        }

    def digests(self) -> dict[str, str]:
        """
        Return a digest (XXH3-128, hexadecimal) of the random state under the name `rng`, and of the
        data position under the name `data`.
        """
        return {
            name: xxhash.xxh3_128_hexdigest(pack(content))
            for name, content in self.digestible().items()
        }

    def generators(self) -> dict[str, str]:
        """
        Return a digest (XXH3-128, hexadecimal) of each random generator, by name. The data position
        has a digest under the name `data`.
        """
        found = self._random()
        if self._data is not None:
            found["data"] = _apart(without_marks(self._data.state_dict()))
        return {name: xxhash.xxh3_128_hexdigest(pack(state)) for name, state in found.items()}

    def _epochs(self) -> object:
        return None if self._data is None else self._data.present()

    def _random(self) -> dict[str, object]:
        now = self._generator.get_state()
        # read the memory of the tensor directly, because a read through numpy takes three times as
        # long
        state: dict[str, object] = {"torch": self._bytes_at(now.data_ptr()).raw}
        on_devices = self._devices.generators()
        if on_devices:
            state["devices"] = on_devices
        if not self._only_torch:
            state |= global_states(self._rngs)
        return state


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


def _apart(position: object) -> object:
    """
    Convert a data position into plain values: each tensor in it becomes its type, shape and bytes.

    For example, torchdata's `StatefulDataLoader` keeps the state of its generator in a tensor.
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
        name: byte_tensor(content).view(getattr(torch, dtype)).view(shape)
        for name, (dtype, shape, content) in kept["tensors"].items()
    }
    return put_together(kept[_TREE], tensors)
