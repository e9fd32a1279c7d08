"""
The hooks of the adaptor, as the entry point names them. `tft.spi.AdaptorSpecs` specifies each.

A process has one training state and one group.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from toynet import Broken, Rendezvous, group, rendezvous

from tft.errors import UsageError
from tft.spi import Buffer, FaultKind, ShardCopies, ShardPayload, hookimpl
from tft_numpy.state import SHARD, State

_state: State | None = None


def _contributing() -> None:
    """
    Do nothing. `tft_watch` replaces this function.
    """


def _adopted() -> State:
    if _state is None:
        raise UsageError("there is no training state yet: call session.adopt first")
    return _state


# ---------------------------------------------------------------- the process


@hookimpl
def tft_strategies() -> Sequence[str]:
    return ("retry", "recover", "dump")


@hookimpl
def tft_preload() -> None:
    return None  # to import this module is to import numpy, and nothing is imported later


@hookimpl
def tft_store(host: str, port: int, opened: Callable[[int], None]) -> None:
    with Rendezvous(host, port) as server:
        opened(server.server_address[1])
        server.serve_forever()


# ---------------------------------------------------------------- the state


@hookimpl
def tft_watch(contributing: Callable[[], None]) -> None:
    global _contributing
    _contributing = contributing


@hookimpl
def tft_adopt(
    parts: Mapping[str, Any],  # Any: the script's own objects
    wrap: Callable[[], Any] | None,
) -> None:
    global _state
    _state = State(parts, wrap)


@hookimpl
def tft_shards(rank: int, world: int) -> Sequence[ShardCopies]:
    return (ShardCopies(shard=SHARD, ranks=tuple(range(world))),)


@hookimpl
def tft_capture() -> bytes:
    return _adopted().capture()


@hookimpl
def tft_rollback(local_state: bytes) -> None:
    _adopted().rollback(local_state)


@hookimpl
def tft_give(shard: str) -> ShardPayload:
    return _adopted().give()


@hookimpl
def tft_take(shard: str, meta: bytes) -> Sequence[Buffer]:
    return _adopted().take(meta)


@hookimpl
def tft_taken(shard: str, meta: bytes) -> None:
    return None  # the bytes were written into the arrays themselves


@hookimpl
def tft_digests() -> Mapping[str, str]:
    return _adopted().digests()


@hookimpl
def tft_generators() -> Mapping[str, str]:
    return _adopted().generators()


# ---------------------------------------------------------------- the group


@hookimpl
def tft_regroup(name: str, host: str, port: int, rank: int, world: int) -> None:
    group.join(name, host, port, rank, world)


@hookimpl
def tft_rebuild() -> Any:  # Any: the script's own wrapper
    joined = group.current()
    if joined is None:
        raise Broken("there is no group")
    joined.before = _contributing
    return _adopted().wrapper()


@hookimpl
def tft_quiesce() -> None:
    joined = group.current()
    if joined is not None:
        joined.abort()


@hookimpl
def tft_waiting(frame: FrameType) -> bool:
    return frame.f_code.co_filename in (group.__file__, rendezvous.__file__)


@hookimpl
def tft_clear() -> None:
    group.leave()


@hookimpl
def tft_classify(error: BaseException) -> FaultKind | None:
    return "network" if isinstance(error, Broken) else None


# ---------------------------------------------------------------- checkpoints


@hookimpl
def tft_save(directory: Path) -> Sequence[str]:
    return tft_stage()(directory)


@hookimpl
def tft_stage() -> Callable[[Path], Sequence[str]]:
    return _adopted().stage()


@hookimpl
def tft_load(directory: Path) -> None:
    _adopted().load(directory)
