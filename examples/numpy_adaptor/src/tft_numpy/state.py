"""
The training state of this process: arrays of which every rank has a copy, and rank-local state.
"""

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray
from toynet import Arrays, Momentum, Network

from tft.errors import CheckpointCorrupt, OrderRefused, UsageError
from tft.spi import Buffer, ShardPayload

SHARD = "dense"
"""The only shard: parameters and velocities. Every rank holds a copy."""


class Data(Protocol):
    """
    The interface of the object that a script passes as `data`.
    """

    def state_dict(self) -> dict[str, Any]:  # Any: whatever JSON can carry
        """Return the position."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Set the position.
        """


class State:
    """
    The objects that a script has passed to `session.adopt`. Use it on the training thread. `give`
    may be called on any thread while the training thread is outside the loop.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],  # Any: the script's own objects, checked here
        wrap: Callable[[], Any] | None,
    ) -> None:
        """
        Raises `UsageError` for objects that this adaptor cannot handle.
        """
        network, optimizer = parts.get("model"), parts.get("optimizer")
        if not isinstance(network, Network) or not isinstance(optimizer, Momentum):
            raise UsageError(
                "the adaptor numpy needs a toynet.Network as `model` and a toynet.Momentum as "
                f"`optimizer`, not {type(network).__name__} and {type(optimizer).__name__}"
            )
        if unknown := sorted(set(parts) - {"model", "optimizer", "data"}):
            raise UsageError(f"the adaptor numpy does not know what to do with {unknown[0]!r}")
        self._network = network
        self._optimizer = optimizer
        self._data: Data | None = parts.get("data")
        self._wrap = wrap
        for name, array in self._arrays().items():
            if not array.flags.c_contiguous:
                raise UsageError(f"{name} is not contiguous: only such arrays can be moved")

    def wrapper(self) -> Any:  # Any: the script's own
        """
        Build the object that the loop gets as `session.model`.
        """
        return self._network if self._wrap is None else self._wrap()

    # ---------------------------------------------------------------- rank-local state

    def capture(self) -> bytes:
        """
        Return the random generator and the data position.
        """
        generator = self._network.generator.bit_generator.state
        position = None if self._data is None else self._data.state_dict()
        # JSON: the state of the generator has numbers of 128 bits
        return json.dumps({"generator": generator, "data": position}).encode()

    def rollback(self, local_state: bytes) -> None:
        """
        Restore the state that `capture` returned.
        """
        before = json.loads(local_state)
        self._network.generator.bit_generator.state = before["generator"]
        if self._data is not None:
            self._data.load_state_dict(before["data"])

    # ---------------------------------------------------------------- replicated state

    def give(self) -> ShardPayload:
        """
        Return the shard: a description of the arrays, and their memory without a copy.
        """
        arrays = self._arrays()
        return ShardPayload(meta=_described(arrays), buffers=_buffers(arrays))

    def take(self, meta: bytes) -> Sequence[Buffer]:
        """
        Return the memory of the arrays, into which the received shard is written. Raises
        `OrderRefused` if the sender has other arrays.
        """
        arrays = self._arrays()
        if meta != _described(arrays):
            raise OrderRefused(
                "the received arrays have other names, types or shapes than those of this rank"
            )
        return _buffers(arrays)

    def _arrays(self) -> Arrays:
        # A name up to its first point is a part: where copies differ, tft says in which part.
        parameters, velocity = self._optimizer.parameters, self._optimizer.velocity
        return {
            **{f"parameters.{name}": array for name, array in parameters.items()},
            **{f"velocity.{name}": array for name, array in velocity.items()},
        }

    # ---------------------------------------------------------------- checkpoints

    def stage(self) -> Callable[[Path], Sequence[str]]:
        """
        Copy the shard, and return a function that writes the copy under a directory.
        """
        content = io.BytesIO()
        # mypy takes `**` for the other arguments of `savez`, too
        np.savez(content, **self._arrays())  # type: ignore[arg-type]

        def write(directory: Path) -> Sequence[str]:
            path = directory / f"{SHARD}.npz"
            with path.open("wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            return (path.name,)

        return write

    def load(self, directory: Path) -> None:
        """
        Read the files that `stage` has written. Raises `CheckpointCorrupt` if they contain other
        arrays.
        """
        path = directory / f"{SHARD}.npz"
        arrays = self._arrays()
        with np.load(path, allow_pickle=False) as saved:
            found: Arrays = {name: saved[name] for name in saved.files}
        if _described(found) != _described(arrays):
            raise CheckpointCorrupt(f"{path} has arrays of other names, types or shapes")
        for name, array in arrays.items():
            array[:] = found[name]

    # ---------------------------------------------------------------- digests

    def digests(self) -> dict[str, str]:
        """
        Return digests of the whole state. Equal digests mean equal bits.
        """
        local_state = json.loads(self.capture())
        return {
            "parameters": _digest(self._optimizer.parameters),
            "optimizer": _digest(self._optimizer.velocity),
            "rng": self.generators()["network"],
            "data": xxhash.xxh3_128_hexdigest(json.dumps(local_state["data"]).encode()),
        }

    def generators(self) -> dict[str, str]:
        """
        Return a digest of the random generator.
        """
        state = self._network.generator.bit_generator.state
        return {"network": xxhash.xxh3_128_hexdigest(json.dumps(state).encode())}


def _described(arrays: Arrays) -> bytes:
    return json.dumps([[name, a.dtype.str, a.shape] for name, a in arrays.items()]).encode()


def _buffers(arrays: Arrays) -> tuple[Buffer, ...]:
    return tuple(Buffer(name=name, view=_memory(array)) for name, array in arrays.items())


def _memory(array: NDArray[np.float64]) -> memoryview:
    return array.data.cast("B")


def _digest(arrays: Arrays) -> str:
    digest = xxhash.xxh3_128()
    for array in arrays.values():
        digest.update(_memory(array))
    return digest.hexdigest()
