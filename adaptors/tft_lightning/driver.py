"""
Runs the loops of `trainer.fit` in a tft session. tft calls the loops again after each incident, and
they continue right after the last optimizer step that all ranks have completed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.trainer import call
from tft_pytorch.generators import generators, restore

from tft import Session
from tft.errors import JobEnded, UsageError
from tft_lightning import evaluations
from tft_lightning.checkpoints import CheckpointLedger, Writer
from tft_lightning.hook_changes import HookChanges
from tft_lightning.kept_attributes import KeptAttributes
from tft_lightning.loaders import reader_of
from tft_lightning.logs import LogLedger
from tft_lightning.outputs import PartialOutput
from tft_lightning.owners import Watched
from tft_lightning.position import Position

Trainer = Any  # Lightning's own types are not visible to mypy here


class Driver:
    """
    Drives the loops of one trainer. Methods of this class replace the method `run` of the trainer's
    fit loop and epoch loop.
    """

    def __init__(
        self,
        session: Session,
        trainer: Trainer,
        checkpoints: CheckpointLedger,
        limit: float,
    ) -> None:
        self._limit = limit
        self._long = 0
        self._session = session
        self._trainer = trainer
        self._ledger = LogLedger(session.run_dir, session.rank, self.computing)
        self._begun = session.run_dir / "lightning" / f"begun-{session.rank}"
        self._checkpoints = checkpoints
        self._position: Position | None = None
        self._opened = False
        self._behind: dict[str, Any] | None = None
        """The state to which the loop has gone back, if this is the state right after an optimizer
        step. The loop must then first do what Lightning does after an optimizer step, such as
        calling callbacks. None if the loop begins with the next batch."""
        self._last: tuple[int, Any, int, Any] | None = None
        """The last step that this process has completed, with its batch, the batch's number and the
        output of `training_step`."""

    def watch(self, logger: Any) -> None:  # Any: a logger of Lightning
        """
        Make `logger` write each row only once, although the loop logs it again when a step is
        repeated.
        """
        self._ledger.watch(logger)

    def install(self) -> None:
        """
        Replace methods of the trainer by methods of this class, such as `run` of its loops. Also
        remove the broadcast about SIGTERM that Lightning makes before each batch: it ignores all
        exceptions, so it would hide that another rank has died.
        """
        trainer = self._trainer
        self._kept = KeptAttributes(trainer)
        self.watched = Watched(trainer.strategy.root_device)
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        fit.run, epoch.run = self.run, self._run_epoch
        epoch._broadcast_sigterm_tensor = lambda: None
        trainer._signal_connector.register_signal_handlers = lambda: None
        plugin = trainer.precision_plugin
        native = plugin._after_closure
        changes = HookChanges(self._session, trainer)

        def after_closure(*args: Any, **kwargs: Any) -> None:
            if self._opened:
                raise UsageError(
                    "the optimizer has computed the loss of a batch several times in one step, as "
                    "LBFGS does: the all-reduces would be inside the update window. Use an "
                    "optimizer that computes the loss once in a step"
                )
            with changes.seen():
                native(*args, **kwargs)
            self._session.open_window()
            self._opened = True

        plugin._after_closure = after_closure
        optimization = epoch.automatic_optimization
        optimizes = optimization._optimizer_step

        def optimizer_step(*args: Any, **kwargs: Any) -> None:
            optimizes(*args, **kwargs)
            if self._opened:
                self._end_step()

        optimization._optimizer_step = optimizer_step
        for callback in trainer.callbacks:
            self._checkpoints.watch(callback)

    def has_begun(self) -> bool:
        """
        Return True if training has begun in an earlier process of this rank. Then this process must
        skip the sanity check: it gets the rank-local state of the earlier process, which the sanity
        check has changed already.
        """
        return self._session.incarnation > 0 and self._begun.exists()

    def computing(self) -> int:
        """
        Return the step that is being computed, 0 before training.
        """
        return 0 if self._position is None else self._session.step

    @contextmanager
    def long(self) -> Iterator[None]:
        """
        Tell tft for the time of the `with` block that this rank is in a phase without steps, such
        as a validation. In this phase the rank counts as hanging only after `limit` seconds.
        """
        if self._position is None:
            yield
            return
        self._long += 1
        self._session.expect(self._limit)
        try:
            yield
        finally:
            self._long -= 1
        if not self._long:
            self._session.expect(0.0)

    # ---------------------------------------------------------------- one optimizer step

    def noted(self, output: Any) -> None:  # Any: what the user's training_step has returned
        """
        Note the output of `training_step`, because callbacks get it after the step.
        """
        if self._position is not None:
            self._position.computed(output)

    def step(self, update: Callable[[], Any]) -> Any:
        """
        Call `update`, which computes the gradients and changes the state, as one step of tft. The
        step ends later, when the hook `optimizer_step` of the module has returned, because this
        hook may set the learning rate after the update.
        """
        self._opened = False
        result = update()
        if not self._opened:
            raise UsageError(
                "an optimizer step of Lightning has ended without gradients, so tft cannot count "
                "it: training_step must return a loss for each batch"
            )
        self._session.close_window()
        return result

    def _end_step(self) -> None:
        self._opened = False
        loop = self._trainer.fit_loop.epoch_loop
        position = self._position
        assert position is not None
        self._last = (
            self._session.step - 1, loop._results.batch, loop.batch_idx, position.output
        )  # fmt: skip
        self._reader.trim(loop.batch_progress.current.ready)
        position.report(self._session)
        self._session.end_step()

    # ---------------------------------------------------------------- the loops

    @property
    def _reader(self) -> Any:
        return reader_of(self._trainer.fit_loop._combined_loader.flattened[0])

    def run(self) -> None:
        """
        Run the fit loop. Return when all ranks have trained to the end. Replaces the method `run`
        of Lightning's fit loop.
        """
        fit = self._trainer.fit_loop
        if self._session.incarnation > 0:
            evaluations.set_up(self._trainer)
        fit.setup_data()
        if fit._combined_loader is None or len(fit._combined_loader.flattened) != 1:
            raise UsageError(
                "tft keeps the position of one training loader: return one DataLoader from "
                "train_dataloader"
            )
        skip = fit.skip
        if not skip:
            fit.reset()
            fit.on_run_start()
        self._position = Position(self._trainer, self._kept, self.watched)
        self._trainer.strategy.adopt(self._session, self._position)
        place = self._session.export()
        if place is not None:
            self._session.run(partial(self._write, place))
            raise JobEnded(0)
        self._session.run(self._nothing if skip else self._train)
        self._position = None
        self._ledger.ends()
        fit._restarting = False

    def _nothing(self, session: Session) -> None:
        pass

    def _write(self, place: Path, session: Session) -> None:
        """
        Write a checkpoint of Lightning under `place`, as `ModelCheckpoint` would write it now.
        """
        # before the first step, this call ends no step: it only tells tft that this loop marks the
        # ends of its steps
        session.end_step()
        writer = Writer(place / f"step-{session.step - 1}.ckpt")
        try:
            with writer.among(self._trainer.callbacks):
                if self._go_back():
                    self._trainer.fit_loop.advance()
                writer.write(self._trainer)
        finally:
            self._let_go()

    def _train(self, session: Session) -> None:
        self._begun.touch()
        # before the first step, this call ends no step: it only tells tft that this loop marks the
        # ends of its steps
        session.end_step()
        try:
            self._steps()
        finally:
            self._let_go()

    def _steps(self) -> None:
        fit = self._trainer.fit_loop
        resumed = self._go_back()
        while resumed or not fit.done:
            try:
                if not resumed:
                    with self.long():
                        fit.on_advance_start()
                resumed = False
                fit.advance()
                with self.long():
                    fit.on_advance_end()
            except StopIteration:
                break
            finally:
                fit.on_iteration_done()
        with self.long():
            fit.on_run_end()

    def _run_epoch(self, fetcher: Any) -> None:
        epoch = self._trainer.fit_loop.epoch_loop
        behind, self._behind = self._behind, None
        if behind is None:
            with self.long():
                epoch.reset()
                epoch.on_run_start(fetcher)
            assert self._position is not None
            self._position.epoch_begins()
        while behind is not None or not epoch.done:
            try:
                if behind is None:
                    epoch.advance(fetcher)
                else:
                    state, behind = behind, None
                    self._conclude(fetcher, state)
                with self.long():
                    epoch.on_advance_end(fetcher)
            except StopIteration:
                break
            finally:
                epoch.on_iteration_done()

    def _let_go(self) -> None:
        """
        Drop the references to the wrapper of the model (such as DDP), because its process groups
        may be lost.
        """
        module = self._trainer.lightning_module
        self._trainer.strategy.model = module
        # Lightning replaces `forward` for the time of a forward pass of the wrapper
        with suppress(KeyError):
            vars(module).pop("forward")

    # ---------------------------------------------------------------- after an incident

    def _go_back(self) -> bool:
        """
        Restore the state from which all ranks continue. Return True if the loop must continue right
        after the optimizer step of a batch. Return False if it must begin with the first step,
        because no step is complete.
        """
        assert self._position is not None
        session, trainer = self._session, self._trainer
        self._checkpoints.goes_on(session.step - 1)
        self._ledger.goes_on()
        trainer.strategy.model = session.model
        state = self._position.go_back()
        if state is None or not state["batch"]:
            # no step is complete: take the first batch again
            self._seek(trainer.fit_loop._data_fetcher, 0)
            return False
        self._behind = state
        return True

    def _conclude(self, fetcher: Any, state: Any) -> None:
        """
        Do the work that Lightning does for a batch after its optimizer step, such as calling the
        callbacks.
        """
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop
        drawn = generators(trainer.strategy.root_device)
        with self.long():
            batch, number, output = self._last_batch(fetcher, state)
        connector = trainer._logger_connector
        loop._results.batch = batch
        loop._results.batch_size = None
        restore(drawn, trainer.strategy.root_device)
        _complete(loop.automatic_optimization.optim_progress.optimizer)
        loop.batch_progress.increment_processed()
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        call._call_callback_hooks(trainer, "on_train_batch_end", output, batch, number)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", output, batch, number)
        connector.on_batch_end()
        loop.batch_progress.increment_completed()
        connector.update_train_step_metrics()

    def _last_batch(self, fetcher: Any, state: Any) -> tuple[Any, int, Any]:
        """
        Return the last trained batch, its number in the epoch, and the output of `training_step`
        for it. The next batch that `fetcher` returns is the batch after it.
        """
        trainer = self._trainer
        fit = trainer.fit_loop
        number = fit.epoch_loop.batch_idx
        epoch = fit.epoch_progress.current.processed
        _set_sampler_epoch(fit._combined_loader.flattened[0], epoch)
        last = self._last
        if last is not None and last[0] == self._session.step - 1:
            self._seek(fetcher, number + 1)
            return last[1:]
        self._seek(fetcher, number, again=True)
        batch, _, _ = next(fetcher)
        self._reader.was_read_again()
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        assert self._position is not None
        self._position.batch_read_again()
        output, left_out = state["output"], state.get("left_out")
        return batch, number, PartialOutput(output, left_out) if left_out else output

    def _seek(self, fetcher: Any, number: int, *, again: bool = False) -> None:
        epoch = self._trainer.fit_loop.epoch_loop
        self._reader.seek(number, again=again)
        iter(fetcher)
        fetcher.fetched += number
        if fetcher.length is not None:
            fetcher.done = fetcher.fetched >= fetcher.length
        fetcher.combined_loader._iterator._idx = number
        fetcher._start_profiler = epoch._on_before_fetch
        fetcher._stop_profiler = epoch._on_after_fetch


def _complete(progress: Any) -> None:  # Any: the counters of the optimizer have no types here
    """
    Count an optimizer step as complete in `progress`, Lightning's counters. The counters may have
    been noted before the gradients of this step were set to zero. Gradients are set to zero once in
    each step. So set the counters of zeroing to those of complete steps.
    """
    progress.step.increment_completed()
    for zeroed, step in (
        (progress.zero_grad.total, progress.step.total),
        (progress.zero_grad.current, progress.step.current),
    ):
        zeroed.ready = zeroed.started = zeroed.completed = step.completed
