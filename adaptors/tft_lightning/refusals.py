"""
Refuses, before training begins, settings and callbacks of a trainer with which tft cannot make it
fault tolerant.
"""

from typing import Any

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torchmetrics import MetricTracker

from tft.errors import UsageError

_REFUSED = (
    BaseFinetuning, BatchSizeFinder, LearningRateFinder, ModelPruning, StochasticWeightAveraging, Timer,
    WeightAveraging,
)  # fmt: skip
"""The callbacks that are refused. `max_time` of the Trainer makes a `Timer`."""

Trainer = Any  # Lightning's own types are not visible to mypy here


def refuse_unsupported(trainer: Trainer, strategy: Any, world: int) -> None:
    """
    Raise `UsageError` if `trainer` is set up in a way that tft cannot make fault tolerant. The job
    has `world` ranks.
    """
    if strategy.num_nodes * strategy.num_processes != world:
        raise UsageError(
            f"the Trainer has {strategy.num_processes} devices on each of {strategy.num_nodes} "
            f"nodes, but the job has {world} ranks: give the Trainer devices= as tft run has "
            "--nproc-per-node, and num_nodes= as it has --nnodes"
        )
    if not trainer.lightning_module.automatic_optimization:
        raise UsageError(
            "the LightningModule has automatic_optimization=False, so its training_step changes "
            "the state where tft cannot see it: use automatic optimization, or write the loop by "
            "hand"
        )
    if any(isinstance(each, MetricTracker) for each in trainer.lightning_module.modules()):
        raise UsageError(
            "the LightningModule has a MetricTracker, which adds a metric to the module in each "
            "increment, and a replacement process would not have these metrics: log the values "
            "with self.log"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise UsageError(
            "reload_dataloaders_every_n_epochs makes other loaders in the middle of the training, "
            "whose position tft cannot keep: leave it out"
        )
    if trainer._val_check_time_interval is not None:
        raise UsageError(
            "val_check_interval is a time, and the clocks of the ranks differ: give a number of "
            "batches, or a part of an epoch"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, _REFUSED):
            raise UsageError(
                f"the callback {type(callback).__name__} has state that is no plain value, or runs "
                "several trainings, or changes which parameters are trained, so a replacement "
                "could not continue with it: leave it out (max_time of the Trainer makes a Timer)"
            )
    if isinstance(getattr(strategy, "_checkpoint_io", None), AsyncCheckpointIO):
        raise UsageError(
            "AsyncCheckpointIO writes a checkpoint while later steps are trained, so it is missing "
            "if the process dies meanwhile: use another checkpoint plugin"
        )
    if strategy._ddp_kwargs.get("static_graph"):
        raise UsageError(
            "tft cannot rebuild a DDP with static_graph=True: leave static_graph out of TftStrategy"
        )
    if strategy._model_averaging_period is not None or strategy._ddp_comm_state is not None:
        raise UsageError(
            "the state of a DDP communication hook differs between the ranks, and tft cannot "
            "restore it: leave ddp_comm_state and model_averaging_period out of TftStrategy"
        )
