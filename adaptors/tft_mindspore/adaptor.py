"""
The hooks of the adaptor for MindSpore. The entry point of the adaptor names this module.

This module implements the hooks of `tft.spi.adaptor.AdaptorSpecs`, mostly by calling the other
modules of the package. This module imports MindSpore and numpy only when a hook needs them, because
the process that serves the rendezvous store does not use MindSpore and numpy.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tft.spi import FaultKind, Numbers, SliceContent, StateHooks, hookimpl
from tft_mindspore.process import groups, model_train

if TYPE_CHECKING:
    from tft_mindspore.training_state import Adopted

_STRATEGIES = ("retry", "recover", "dump")

_hooks: "StateHooks[Adopted]" = StateHooks()


# ---------------------------------------------------------------- the process


@hookimpl
def tft_strategies() -> Sequence[str]:
    callback = model_train()
    if callback is None:
        return _STRATEGIES
    return tuple(each for each in _STRATEGIES if each in callback.strategies)


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


# ---------------------------------------------------------------- the training state

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
def tft_end_step() -> bytes | None:
    return _hooks.state().end_step()


@hookimpl
def tft_slices(shard: str) -> SliceContent:
    return _hooks.state().slices(shard)


@hookimpl
def tft_watch(contributing: Callable[[], None]) -> None:
    groups().contributing = contributing


@hookimpl
def tft_adopt(
    # Any: the user's own objects; the function `adopt` checks their types
    parts: Mapping[str, Any],
    wrap: Callable[[], Any] | None,
) -> None:
    from tft_mindspore.training_state import adopt

    _hooks.adopted = adopt(parts, wrap)


# ---------------------------------------------------------------- groups and wrappers

tft_rebuild = _hooks.tft_rebuild


@hookimpl
def tft_pre_update_barrier(refuses: bool | None) -> bool:
    if refuses is not None:
        return groups().present.agree(refuses)
    groups().present.barrier()
    return False


@hookimpl
def tft_watch_numbers(refuse: Callable[[float], bool]) -> bool:
    from tft_mindspore.step_numbers import watch

    watch.begin()
    # The result True says that a refusal of the update reaches all ranks. Either all ranks judge
    # the same averaged gradients, or the pre-update barrier tells the other ranks of the refusal.
    return True


@hookimpl
def tft_numbers() -> Numbers:
    from tft_mindspore.step_numbers import watch

    return watch.take()


@hookimpl
def tft_quiesce() -> None:
    groups().quiesce()


@hookimpl
def tft_waiting(frame: FrameType) -> bool:
    from tft_mindspore.faults import waiting

    return waiting(frame)


@hookimpl
def tft_clear() -> None:
    from tft_mindspore.step_numbers import watch

    watch.forget()
    if _hooks.adopted is not None:
        _hooks.adopted.clear()
    groups().clear()


@hookimpl
def tft_regroup(name: str, host: str, port: int, rank: int, world: int) -> None:
    groups().form(name, host, port, rank, world)


# ---------------------------------------------------------------- checkpoints


@hookimpl
def tft_save(directory: Path, shard: str, step: int) -> Sequence[str]:
    callback = model_train()
    if callback is not None:
        return callback.save(directory, shard, step)
    return _hooks.state().save(directory, shard, step)


@hookimpl
def tft_join(directory: Path, files: Sequence[str], step: int) -> Sequence[str]:
    callback = model_train()
    return () if callback is None else callback.rename(directory, files, step)


@hookimpl
def tft_stage(shard: str, step: int) -> Callable[[Path], Sequence[str]]:
    return _hooks.state().stage(shard, step)


@hookimpl
def tft_load(directory: Path, shard: str) -> None:
    callback = model_train()
    if callback is not None and callback.has_saved(directory, shard):
        # load nothing, because the script itself has loaded the checkpoint of this shard with
        # MindSpore's functions
        return
    _hooks.state().load(directory, shard)


# ---------------------------------------------------------------- faults


@hookimpl
def tft_classify(error: BaseException) -> FaultKind | None:
    from tft_mindspore.faults import classify

    return classify(error)
