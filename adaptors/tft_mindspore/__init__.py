"""
The adaptor for MindSpore: data-parallel training in PyNative mode, and whatever the user says is held by
whom.

Each hook of `tft.hooks.AdaptorSpecs` is one function here; the work is done in the modules below. Those that
read the environment and name files are used without MindSpore, and the process of the rendezvous store has
no use for it, so nothing of it, nor numpy, is imported here before it is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tft.errors import UsageError
from tft.hooks import Buffer, Parcel, hookimpl
from tft.protocol.messages import FaultKind, ShardCopies

if TYPE_CHECKING:
    from tft_mindspore.adopted import Adopted
    from tft_mindspore.callback import TrainFaultTolerance
    from tft_mindspore.datasets import Rows
    from tft_mindspore.groups import Group, GroupBroken, Groups
    from tft_mindspore.state import Part

__all__ = ["Group", "GroupBroken", "Part", "Rows", "TrainFaultTolerance", "group"]

_OFFERED = {
    "Group": "groups", "GroupBroken": "groups", "Part": "state", "Rows": "datasets",
    "TrainFaultTolerance": "callback",
}  # fmt: skip
"""What scripts use, by the module it is in."""

_STRATEGIES = ("retry", "recover", "dump")

_adopted: "Adopted | None" = None
_model_train: "TrainFaultTolerance | None" = None
"""Of a script that trains with `Model.train`: it says what is enabled, and writes last checkpoints."""


def trained_by_model(callback: "TrainFaultTolerance") -> None:
    """
    This script trains with `Model.train`, and this is its callback.
    """
    global _model_train
    _model_train = callback


def __getattr__(name: str) -> Any:  # Any: classes
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OFFERED[name]}"), name)


@cache
def _groups() -> "Groups":
    from tft_mindspore.groups import Groups

    return Groups()


def group() -> "Group":
    """
    The group of all ranks, as the last regroup has formed it: `group().mean(gradients)`. Ask anew in
    every step. Raises `GroupBroken` where there is none.
    """
    return _groups().present


def _state() -> "Adopted":
    if _adopted is None:
        raise UsageError("there is no training state yet: call session.adopt first")
    return _adopted


# ---------------------------------------------------------------- the process


@hookimpl
def tft_strategies() -> Sequence[str]:
    if _model_train is None:
        return _STRATEGIES
    return tuple(each for each in _STRATEGIES if each in _model_train.strategies)


@hookimpl
def tft_preload() -> None:
    from tft_mindspore.preload import preload

    preload()


@hookimpl
def tft_store(host: str, port: int, opened: Callable[[int], None]) -> None:
    from tft_mindspore.store import serve

    serve(host, port, opened)


@hookimpl
def tft_begun() -> str | None:
    from tft_mindspore.adopted import begun

    return begun()


# ---------------------------------------------------------------- the state


@hookimpl
def tft_watch(contributing: Callable[[], None]) -> None:
    _groups().contributing = contributing


@hookimpl
def tft_adopt(
    parts: Mapping[str, Any],  # Any: the user's own objects, checked by `adopt`
    wrap: Callable[[], Any] | None,
) -> None:
    global _adopted
    from tft_mindspore.adopted import adopt

    _adopted = adopt(parts, wrap)


@hookimpl
def tft_shards(rank: int, world: int) -> Sequence[ShardCopies]:
    return _state().shards(rank, world)


@hookimpl
def tft_meet() -> None:
    _groups().present.barrier()


@hookimpl
def tft_capture(closing: bool) -> bytes:
    return _state().capture(closing=closing)


@hookimpl
def tft_rollback(private: bytes) -> None:
    _state().rollback(private)


@hookimpl
def tft_skip(batches: int) -> None:
    _state().skip(batches)


@hookimpl
def tft_give(shard: str) -> Parcel:
    return _state().give(shard)


@hookimpl
def tft_take(shard: str, meta: bytes) -> Sequence[Buffer]:
    return _state().take(shard, meta)


@hookimpl
def tft_taken(shard: str, meta: bytes) -> None:
    _state().taken(shard, meta)


@hookimpl
def tft_digests() -> Mapping[str, str]:
    return _state().digests()


# ---------------------------------------------------------------- groups and wrappers


@hookimpl
def tft_quiesce() -> None:
    _groups().quiesce()


@hookimpl
def tft_waiting(frame: FrameType) -> bool:
    from tft_mindspore.faults import waiting

    return waiting(frame)


@hookimpl
def tft_clear() -> None:
    if _adopted is not None:
        _adopted.clear()
    _groups().clear()


@hookimpl
def tft_regroup(name: str, host: str, port: int, rank: int, world: int) -> None:
    _groups().form(name, host, port, rank, world)


@hookimpl
def tft_rebuild() -> Any:  # Any: the user's own wrapper
    return _state().rebuild()


# ---------------------------------------------------------------- checkpoints


@hookimpl
def tft_save(directory: Path, shard: str, step: int) -> Sequence[str]:
    if _model_train is not None:
        return _model_train.save(directory, shard, step)
    return _state().save(directory, shard, step)


@hookimpl
def tft_join(directory: Path, files: Sequence[str], step: int) -> Sequence[str]:
    return () if _model_train is None else _model_train.rename(directory, files, step)


@hookimpl
def tft_stage(shard: str, step: int) -> Callable[[Path], Sequence[str]]:
    return _state().stage(shard, step)


@hookimpl
def tft_load(directory: Path, shard: str) -> None:
    if _model_train is not None and _model_train.has_saved(directory, shard):
        return  # it has read its own file before it trains
    _state().load(directory, shard)


# ---------------------------------------------------------------- faults


@hookimpl
def tft_classify(error: BaseException) -> FaultKind | None:
    from tft_mindspore.faults import classify

    return classify(error)
