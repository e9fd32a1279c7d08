"""
The hooks of the adaptor for Megatron. The entry point of the adaptor names this module.

This module implements the hooks of `tft.spi.adaptor.AdaptorSpecs`, mostly by calling the other
modules of the package.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tft_pytorch.groups import Groups
from tft_pytorch.hooks import TorchHooks

from tft.spi import Diagnosis, FaultKind, StateHooks, hookimpl
from tft_megatron.arguments import enabled
from tft_megatron.faults import classify, waiting
from tft_megatron.groups import Parallel
from tft_megatron.training_state import Adopted, adopt

_groups = Groups()
parallel = Parallel(_groups)
_hooks = StateHooks[Adopted]("tft_megatron.enable")
_torch = TorchHooks(_hooks, _groups, parallel)

# ---------------------------------------------------------------- the process

tft_store = _torch.tft_store
tft_begun = _torch.tft_begun
tft_launcher_store = _torch.tft_launcher_store


@hookimpl
def tft_strategies() -> Sequence[str]:
    return enabled()


@hookimpl
def tft_preload() -> None:
    from tft_megatron.preload import preload

    preload()


# ---------------------------------------------------------------- the training state

tft_watch = _torch.tft_watch
tft_shards = _hooks.tft_shards
tft_pre_update_barrier = _torch.tft_pre_update_barrier
tft_asynchronous = _torch.tft_asynchronous
tft_synchronize = _torch.tft_synchronize
tft_updated = _torch.tft_updated
tft_watch_batches = _torch.tft_watch_batches
tft_watch_work = _torch.tft_watch_work
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
def tft_end_step() -> bytes | None:
    return _hooks.state().end_step()


@hookimpl
def tft_adopt(
    # Any: the user's own objects; the function `adopt` checks their types
    parts: Mapping[str, Any],
    wrap: Callable[[], Any] | None,
) -> None:
    _hooks.adopted = adopt(parts, wrap, parallel, _torch.contributing)


# ---------------------------------------------------------------- groups

tft_quiesce = _torch.tft_quiesce
tft_collectives = _torch.tft_collectives
tft_clear = _torch.tft_clear
tft_regroup = _torch.tft_regroup
tft_rebuild = _hooks.tft_rebuild


@hookimpl
def tft_waiting(frame: FrameType) -> bool:
    return waiting(frame) or _torch.device_waits()


# ---------------------------------------------------------------- checkpoints


@hookimpl
def tft_save(directory: Path, shard: str, step: int) -> Sequence[str]:
    return _hooks.state().save(directory, shard, step)


@hookimpl
def tft_stage(shard: str, step: int) -> Callable[[Path], Sequence[str]]:
    return _hooks.state().stage(shard, step)


@hookimpl
def tft_join(directory: Path, files: Sequence[str]) -> Sequence[str]:
    # imported here, because this import loads megatron-core
    from tft_megatron.checkpoints import join

    return join(directory, files)


@hookimpl
def tft_newest(directory: Path, newest: Path | None, step: int) -> None:
    from tft_megatron.checkpoints import point

    point(directory, newest, step)


@hookimpl
def tft_load(directory: Path, shard: str) -> None:
    _hooks.state().load(directory, shard)


@hookimpl
def tft_beside() -> bytes:
    _hooks.state()
    return b""  # the checkpoint that the script writes has the whole state, so tft adds nothing


@hookimpl
def tft_replaced() -> None:
    _hooks.state().replaced()


# ---------------------------------------------------------------- faults


@hookimpl
def tft_classify(error: BaseException) -> FaultKind | Diagnosis | None:
    return classify(error) or _torch.result_of_abort(error)
