"""
Refuses settings of TorchTitan with which an incident could not be repaired.
"""

from typing import Any

from tft.errors import UsageError

_LOOP = ("init_distributed", "train", "train_step", "state_dict", "load_state_dict")
"""Methods of TorchTitan's Trainer which a class that derives from it must not override."""


def check_settings(config: Any) -> None:  # Any: a `Trainer.Config`, which has no types
    """
    Raise `UsageError` for settings that this adaptor cannot handle.
    """
    # imported here, because TorchTitan looks for devices when it is imported
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.trainer import Trainer

    if not isinstance(config, Trainer.Config):
        raise UsageError(
            f"tft_torchtitan.train takes a torchtitan.trainer.Trainer.Config, not a "
            f"{type(config).__name__}"
        )
    owner: Any = type(config)._owner
    own = [name for name in _LOOP if getattr(owner, name) is not getattr(Trainer, name)]
    if own:
        raise UsageError(
            f"{owner.__name__} has its own {', '.join(own)}: this adaptor was written for the "
            "step and the loop of torchtitan.trainer.Trainer. Override other methods"
        )
    if not config.training.disable_cuda_graphs:
        raise UsageError(
            "CUDA graphs have captured collectives of the present process groups, which are lost "
            "with a rank: train with --training.disable_cuda_graphs"
        )
    if config.parallelism.pipeline_parallel_degree > 1:
        raise UsageError(
            "a TorchTitan training with pipeline parallelism was not tried with tft: set "
            "--parallelism.pipeline_parallel_degree 1"
        )
    if config.comm.mode != "default":
        raise UsageError(
            f"tft forms the process groups itself, so --comm.mode {config.comm.mode} has no "
            "meaning: set --comm.mode default"
        )
    kinds = sorted({group.optimizer_name for group in config.optimizer.param_groups})
    if len(kinds) > 1:
        raise UsageError(
            f"the settings make several optimizers ({', '.join(kinds)}): tft keeps one optimizer "
            "of a TorchTitan training. Give all groups of parameters the same optimizer_name"
        )
    _check_checkpoint(config.checkpoint, CheckpointManager)


def warn_of_single_copies(config: Any) -> None:  # Any: a `Trainer.Config`, which has no types
    """
    Log a warning if no part of the model is on several ranks.
    """
    from torchtitan.tools.logging import logger

    if config.parallelism.data_parallel_replicate_degree == 1:
        logger.warning(
            "each part of the model is on one rank only, so tft cannot replace a lost rank: set "
            "--parallelism.data_parallel_replicate_degree to 2 or more"
        )


def _check_checkpoint(checkpoint: Any, known: Any) -> None:  # Any: TorchTitan has no types
    if checkpoint.create_seed_checkpoint:
        raise UsageError(
            "a seed checkpoint is made by one process without training: make it with plain "
            "TorchTitan (python -m torchtitan.train)"
        )
    if not checkpoint.enable:
        return
    if type(checkpoint)._owner is not known:
        raise UsageError(
            f"checkpoints by {type(checkpoint)._owner.__name__} were not tried with tft: use "
            "TorchTitan's CheckpointManager, or disable checkpoints and use tft run "
            "--checkpoint-every"
        )
    if checkpoint.async_mode != "disabled":
        raise UsageError(
            f"--checkpoint.async_mode {checkpoint.async_mode} saves with collectives during the "
            "training; an incident would interrupt these collectives, and the checkpoint would not "
            "be saved again: set --checkpoint.async_mode disabled"
        )
