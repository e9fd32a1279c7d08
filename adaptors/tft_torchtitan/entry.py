"""
The functions that a training script calls.
"""

from typing import Any

import torch

import tft
from tft.errors import JobEnded
from tft_torchtitan.settings import check_settings, warn_of_single_copies
from tft_torchtitan.versions import TORCHTITAN


def main() -> tft.Session:
    """
    Train with the settings of the command line (`--module`, `--config` and TorchTitan's options).
    Call this in the place of `torchtitan.train.main`. Return the session.
    """
    TORCHTITAN.check()
    # imported here, because TorchTitan looks for devices when it is imported
    from torchtitan.config import ConfigManager
    from torchtitan.observability import structured_logger
    from torchtitan.tools.logging import init_logger

    init_logger()
    config: Any = ConfigManager().parse_args()
    structured_logger.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    return train(config)


def train(config: Any) -> tft.Session:  # Any: a `Trainer.Config`, which has no types
    """
    Train with TorchTitan's Trainer and the settings `config`. Call this in the place of
    `config.build().train()`. Return the session when all steps have been trained.

    Raises `UsageError` for another version of TorchTitan, and for settings with which an incident
    could not be repaired. Raises `JobEnded` when the job ends before the last step.
    """
    TORCHTITAN.check()
    check_settings(config)
    # imported here, because TorchTitan looks for devices when it is imported
    from tft_torchtitan.job import TitanJob

    session = tft.init()
    if session.rank == 0 and session.world > 1:
        warn_of_single_copies(config)
    if config.debug.seed is not None:
        # Set the seed for the random numbers that training draws, because the Trainer sets the seed
        # only for the weights, before it makes them.
        torch.manual_seed(config.debug.seed)
    export = session.export()
    job = TitanJob(session, config, export)
    # keep all three kinds of random generators, because a dataset may draw from any of them when
    # its items are read
    session.adopt(make=job.make, data=job.position, rng=("torch", "python", "numpy"))
    session.after_step(job.after)
    try:
        session.run(job.train if export is None else job.write)
    finally:
        job.close()
    if export is not None:
        raise JobEnded(0)
    return session
