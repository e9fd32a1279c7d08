"""
Runs a TorchTitan training as a job of tft. After each incident a new Trainer is made over the new
process groups. The class `TitanJob` keeps the objects that live longer than a Trainer: settings,
position, progress, and the metric loggers.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.distributed import utils as titan_groups

from tft import Session
from tft.errors import UsageError
from tft.spi import Made
from tft_torchtitan.loggers import MetricLoggers
from tft_torchtitan.position import Position
from tft_torchtitan.progress import Progress
from tft_torchtitan.trainer import TrainerSteps

_SAVES = 3600.0
"""The seconds that a checkpoint may take before a rank counts as hanging."""


class TitanJob:
    """
    The training of one rank. `config` is a `Trainer.Config` that has been checked. `export` is the
    directory for a checkpoint of TorchTitan, if the job resumes only to write one.
    """

    # Any: TorchTitan has no types
    def __init__(self, session: Session, config: Any, export: Path | None = None) -> None:
        self.session = session
        self._export = export
        self.progress = Progress()
        self.position = Position()
        self._config = config
        self._loggers = MetricLoggers(session, config)
        owner = type(config)._owner
        self._kind: Any = type(f"{owner.__name__}Steps", (TrainerSteps, owner), {"job": self})
        # TorchTitan calls this function once after the update window, to set another time limit for
        # collectives. Replace it by a function that does nothing. tft itself ends collectives that
        # hang, so no other limit is needed. And the function has a barrier, which must not come
        # between the update window and the end of the step: a lost rank would interrupt it there.
        titan_groups.set_pg_timeouts = _keep_timeouts

    # ------------------------------------------------------------ the objects over the groups

    def make(self) -> Made:
        """
        Make a Trainer over the present process groups.

        The first call is a trial over groups that send nothing. The call before the first step
        loads TorchTitan's own checkpoint, if there is one. After an incident the state comes from
        the other ranks instead.
        """
        trial = dist.get_backend() == "fake"
        config = self._settings(trial=trial)
        trainer = self._kind(config)
        self._check(trainer)
        trainer.row = {}
        if not trial:
            self._settle(trainer)
        return Made(
            model=trainer.model_parts[0],
            optimizer=trainer.optimizers.optimizers[0],
            scheduler=trainer.lr_schedulers,
            others={"torchtitan": self.progress},
            more=trainer,
        )

    def _settings(self, *, trial: bool) -> Any:  # Any: TorchTitan has no types
        """
        Return a copy of the settings for one Trainer, because its constructor changes them. The
        copy makes the Trainer build no loggers, because these live longer than a Trainer. For a
        trial, it also makes the Trainer write no checkpoints and run no validation.
        """
        config = deepcopy(self._config)
        config.metrics = replace(config.metrics, enable_tensorboard=False, enable_wandb=False)
        if trial:
            config.checkpoint = replace(config.checkpoint, enable=False)
            config.validator = replace(config.validator, enable=False)
        elif self._export is not None:
            config.checkpoint = replace(
                config.checkpoint, enable=True, folder=str(self._export), interval=1
            )
        return config

    def _check(self, trainer: Any) -> None:  # Any: TorchTitan has no types
        if trainer.optimizers._optimizer_step_pre_hooks:
            raise UsageError(
                "the model has a hook that runs before the step of the optimizers, such as the "
                "load balancing of experts (load_balance_coeff): such a hook both uses collectives "
                "and changes the state, so an incident could leave the state half changed. Set "
                "load_balance_coeff to None, or train another model"
            )

    def _settle(self, trainer: Any) -> None:  # Any: TorchTitan has no types
        """
        Prepare a new Trainer. Keep its loop from logging, saving and validating between two steps,
        because the method `after` does this. Before the first step, load TorchTitan's checkpoint,
        if there is one.
        """
        processor, checkpointer = trainer.metrics_processor, trainer.checkpointer
        # TorchTitan would ask the loader's workers for their position only as often as it writes
        # checkpoints. From an older position, the loader would have to read batches again. tft
        # needs the position after each step, so ask for it in each step.
        trainer.dataloader.snapshot_every_n_steps = trainer.gradient_accumulation_steps
        processor.logger = self._loggers.open(trainer)
        processor.log = trainer.note_row
        processor.log_validation = self._checked(processor.log_validation)
        if self.session.step == 1:
            checkpointer.load(step=self._config.checkpoint.load_step)
            self.progress.step = trainer.step
        trainer.save = checkpointer.save
        checkpointer.load = checkpointer.save = _do_nothing
        trainer.config.validator.enable = False

    def _checked(self, log: Callable[..., None]) -> Callable[..., None]:
        """
        Return a function that waits for the device, and then calls `log`. The wait raises an
        exception if a collective may have been aborted, whose result is then wrong, such as a part
        of a sum. A logger must not get such a result, because it may keep the first row of a step,
        and ignore the right row that comes when the step is repeated.
        """

        def checked(*args: object, **kwargs: object) -> None:
            self.session.synchronize()
            log(*args, **kwargs)

        return checked

    # ------------------------------------------------------------ the loop

    def train(self, session: Session) -> None:
        """
        Train the steps that remain. tft calls this again after an incident.
        """
        trainer = self._trainer()
        remaining = self._config.training.steps - self.progress.step
        trainer.steps = session.steps(session.step - 1 + remaining)
        try:
            trainer.train()
        finally:
            self.position.detach()

    def write(self, session: Session) -> None:
        """
        Save a checkpoint of TorchTitan after the last complete step, and train no step.
        """
        # this call ends no step: it only tells tft that this loop marks the ends of its steps
        session.end_step()
        trainer = self._trainer()
        session.expect(_SAVES)
        try:
            trainer.save(self.progress.step, last_step=False)
        finally:
            self.position.detach()

    def _trainer(self) -> Any:  # Any: TorchTitan has no types
        """
        Return the present Trainer, at the end of the last complete step.
        """
        trainer = self.session.model.more
        trainer.step = self.progress.step
        self.position.attach(trainer)
        return trainer

    def after(self, step: int) -> None:
        """
        Log the metrics of a step, save a checkpoint, and validate, as TorchTitan does after a step.

        `step` is the number of the step as the session counts. All ranks call this again if a fault
        interrupts it on one of them.
        """
        del step
        trainer, progress = self._trainer(), self.progress
        if progress.row:
            self._loggers.log(trainer.metrics_processor, progress)
        trainer.save(progress.step, last_step=progress.step == self._config.training.steps)
        if self._config.validator.enable and trainer.validator.should_validate(progress.step):
            trainer.validator.validate(trainer.model_parts, progress.step)
            self._loggers.flush()

    def close(self) -> None:
        """
        Close the loggers.
        """
        self._loggers.close()


def _do_nothing(*args: object, **kwargs: object) -> bool:
    return False


def _keep_timeouts(*args: object, **kwargs: object) -> None:
    """
    Do nothing. This function replaces `torchtitan.distributed.utils.set_pg_timeouts`, so that the
    process groups keep the time limits that tft has set.
    """
