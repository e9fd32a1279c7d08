"""
The adaptor for Megatron: `megatron.core` with its parallel state, its DistributedDataParallel and its optimizers.
It stands on the adaptor for PyTorch.

A script calls `begin` before it builds anything, and `enable` when all is built. Each hook of
`tft.hooks.AdaptorSpecs` is one function here; the work is done in the modules below.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tft_pytorch.groups import Groups

from tft.errors import UsageError
from tft.hooks import Buffer, Diagnosis, LauncherStore, Parcel, hookimpl
from tft.protocol.messages import FaultKind, ShardCopies
from tft_megatron.adopted import Adopted, adopt
from tft_megatron.arguments import Settled, add_arguments, enabled, settle
from tft_megatron.data import Data
from tft_megatron.faults import classify, waiting
from tft_megatron.groups import Parallel
from tft_megatron.replaced import Replaced
from tft_megatron.training import Training
from tft_megatron.versions import check_megatron

__all__ = ["Data", "Settled", "add_arguments", "begin", "enable", "settle"]

_groups = Groups()
_parallel = Parallel(_groups)
_adopted: Adopted | None = None
_contributing: Callable[[], None] | None = None


def begin(session: Any, **sizes: Any) -> None:  # Any: `tft.Session`; as Megatron takes them
    """
    Takes the place of `init_process_group` and of Megatron's `initialize_model_parallel`, and takes the
    arguments of the latter. From here on everything can be built, before any other rank is there; no
    collective sends anything before `session.run`.

    Raises `UsageError` where the sizes do not fit the job, and where there is no megatron-core.
    """
    import torch.distributed as dist

    if session.adaptor != "megatron":
        raise UsageError(
            f"this job runs with the adaptor {session.adaptor!r}: start it with tft run --adaptor megatron"
        )
    check_megatron()
    if dist.is_initialized():
        raise UsageError(
            "tft forms the process groups itself, again after every incident: remove "
            "torch.distributed.init_process_group and initialize_model_parallel from the script, and call "
            "tft_megatron.begin once"
        )
    _parallel.begin(session.rank, session.world, sizes)


def enable(
    session: Any,  # Any: `tft.Session`, and the user's own objects
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    *,
    data: Any = None,
    rng: Sequence[str] = ("torch",),
    others: Mapping[str, Any] | None = None,
    increment: Callable[[], int] | None = None,
    **more: Any,
) -> None:
    """
    Hands over what is trained: Megatron's DistributedDataParallel, or a list of them, the optimizer of
    `get_megatron_optimizer` and the `OptimizerParamScheduler`. `data`, `rng`, `others` and more, such as
    `save` and `load`, are those of `session.adopt`.

    From here on `optimizer.step` is an update window, in which the scheduler is stepped, too, by what
    `increment` returns: what the script is going to give `scheduler.step` afterwards. Without it that is
    Megatron's running global batch size.
    """
    if not _parallel.begun:
        raise UsageError("call tft_megatron.begin before anything of Megatron is built")
    training = Training(
        chunks=tuple(model) if isinstance(model, list | tuple) else (model,),
        optimizer=optimizer,
        scheduler=scheduler,
        data=data,
        rngs=rng,
        others=others or {},
        increment=increment,
    )
    session.adopt(
        model=training.chunks[0],
        optimizer=_torch_optimizer(optimizer),
        training=training,
        replaced=Replaced(session, training),
        **more,
    )


def _torch_optimizer(optimizer: Any) -> Any:  # Any: whatever it is, it is checked later
    """
    What observers are to watch: that which changes parameters.
    """
    chained = getattr(optimizer, "chained_optimizers", None)
    return chained[0].optimizer if chained else None


def _state() -> Adopted:
    if _adopted is None:
        raise UsageError("there is no training state yet: call tft_megatron.enable first")
    return _adopted


# ---------------------------------------------------------------- the process


@hookimpl
def tft_strategies() -> Sequence[str]:
    return enabled()


@hookimpl
def tft_preload() -> None:
    from tft_megatron.preload import preload  # takes seconds: only processes that train need it

    preload()


@hookimpl
def tft_store(host: str, port: int, opened: Callable[[int], None]) -> None:
    from tft_pytorch.store import serve

    serve(host, port, opened)


# ---------------------------------------------------------------- under torchrun or the like


@hookimpl
def tft_begun() -> str | None:
    import torch.distributed as dist

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
    _adopted = adopt(parts, wrap, _parallel, _contributing)


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


# ---------------------------------------------------------------- groups


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
    _parallel.clear()


@hookimpl
def tft_regroup(name: str, host: str, port: int, rank: int, world: int) -> None:
    _parallel.form(name, host, port, rank, world, cuda=_state().on_cuda)


@hookimpl
def tft_rebuild() -> Any:  # Any: the user's own
    return _state().rebuild()


# ---------------------------------------------------------------- checkpoints


@hookimpl
def tft_save(directory: Path, shard: str, step: int) -> Sequence[str]:
    return _state().save(directory, shard, step)


@hookimpl
def tft_stage(shard: str, step: int) -> Callable[[Path], Sequence[str]]:
    return _state().stage(shard, step)


@hookimpl
def tft_join(directory: Path, files: Sequence[str]) -> Sequence[str]:
    from tft_megatron.checkpoints import join  # late: it brings megatron-core, see preload.py

    return join(directory, files)


@hookimpl
def tft_newest(directory: Path, newest: Path | None, step: int) -> None:
    from tft_megatron.checkpoints import point

    point(directory, newest, step)


@hookimpl
def tft_load(directory: Path, shard: str) -> None:
    _state().load(directory, shard)


# ---------------------------------------------------------------- faults


@hookimpl
def tft_classify(error: BaseException) -> FaultKind | Diagnosis | None:
    return classify(error)
