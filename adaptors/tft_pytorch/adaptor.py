"""
The hooks of the adaptor for PyTorch. tft finds this module through the adaptor's Python entry
point.

This module implements the hooks of `tft.spi.adaptor.AdaptorSpecs`, mostly by calling the other
modules. A process has one training state (a `StateStore`), which the hook `tft_adopt` makes from
the user's objects.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tft.spi import FaultKind, Guard, Numbers, StateHooks, hookimpl, is_position_of_loop
from tft_pytorch import step_numbers
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.factory_maker import adopt_make
from tft_pytorch.faults import classify, waiting
from tft_pytorch.groups import Groups
from tft_pytorch.hooks import TorchHooks
from tft_pytorch.state_store import StateStore

_hooks = StateHooks[StateStore]()
_torch = TorchHooks(_hooks, Groups())

# ---------------------------------------------------------------- the process

tft_store = _torch.tft_store
tft_begun = _torch.tft_begun
tft_launcher_store = _torch.tft_launcher_store


@hookimpl
def tft_strategies() -> Sequence[str]:
    return ("retry", "recover", "dump")


@hookimpl
def tft_preload() -> None:
    # imported here, because only a process that preloads modules needs the module `preload`
    from tft_pytorch.preload import preload

    preload()


# ---------------------------------------------------------------- the training state

tft_watch = _torch.tft_watch
tft_shards = _hooks.tft_shards
tft_pre_update_barrier = _torch.tft_pre_update_barrier
tft_asynchronous = _torch.tft_asynchronous
tft_synchronize = _torch.tft_synchronize
tft_updated = _torch.tft_updated
tft_watch_work = _torch.tft_watch_work
tft_watch_batches = _torch.tft_watch_batches
tft_watch_collectives = _torch.tft_watch_collectives
tft_capture = _hooks.tft_capture
tft_rollback = _torch.tft_rollback
tft_skip = _hooks.tft_skip
tft_backup = _torch.tft_backup
tft_backups = _torch.tft_backups
tft_restore = _torch.tft_restore
tft_give = _torch.tft_give
tft_take = _hooks.tft_take
tft_taken = _hooks.tft_taken
tft_digests = _hooks.tft_digests
tft_compare = _hooks.tft_compare
tft_generators = _hooks.tft_generators
tft_set_aside = _torch.tft_set_aside
tft_slices = _torch.tft_slices
tft_contribution = _torch.tft_contribution


@hookimpl
def tft_guard(room: int) -> Guard | None:
    return _hooks.state().guard(room)


@hookimpl
def tft_unkept() -> Mapping[str, str]:
    return _hooks.state().unkept()


@hookimpl
def tft_opening() -> None:
    _hooks.state().opening()


@hookimpl
def tft_column() -> Sequence[int]:
    return _hooks.state().column()


@hookimpl
def tft_watch_numbers(refuse: Callable[[float], bool]) -> bool:
    return _hooks.state().watch_numbers(refuse)


@hookimpl
def tft_numbers() -> Numbers:
    return step_numbers.watch.take()


@hookimpl
def tft_end_step(tail: bool) -> bytes | None:
    return _hooks.state().end_step(tail=tail)


@hookimpl
def tft_adopt(
    # Any: the user's own objects; the function `adopt` checks their types
    parts: Mapping[str, Any],
    wrap: Callable[[], Any] | None,
) -> None:
    # a framework's loop keeps the attributes of modules in its own way
    attributes = not is_position_of_loop(parts.get("data"))
    contributing = _torch.contributing
    if "make" in parts:
        _hooks.adopted = adopt_make(parts, wrap, contributing, attributes=attributes)
    else:
        _hooks.adopted = adopt(parts, wrap, contributing, early=_torch.early, attributes=attributes)


# ---------------------------------------------------------------- groups and wrappers

tft_quiesce = _torch.tft_quiesce
tft_collectives = _torch.tft_collectives
tft_clear = _torch.tft_clear
tft_regroup = _torch.tft_regroup


@hookimpl
def tft_rebuild() -> Any:  # Any: the user's own objects
    state = _hooks.state()
    built = state.rebuild()
    _torch.complete(state.exchange())
    return built


@hookimpl
def tft_waiting(frame: FrameType) -> bool:
    return waiting(frame) or _torch.device_waits()


# ---------------------------------------------------------------- checkpoints


@hookimpl
def tft_save(directory: Path, shard: str) -> Sequence[str]:
    return _hooks.state().save(directory, shard)


@hookimpl
def tft_stage(shard: str) -> Callable[[Path], Sequence[str]]:
    return _hooks.state().stage(shard)


@hookimpl
def tft_join(directory: Path, files: Sequence[str]) -> Sequence[str]:
    from tft_pytorch.checkpoints import join  # imported here, because this import takes 1 s

    return join(directory, files)


@hookimpl
def tft_load(directory: Path, shard: str) -> None:
    _hooks.state().load(directory, shard)


@hookimpl
def tft_beside(shard: str) -> bytes:
    return _hooks.state().beside(shard)


@hookimpl
def tft_replaced(shard: str, beside: bytes) -> None:
    _hooks.state().replaced(shard, beside)


# ---------------------------------------------------------------- faults


@hookimpl
def tft_classify(error: BaseException) -> FaultKind | None:
    return classify(error) or _torch.result_of_abort(error)
