"""
The adaptor for Megatron: `megatron.core` with its parallel state, its DistributedDataParallel and
its optimizers. It builds on the adaptor for PyTorch.

A training script calls `begin` before it builds the model and the optimizer. It calls `enable` when
both are built.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tft_pytorch.rank_local_state import RNGS

from tft.errors import UsageError
from tft_megatron.adaptor import parallel as _parallel
from tft_megatron.arguments import Settled, add_arguments, settle
from tft_megatron.data import Data
from tft_megatron.method_hooks import Replaced
from tft_megatron.training import Training
from tft_megatron.versions import check_megatron

__all__ = ["Data", "Settled", "add_arguments", "begin", "enable", "settle"]


# Any: `session` is a `tft.Session`, and the sizes have various types
def begin(session: Any, **sizes: Any) -> None:
    """
    Prepare this process for building model and optimizer. Call this instead of `init_process_group`
    and of Megatron's `initialize_model_parallel`. `sizes` are the arguments of
    `initialize_model_parallel`.

    Afterwards the script can build model and optimizer, even if no other rank has started yet. The
    process groups only pretend to work until `session.run` is called: collectives return at once
    and send no data.

    Raises `UsageError` if the sizes do not fit the job, if the job runs with another adaptor, or if
    process groups exist already. Also raises `UsageError` if megatron-core is missing or another
    version.
    """
    import torch.distributed as dist

    if session.adaptor != "megatron":
        raise UsageError(
            f"this job runs with the adaptor {session.adaptor!r}: start it with tft run --adaptor "
            "megatron"
        )
    check_megatron()
    if dist.is_initialized():
        raise UsageError(
            "tft forms the process groups itself, again after every incident: remove "
            "torch.distributed.init_process_group and initialize_model_parallel from the script, "
            "and call tft_megatron.begin once"
        )
    _parallel.begin(session.rank, session.world, sizes)


def enable(
    session: Any,  # Any: a `tft.Session`, and then Megatron's objects, which have no types
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    *,
    data: Any = None,
    rng: Sequence[str] = RNGS,
    others: Mapping[str, Any] | None = None,
    increment: Callable[[], int] | None = None,
    save: Callable[..., None] | None = None,
    load: Callable[..., None] | None = None,
) -> None:
    """
    Hand over the objects that are trained: the model, the optimizer and the scheduler.

    `model` is Megatron's DistributedDataParallel, or a list of such modules. `optimizer` is the
    result of `get_megatron_optimizer`, and `scheduler` is the `OptimizerParamScheduler`. `data`,
    `rng`, `others`, `save` and `load` have the same meaning as in `session.adopt`. But without
    `rng`, tft captures the states of the generators of torch, Python and numpy.

    From now on `optimizer.step` runs in an update window of its own, which tft opens and closes. In
    this window tft also calls `scheduler.step`, with the value that `increment` returns. The script
    must call `scheduler.step` with the same value afterwards, except if Megatron has skipped the
    step. Without `increment` the value is Megatron's running global batch size.

    Raises `UsageError` if `begin` was not called, or if the adaptor cannot handle one of the
    objects.
    """
    if not _parallel.begun:
        raise UsageError("call tft_megatron.begin before the model and the optimizer are built")
    training = Training(
        chunks=tuple(model) if isinstance(model, list | tuple) else (model,),
        optimizer=optimizer,
        scheduler=scheduler,
        data=data,  # the session checks whether it can skip batches
        rngs=rng,
        others=others or {},
        increment=increment,
    )
    session.adopt(
        model=training.chunks[0],
        optimizer=_torch_optimizer(optimizer),
        data=data,  # the session checks whether it can skip batches
        training=training,
        replaced=Replaced(session, training),
        save=save,
        load=load,
    )


# Any: `optimizer` is the script's own object, whose class is not checked yet
def _torch_optimizer(optimizer: Any) -> Any:
    """
    Return the torch optimizer inside Megatron's `optimizer`, or None if `optimizer` has no chained
    optimizers. Plugins that observe the training watch the torch optimizer, because it changes the
    parameters.
    """
    chained = getattr(optimizer, "chained_optimizers", None)
    return chained[0].optimizer if chained else None
