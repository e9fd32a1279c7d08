"""
The rank-local state of a rank: its random state, its data position, and the running statistics that
its forward pass changes in the network.

The state is captured (copied) when an update window opens and when the window closes, so a capture
must be cheap. A capture takes 10 us for MindSpore's generator and a small data position.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import xxhash

from tft.errors import MalformedMessage, UsageError
from tft.spi import pack, skip_batches, unpack
from tft.spi.generators import GLOBAL, check_names, global_states, restore_global
from tft_mindspore.memory import Array, Parameter, content, put

if TYPE_CHECKING:
    from tft_mindspore.kept_attributes import KeptAttributes

RNGS = ("mindspore", *GLOBAL)
"""The random generators whose state can be captured. MindSpore's generator is always captured. The
user must name Python's or numpy's generator if training draws from it; otherwise it is not
captured. Each capture copies the whole state of a generator."""

INLINE = 224 * 1024
"""
The largest number of bytes that the running statistics of a model may have. The statistics are
stored in the rank-local state, for which each rank has 256 KiB of shared memory. The rest of this
memory is for the random generators (5 KiB) and the user's data position. The statistics of
ResNet-50 have 208 KiB.
"""

_CHANGING = 240 * 1024
"""The largest number of bytes that the running statistics and the saved attributes of callbacks may
have together. The attributes get what the running statistics do not need."""


class RankLocalState:
    """
    Captures and restores the state of which no other rank has a copy.
    """

    def __init__(
        self,
        model: Any,  # Any: a Cell of MindSpore, which gives mypy no types
        data: Any,  # Any: the user's data object may have any class
        rngs: Sequence[str],
        callbacks: "KeptAttributes | None" = None,
    ) -> None:
        """
        Prepare to capture the running statistics of `model`, the position of `data`, and the states
        of the random generators that `rngs` names. `callbacks` saves and restores the attributes of
        the callbacks of `Model.train`.
        """
        check_names(rngs, RNGS)
        self._data = data
        self._rngs = rngs
        self._running = _running(model)
        self._settled: dict[str, bytes] = {}
        self._callbacks = callbacks
        self._closed: dict[str, object] = {}
        """The rank-local state that was captured when an update window closed last. `end_step`
        returns it with the attributes that callbacks have at the end of the step."""
        if callbacks is not None:
            size = sum(content(parameter).nbytes for parameter in self._running.values())
            callbacks.leave(_CHANGING - size)

    def capture(self, *, closing: bool) -> bytes:
        """
        Return the present rank-local state as bytes.

        Pass `closing=True` when an update window closes, because the update of a step is then
        complete. The method `rewind` restores the running statistics of the last such capture.
        """
        state: dict[str, object] = self._random()
        if self._running:
            running = {name: content(p).tobytes() for name, p in self._running.items()}
            if closing or not self._settled:
                self._settled = running
            state["running"] = running
        if self._data is not None:
            state["data"] = self._data.state_dict()
        if self._callbacks is not None:
            if closing:
                self._callbacks.note(self._data.state_dict()["step"], whole=False)
            state["callbacks"] = self._callbacks.last
        if closing:
            self._closed = state
        return pack(state)

    def end_step(self) -> bytes | None:
        """
        Return the rank-local state at the end of a step: the state that was captured when the
        update window closed, but with the attributes that the callbacks have now. Return None if
        there are no callbacks, because then nothing has changed since the window closed. Also
        return None if no window has closed yet.
        """
        if self._callbacks is None or not self._closed:
            return None
        return pack({**self._closed, "callbacks": self._callbacks.last})

    def rollback(self, local_state: bytes) -> str | None:
        """
        Restore a captured rank-local state. Return a sentence if a part of it was lost. Raises
        `MalformedMessage` if this adaptor did not capture `local_state`.
        """
        # imported here, because only training processes need MindSpore
        from mindspore import Tensor, set_rng_state

        state = unpack(local_state)
        if not isinstance(state, dict) or "mindspore" not in state:
            raise MalformedMessage(
                "the rank-local state (random generators, data position) that tft wants to restore "
                "was not captured by the adaptor mindspore"
            )
        # restore the data position before the random generators, because loading it may draw random
        # numbers
        if self._data is not None:
            self._data.load_state_dict(state["data"])
        set_rng_state(Tensor(numpy.frombuffer(state["mindspore"], numpy.uint8).copy()))
        restore_global(state)
        self._run_from(state.get("running", {}))
        if self._callbacks is None:
            return None
        return self._callbacks.rollback(state.get("callbacks"), state["data"]["step"])

    def rewind(self) -> None:
        """
        Undo the changes that an unfinished forward pass has made to the running statistics. This
        rank may have to send its state to another rank, so the state must be that of a complete
        step.
        """
        self._run_from(self._settled)

    def forget(self) -> None:
        """
        Forget the running statistics that `rewind` restores, because this rank has received other
        state. Until new statistics are captured or restored, `rewind` changes nothing.
        """
        self._settled = {}

    def skip(self, batches: int) -> None:
        """
        Make the user's data object leave out its next `batches` batches. Raises `OrderRefused` if
        the data object has no method `skip(batches)`.
        """
        skip_batches(self._data, batches)

    def digests(self) -> dict[str, str]:
        """
        Return a digest of the random state, `rng`, and of the data position, `data`.
        """
        position = None if self._data is None else self._data.state_dict()
        return {
            "rng": xxhash.xxh3_128_hexdigest(pack(self._random())),
            "data": xxhash.xxh3_128_hexdigest(pack(position)),
        }

    def generators(self) -> dict[str, str]:
        """
        Return a digest of each random generator, by name.
        """
        return {
            name: xxhash.xxh3_128_hexdigest(pack(state)) for name, state in self._random().items()
        }

    def _random(self) -> dict[str, object]:
        # imported here, because only training processes need MindSpore
        from mindspore import get_rng_state

        return {"mindspore": get_rng_state().asnumpy().tobytes(), **global_states(self._rngs)}

    def owned(self, parameters: Mapping[str, Parameter]) -> list[str]:
        """
        Return the names of those `parameters` that are running statistics. Each rank has other
        values of these parameters, so they are not compared between ranks.
        """
        own = {id(each) for each in self._running.values()}
        return [name for name, each in parameters.items() if id(each) in own]

    def _run_from(self, running: Mapping[str, bytes]) -> None:
        contents: dict[str, Array] = {}
        if not running.keys() <= self._running.keys():
            raise MalformedMessage(
                "the rank-local state to restore has running statistics of the layers "
                f"{sorted(running)}, but this model has those of {sorted(self._running)}"
            )
        for name, words in running.items():
            like = content(self._running[name])
            if len(words) != like.nbytes:
                raise MalformedMessage(
                    f"the rank-local state to restore has {len(words)} bytes for the running "
                    f"statistics {name}, but {name} of this model has {like.nbytes} bytes"
                )
            contents[name] = numpy.frombuffer(words, like.dtype).reshape(like.shape).copy()
        put(contents, self._running)
        if running:
            self._settled = dict(running)


def _running(model: Any) -> dict[str, Parameter]:  # Any: MindSpore gives mypy no types
    """
    Return the running statistics of the model's normalization layers, by name.

    Running statistics change in the forward pass, and differently on each rank. So running
    statistics belong to the rank-local state. Raises `UsageError` if they have more than `INLINE`
    bytes.
    """
    found: dict[str, Parameter] = {}
    for _, cell in model.cells_and_names():
        for name in ("moving_mean", "moving_variance"):
            parameter = getattr(cell, name, None)
            if parameter is not None and hasattr(parameter, "asnumpy"):
                found[parameter.name] = parameter
    size = sum(content(parameter).nbytes for parameter in found.values())
    if size > INLINE:
        raise UsageError(
            f"the normalization layers of the model have {size} bytes of running statistics, but "
            f"tft can keep only {INLINE} bytes of them for each rank: use layers without running "
            "statistics, such as LayerNorm or GroupNorm"
        )
    return found
