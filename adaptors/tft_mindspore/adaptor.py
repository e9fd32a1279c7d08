"""
The adaptor for MindSpore, as an entry point names it: each hook of `tft.spi.adaptor.AdaptorSpecs` is
here.

The other modules do the work. MindSpore and numpy are imported only when they are needed, because
the process of the rendezvous store has no use for them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tft.spi import FaultKind, StateHooks, hookimpl

if TYPE_CHECKING:
    from tft_mindspore.callback import TrainFaultTolerance
    from tft_mindspore.groups import Groups
    from tft_mindspore.training_state import Adopted

_STRATEGIES = ("retry", "recover", "dump")

_hooks: "StateHooks[Adopted]" = StateHooks()
_model_train: "TrainFaultTolerance | None" = None
"""The callback of a script that trains with `Model.train`: it says what is enabled, and writes last
checkpoints. None: the script has a loop of its own."""


def trained_by_model(callback: "TrainFaultTolerance") -> None:
    """
    Set the callback of a script that trains with `Model.train`.
    """
    global _model_train
    _model_train = callback


@cache
def groups() -> "Groups":
    """
    Return the object that forms the process groups.
    """
    from tft_mindspore.groups import Groups

    return Groups()


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
    from tft_mindspore.training_state import begun

    return begun()


# ---------------------------------------------------------------- the state

tft_shards = _hooks.tft_shards
tft_capture = _hooks.tft_capture
tft_rollback = _hooks.tft_rollback
tft_skip = _hooks.tft_skip
tft_give = _hooks.tft_give
tft_take = _hooks.tft_take
tft_taken = _hooks.tft_taken
tft_digests = _hooks.tft_digests
tft_compare = _hooks.tft_compare
tft_generators = _hooks.tft_generators


@hookimpl
def tft_watch(contributing: Callable[[], None]) -> None:
    groups().contributing = contributing


@hookimpl
def tft_adopt(
    parts: Mapping[str, Any],  # Any: the user's own objects, checked by `adopt`
    wrap: Callable[[], Any] | None,
) -> None:
    from tft_mindspore.training_state import adopt

    _hooks.adopted = adopt(parts, wrap)


# ---------------------------------------------------------------- groups and wrappers

tft_rebuild = _hooks.tft_rebuild


@hookimpl
def tft_pre_update_barrier() -> None:
    groups().present.barrier()


@hookimpl
def tft_quiesce() -> None:
    groups().quiesce()


@hookimpl
def tft_waiting(frame: FrameType) -> bool:
    from tft_mindspore.faults import waiting

    return waiting(frame)


@hookimpl
def tft_clear() -> None:
    if _hooks.adopted is not None:
        _hooks.adopted.clear()
    groups().clear()


@hookimpl
def tft_regroup(name: str, host: str, port: int, rank: int, world: int) -> None:
    groups().form(name, host, port, rank, world)


# ---------------------------------------------------------------- checkpoints


@hookimpl
def tft_save(directory: Path, shard: str, step: int) -> Sequence[str]:
    if _model_train is not None:
        return _model_train.save(directory, shard, step)
    return _hooks.state().save(directory, shard, step)


@hookimpl
def tft_join(directory: Path, files: Sequence[str], step: int) -> Sequence[str]:
    return () if _model_train is None else _model_train.rename(directory, files, step)


@hookimpl
def tft_stage(shard: str, step: int) -> Callable[[Path], Sequence[str]]:
    return _hooks.state().stage(shard, step)


@hookimpl
def tft_load(directory: Path, shard: str) -> None:
    if _model_train is not None and _model_train.has_saved(directory, shard):
        return  # the script has loaded its own file before it trains
    _hooks.state().load(directory, shard)


# ---------------------------------------------------------------- faults


@hookimpl
def tft_classify(error: BaseException) -> FaultKind | None:
    from tft_mindspore.faults import classify

    return classify(error)
