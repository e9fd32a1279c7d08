"""
Ready-made hooks for an adaptor that keeps the training state of this process in one object, and the
methods that such an object must have (`TrainingState`).

Each hook only calls a method of that object: `tft_shards` calls `shards`, and so on.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from tft.errors import OrderRefused, UsageError
from tft.protocol.messages import ShardCopies
from tft.spi.digests import digest_parts
from tft.spi.markers import hookimpl
from tft.spi.types import Buffer, ShardPayload

_NONE: Mapping[str, bool] = MappingProxyType({})


def part_digests(payload: ShardPayload, own: Mapping[str, bool] = _NONE) -> dict[str, str]:
    """
    Return the digest of each part of a shard (XXH3-128, hexadecimal), by the part's name. Ranks
    compare these digests to find copies of the shard that differ.

    The part `description` consists of `payload.meta`. Buffers form one part if their names are
    equal up to the first dot. A buffer whose name is a key of `own` is a part by itself. If the
    value of this key is True, the digest is an empty string, because the content of the buffer
    belongs to this rank alone.
    """
    found = digest_parts(
        {"description": payload.meta},
        (
            (each.name if each.name in own else each.name.partition(".")[0], each)
            for each in payload.buffers
        ),
    )
    return {part: "" if own.get(part) else digest for part, digest in found.items()}


def check_parts(parts: Iterable[str], known: Collection[str], adaptor: str) -> None:
    """
    Check the names of the `parts` that the script has given to `session.adopt`. Raises `UsageError`
    if one of them is not in `known`, the names that the adaptor called `adaptor` accepts.
    """
    unknown = sorted(set(parts).difference(known))
    if unknown:
        raise UsageError(
            f"session.adopt was given {', '.join(unknown)}; the adaptor {adaptor} takes "
            f"{', '.join(sorted(known))}"
        )


def skip_batches(data: Any, batches: int) -> None:  # Any: the user's data object has any class
    """
    Make the user's data object leave out its next `batches` batches. Raises `OrderRefused` if the
    object has no method `skip(batches)`.
    """
    if not hasattr(data, "skip"):
        raise OrderRefused(
            "a batch that causes faults cannot be left out: the object data is a "
            f"{type(data).__name__}, which has no method skip(batches)"
        )
    data.skip(batches)


def is_position_of_loop(data: object) -> bool:
    """
    Return True if `data` of `session.adopt` is the position of a framework's training loop. Its class
    says so by an attribute `tft_position_of_loop`. Such a position moves in the tail of a step
    although no batch is taken there, and the package that has made it keeps the attributes of
    modules itself.
    """
    return bool(getattr(data, "tft_position_of_loop", False))


class TrainingState(Protocol):
    """
    The methods of an object that holds the training state of a process.

    Each method implements one hook: the method `shards` implements the hook `tft_shards`, and so
    on. `AdaptorSpecs` in `tft.spi.adaptor` specifies these hooks.
    """

    def shards(self, rank: int, world: int) -> Sequence[ShardCopies]: ...

    def capture(self, *, closing: bool) -> bytes: ...

    def rollback(self, local_state: bytes) -> str | None: ...

    def skip(self, batches: int) -> None: ...

    def give(self, shard: str) -> ShardPayload: ...

    def take(self, shard: str, meta: bytes) -> Sequence[Buffer]: ...

    def taken(self, shard: str, meta: bytes) -> None: ...

    def compare(self, shard: str) -> Mapping[str, str]: ...

    def generators(self) -> Mapping[str, str]: ...

    def digests(self) -> Mapping[str, str]: ...

    def clear(self) -> None: ...

    def rebuild(self) -> Any: ...  # Any: the framework's wrapper can have any class


State = TypeVar("State", bound=TrainingState)


class StateHooks(Generic[State]):
    """
    Hooks that call the methods of a `TrainingState`.

    An adaptor's module assigns the hooks that it wants to use: `tft_shards = hooks.tft_shards`.
    """

    def __init__(self, hands_over: str = "session.adopt") -> None:
        """
        Create the hooks, without a training state.

        `hands_over` names the call with which a script gives its training state to tft. Error
        messages show this name.
        """
        self._hands_over = hands_over
        self.adopted: State | None = None
        """The training state. It is None until the adaptor's own `tft_adopt` sets it."""

    def state(self) -> State:
        """
        Return the training state. Raises `UsageError` if the script has not given its training
        state to tft.
        """
        if self.adopted is None:
            raise UsageError(f"there is no training state yet: call {self._hands_over} first")
        return self.adopted

    @hookimpl
    def tft_shards(self, rank: int, world: int) -> Sequence[ShardCopies]:
        return self.state().shards(rank, world)

    @hookimpl
    def tft_capture(self, closing: bool) -> bytes:
        return self.state().capture(closing=closing)

    @hookimpl
    def tft_rollback(self, local_state: bytes) -> str | None:
        return self.state().rollback(local_state)

    @hookimpl
    def tft_skip(self, batches: int) -> None:
        self.state().skip(batches)

    @hookimpl
    def tft_give(self, shard: str) -> ShardPayload:
        return self.state().give(shard)

    @hookimpl
    def tft_take(self, shard: str, meta: bytes) -> Sequence[Buffer]:
        return self.state().take(shard, meta)

    @hookimpl
    def tft_taken(self, shard: str, meta: bytes) -> None:
        self.state().taken(shard, meta)

    @hookimpl
    def tft_compare(self, shard: str) -> Mapping[str, str]:
        return self.state().compare(shard)

    @hookimpl
    def tft_generators(self) -> Mapping[str, str]:
        return self.state().generators()

    @hookimpl
    def tft_digests(self) -> Mapping[str, str]:
        return self.state().digests()

    @hookimpl
    def tft_rebuild(self) -> Any:  # Any: the framework's wrapper can have any class
        return self.state().rebuild()
