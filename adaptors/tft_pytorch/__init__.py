"""
The adaptor for PyTorch: data-parallel training with DistributedDataParallel over gloo.

Each hook of `tft.hooks.AdaptorSpecs` is one function here; the work is done in the modules below.
A process has one training state, taken charge of by `tft_adopt`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tft.errors import UsageError
from tft.hooks import Buffer, LauncherStore, Made, Parcel, hookimpl
from tft.protocol.messages import FaultKind, ShardCopies
from tft_pytorch.adopted import Adopted, adopt
from tft_pytorch.faults import classify, waiting
from tft_pytorch.groups import Groups
from tft_pytorch.made import Maker, adopt_make
from tft_pytorch.replicas import ReplicaOptimizer

__all__ = ["Made", "ReplicaOptimizer"]

_groups = Groups()
_adopted: Adopted | Maker | None = None
_contributing: Callable[[], None] | None = None


def _state() -> Adopted | Maker:
    if _adopted is None:
        raise UsageError("there is no training state yet: call session.adopt first")
    return _adopted


def _plain_state() -> Adopted:
    state = _state()
    if not isinstance(state, Adopted):
        raise UsageError("what make makes is not written by functions of the script's own")
    return state


# ---------------------------------------------------------------- the process


@hookimpl
def tft_strategies() -> Sequence[str]:
    return ("retry", "recover", "dump")


@hookimpl
def tft_preload() -> None:
    from tft_pytorch.preload import preload  # takes a second: only processes that train need it

    preload()


@hookimpl
def tft_store(host: str, port: int, opened: Callable[[int], None]) -> None:
    from tft_pytorch.store import serve

    serve(host, port, opened)


# ---------------------------------------------------------------- under torchrun or the like


@hookimpl
def tft_begun() -> str | None:
    import torch.distributed as dist  # heavy, and the script has done so already

    return "a process group (init_process_group)" if dist.is_initialized() else None


@hookimpl
def tft_launcher_store(host: str, port: int) -> LauncherStore:
    from tft_pytorch.store import TorchrunStore

    return TorchrunStore(host, port)


# ---------------------------------------------------------------- the state


@hookimpl
def tft_watch(contributing: Callable[[], None]) -> None:
    global _contributing
    _contributing = contributing


@hookimpl
def tft_adopt(
    parts: Mapping[str, Any],  # Any: the user's own objects, checked by `adopt`
    wrap: Callable[[], Any] | None,
) -> None:
    global _adopted
    take_charge = adopt_make if "make" in parts else adopt
    _adopted = take_charge(parts, wrap, _contributing)


@hookimpl
def tft_shards(rank: int, world: int) -> Sequence[ShardCopies]:
    return _state().shards(rank, world)


@hookimpl
def tft_meet() -> None:
    _groups.meet(cuda=_state().on_cuda)


@hookimpl
def tft_updated() -> None:
    _state().updated()


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
    _groups.quiesce()


@hookimpl
def tft_waiting(frame: FrameType) -> bool:
    return waiting(frame)


@hookimpl
def tft_clear() -> None:
    if _adopted is not None:
        _adopted.clear()
    _groups.clear()


@hookimpl
def tft_regroup(name: str, host: str, port: int, rank: int, world: int) -> None:
    _groups.form(name, host, port, rank, world, cuda=_state().on_cuda)


@hookimpl
def tft_rebuild() -> Any:  # Any: the user's own wrapper
    return _state().rebuild()


# ---------------------------------------------------------------- checkpoints


@hookimpl
def tft_save(directory: Path, shard: str) -> Sequence[str]:
    return _state().save(directory, shard)


@hookimpl
def tft_stage(shard: str) -> Callable[[Path], Sequence[str]]:
    return _state().stage(shard)


@hookimpl
def tft_join(directory: Path, files: Sequence[str]) -> Sequence[str]:
    from tft_pytorch.checkpoints import join  # late: a second of imports, see preload.py

    return join(directory, files)


@hookimpl
def tft_load(directory: Path, shard: str) -> None:
    _state().load(directory, shard)


@hookimpl
def tft_beside(shard: str) -> bytes:
    return _plain_state().beside(shard)


@hookimpl
def tft_replaced(shard: str, beside: bytes) -> None:
    _plain_state().replaced(shard, beside)


# ---------------------------------------------------------------- faults


@hookimpl
def tft_classify(error: BaseException) -> FaultKind | None:
    return classify(error)
