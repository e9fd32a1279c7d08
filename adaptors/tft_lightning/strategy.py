"""
The strategy that makes a `Trainer` of Lightning fault tolerant.

    trainer = Trainer(devices=2, strategy=TftStrategy())

It trains with DistributedDataParallel, as Lightning's own `DDPStrategy` does. tft forms the process
groups, when training begins and after every incident.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

import tft
from tft.errors import UsageError
from tft_lightning import evaluations
from tft_lightning.agreed import Agreed
from tft_lightning.checkpoints import CheckpointLedger
from tft_lightning.driver import Driver
from tft_lightning.loaders import positioned
from tft_lightning.logs import continue_log
from tft_lightning.position import Position
from tft_lightning.refusals import refuse_unsupported

Trainer = Any  # Lightning's own types are not visible to mypy here


class Schedulers:
    """
    Joins the states of all learning rate schedulers of the trainer, because `session.adopt` takes
    only one scheduler.
    """

    def __init__(self, schedulers: list[Any]) -> None:
        self._schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        """
        Return the state of each scheduler.
        """
        return {str(at): each.state_dict() for at, each in enumerate(self._schedulers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Restore the state of each scheduler.
        """
        for at, each in enumerate(self._schedulers):
            each.load_state_dict(state[str(at)])


class TftStrategy(DDPStrategy):  # type: ignore[misc]  # it has no types here
    """
    Trains with DistributedDataParallel in a job of tft. It takes the arguments of `DDPStrategy`.
    """

    def __init__(self, *, limit: float = 3600.0, **kwargs: Any) -> None:
        """
        Join the job. `limit` is the time in seconds that a validation, the end of an epoch, or a
        checkpoint may take before a rank counts as hanging.

        Raises `UsageError` if the script was not started by `tft run`.
        """
        self._limit = limit
        kwargs.setdefault("cluster_environment", TorchElasticEnvironment())
        super().__init__(**kwargs)
        self._session = tft.init()
        self._agreed = Agreed(self._session.run_dir / "lightning", self._session.rank)
        self._driver: Driver | None = None
        self._depth = 0
        """The nesting depth of calls of the module within `training_step`."""
        self._inside = False
        """True while the strategy's method `training_step` runs."""

    @property
    def session(self) -> tft.Session:
        """
        This rank's part in the job.
        """
        return self._session

    @property
    def replacement(self) -> bool:
        """
        True in a process that replaces a lost process of its rank. The hooks that Lightning calls
        at the start run again there. So a hook that has an effect outside of the process, such as
        sending a message, should do nothing if `replacement` is True.
        """
        return self._session.incarnation > 0

    # ---------------------------------------------------------------- setting up

    def _configure_launcher(self) -> None:
        """
        Start no processes, because `tft run` has started them.
        """

    def setup_distributed(self) -> None:
        """
        Tell Lightning the number of this rank and the number of ranks. Form no process groups,
        because tft forms them later.
        """
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()

    def setup_environment(self) -> None:
        """
        Set up what needs no process group. Refuse trainers that tft cannot make fault tolerant, and
        make the loggers continue the logs of an earlier process.
        """
        super().setup_environment()
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            self._check_groups(trainer)
            return
        refuse_unsupported(trainer, self, self._session.world)
        if self._driver is not None:
            raise UsageError("one job of tft trains once: call trainer.fit once in the script")
        run_dir: Path = self._session.run_dir
        self._checkpoints = CheckpointLedger(run_dir)
        self._driver = Driver(self._session, trainer, self._checkpoints, self._limit)
        for number, logger in enumerate(trainer.loggers):
            run = f"{run_dir.name}-{number}"
            continue_log(logger, self._agreed.value, self._session.incarnation, run)
            self._driver.watch(logger)

    def _check_groups(self, trainer: Trainer) -> None:
        if not _distributed_is_initialized():
            raise UsageError(
                f"trainer.{trainer.state.fn.value} needs process groups, which tft forms for "
                "trainer.fit: call it after trainer.fit, or in a script without TftStrategy"
            )

    def setup(self, trainer: Trainer) -> None:
        """
        Make the optimizers, and replace the methods of the trainer's loops so that tft drives the
        loops.
        """
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self._driver is not None:
            if len(self.optimizers) != 1:
                raise UsageError(
                    f"configure_optimizers has returned {len(self.optimizers)} optimizers, but "
                    "tft_lightning trains with one: return one optimizer with several parameter groups"
                )
            if trainer.ckpt_path is not None:
                raise UsageError(
                    "trainer.fit was given ckpt_path, and a replacement process would begin there "
                    "again: continue a job with tft run --resume, or load the weights in the script"
                )
            if self._driver.has_begun():
                trainer.num_sanity_val_steps = 0
            self._watch_outputs(self._driver)
            self._driver.install()

    def configure_ddp(self) -> None:
        """
        Wrap nothing yet, because the process groups do not exist.
        """

    def process_dataloader(self, dataloader: object) -> object:
        """
        Make the training loader able to return to a position. Note the objects that the validation
        loaders use.
        """
        trainer = self.lightning_module.trainer
        if self._driver is None or trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        watched = self._driver.watched
        if not trainer.training:
            evaluations.watch(dataloader, watched)
            return dataloader
        progress = trainer.fit_loop.epoch_progress
        return positioned(dataloader, lambda: int(progress.current.processed), watched)

    def adopt(self, session: tft.Session, position: Position) -> None:
        """
        Hand over the training state to tft.
        """
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        scaler = getattr(self.precision_plugin, "scaler", None)
        session.adopt(
            model=self.lightning_module,
            optimizer=self.optimizers[0],
            scheduler=Schedulers(schedulers) if schedulers else None,
            others={} if scaler is None else {"scaler": scaler},
            data=position,
            rng=("torch", "python", "numpy"),
            wrap=self._wrap,
        )

    def _wrap(self) -> Any:
        self.model = self._setup_model(self.lightning_module)
        self._register_ddp_hooks()
        return self.model

    # ---------------------------------------------------------------- training

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """
        Compute the loss of a batch.
        """
        self._depth, self._inside = 0, True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._inside = False

    def _watch_outputs(self, driver: Driver) -> None:
        """
        Make `driver` note what `training_step` returns. This is done by hooks on the module,
        because Lightning calls `training_step` in the module's forward pass. Hooks of DDP, which
        calls the module, would come too late: at the end of DDP's forward pass, the rank-local
        state is captured, and must have the output already.
        """

        def enters(module: Any, inputs: Any) -> None:
            self._depth += 1

        def leaves(module: Any, inputs: Any, output: Any) -> None:
            self._depth -= 1
            # note only the output of the outermost call: within it, the user's training_step may
            # call the module itself
            if self._inside and not self._depth and torch.is_grad_enabled():
                driver.noted(output)

        self.lightning_module.register_forward_pre_hook(enters)
        self.lightning_module.register_forward_hook(leaves)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """
        Compute one step: the gradients and the update.
        """
        update = partial(super().optimizer_step, optimizer, closure, model, **kwargs)
        return update() if self._driver is None else self._driver.step(update)

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """
        Write a checkpoint on rank 0.
        """
        if self._driver is None:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        if self.is_global_zero:
            self._checkpoints.creates(Path(filepath), self._session.step - 1)
        with self._driver.long():
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """
        Wait for all ranks. The wait may take long without a fault, because rank 0 may write a
        checkpoint meanwhile.
        """
        if self._driver is None:
            super().barrier(*args, **kwargs)
            return
        if "pre_setup" in (*args, *kwargs.values()) and not _distributed_is_initialized():
            # Rank 0 comes here only when it has prepared the data. The other ranks wait here for a
            # value of rank 0, and so for the data.
            self._agreed.value(None, "prepared")
        with self._driver.long():
            super().barrier(*args, **kwargs)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """
        Return the tensor reduced over all ranks.
        """
        found = super().reduce(tensor, *args, **kwargs)
        self._check()
        return found

    def _check(self) -> None:
        """
        Wait until the device has carried out the last collective. Raise an exception if the
        collective may have been aborted, because its result is then wrong: a logger would write
        this result, and would not write the row again when the step is repeated.

        Do nothing within `training_step`, because the update window makes this check for what
        `training_step` computes.
        """
        if self._driver is not None and self._driver.computing() and not self._inside:
            self._session.synchronize()

    # ---------------------------------------------------------------- without process groups

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """
        Return `obj` of rank `src`. Before there are process groups, rank 0 writes it to the run
        directory.
        """
        if _distributed_is_initialized():
            found = super().broadcast(obj, src)
            self._check()
            return found
        if src:
            raise UsageError(
                f"a broadcast from rank {src} needs process groups, which exist in the training "
                "loop only: broadcast from rank 0"
            )
        trainer = self.lightning_module.trainer
        return self._agreed.value(obj, "sanity" if trainer.sanity_checking else "")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """
        Return whether all ranks have decided True, or with `all=False` whether any rank has. Before
        there are process groups, return `decision` of this rank.
        """
        if _distributed_is_initialized():
            return bool(super().reduce_boolean_decision(decision, all))
        return decision

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """
        Return the tensors of all ranks. Before there are process groups, return this rank's own
        tensor once for each rank.
        """
        if _distributed_is_initialized():
            found = super().all_gather(tensor, group, sync_grads)
            self._check()
            return found
        return apply_to_collection(
            tensor, Tensor, lambda each: torch.stack([each] * self.world_size)
        )
