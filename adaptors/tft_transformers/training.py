"""
Trains with a Trainer in a tft job. The methods that `trainer.py` overrides call the class
`Training` of this module.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers.trainer
from tft_pytorch.generators import generators, restore
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tft import Session
from tft.errors import JobEnded, UsageError
from tft_transformers.batches import Source
from tft_transformers.bookkeeping import Bookkeeping
from tft_transformers.local import Local
from tft_transformers.standin import stand_aside
from tft_transformers.steps import Rewound, Steps
from tft_transformers.told import Told
from tft_transformers.wrapping import wrapper

_CHECKED = 20
"""The number of steps at the beginning of a process in which tft checks that callbacks do not
change parameters."""

ENTERED: Any = object()
"""Stands for the path of a checkpoint to resume from, if the Trainer already has its state from
tft."""


class Training:
    """
    The training of one Trainer. It begins when `enter` is called, and ends when `finish` returns.
    """

    def __init__(self, session: Session, trainer: Any, limit: float) -> None:
        """
        `trainer` is a `transformers.Trainer`, which has no types. An evaluation or a checkpoint may
        take `limit` seconds before a rank counts as one that hangs.
        """
        self._limit = limit
        self.session = session
        self.book = Bookkeeping(trainer, session.rank, session.world)
        self._surroundings = TrainerSurroundings(trainer, self.book)
        self.steps = Steps(session, self._surroundings)
        self.in_tail = False
        """True from the end of the update window to the end of the step."""
        self.entered = self.finished = False
        self._enters = False
        """True if the next epoch is one that was begun before, by a lost process or before an
        incident. This process then continues it after the last complete step."""
        self._begins = True
        """True until this process enters an epoch for the first time."""
        self._first = self._batches_in_epoch = 0
        self._updated: list[int] = []
        """How often each parameter had been changed in place when the update of this step was
        complete. Empty if the step is not checked for changes by callbacks."""
        self._unchecked = _CHECKED
        self._export: Path | None = None
        self._told = Told(session.run_dir, session.rank)
        self._trainer = trainer
        self._source: Source | None = None
        self._local: Local | None = None

    @property
    def source(self) -> Source:
        """
        The batches of this rank.
        """
        assert self._source is not None, "training has not begun"
        return self._source

    @property
    def first_epoch(self) -> int:
        """
        The epoch in which this process begins.
        """
        return self._first

    # ------------------------------------------------------------ begin and end

    def enter(self, loader: Any, epoch: int, done: int) -> None:
        """
        Hand over the state to tft and join the training. `loader` is the Trainer's data loader. The
        Trainer by itself would begin in the epoch `epoch`, of which `done` steps are done. A
        replacement process takes over another position.
        """
        trainer, book = self._trainer, self.book
        self._source = Source(loader)
        self._local = self._surroundings.local = Local(self._source, trainer)
        optimizer = trainer.optimizer.optimizer
        scaler = trainer.accelerator.scaler
        book.epoch, book.done = epoch, done
        book.end_step()
        stand_aside()
        self.session.adopt(
            model=trainer.model,
            optimizer=optimizer,
            scheduler=trainer.lr_scheduler,
            others={"trainer": book} | ({} if scaler is None else {"scaler": scaler}),
            data=self._local,
            rng=("torch", "python", "numpy"),
            wrap=wrapper(trainer.accelerator, trainer.model),
        )
        _guard(trainer.optimizer, self.update)
        self._export = self.session.export()
        self.steps.enter()
        self.entered = True
        self._enters = self.session.step > 1
        if self._enters:
            book.settle()
        else:
            self._told.write(0)
        self._first = book.epoch

    def finish(self) -> None:
        """
        Return when all ranks have ended their loops. Raises `Rewound` if all ranks go back instead.
        """
        if not self.finished:
            self.steps.perform(self.book.agree, None)
            self.steps.finish()
            self.finished = True

    def fail(self, error: BaseException) -> None:
        """
        Report an exception that the Trainer, or a callback, has raised between two operations.

        If the exception was raised after the update window, first complete the state of the step:
        the scheduler and the counters. Otherwise a last checkpoint that is written now would lack
        them. Returns if the job goes on: then the caller must end this process. Raises
        `tft.JobEnded` if the job ends.
        """
        if self.in_tail and not self.steps.skips:
            trainer, batches = self._trainer, self._batches_in_epoch
            self.book.done += 1
            if trainer.state.global_step == self.book.ended_step:
                if not trainer.accelerator.optimizer_step_was_skipped:
                    trainer.lr_scheduler.step()
                trainer.state.global_step += 1
                taken = min(self.book.done * trainer.args.gradient_accumulation_steps, batches)
                trainer.state.epoch = self.book.epoch + taken / batches
            self.book.end_step()
        self.steps.fail(error)

    # ------------------------------------------------------------ epochs

    def run_epoch(self, run: Callable[..., None], given: dict[str, Any]) -> None:
        """
        Train an epoch by calling `run(**given)`. If all ranks go back to a step of an earlier
        epoch, also train again from that epoch on.
        """
        trainer, last = self._trainer, given["epoch"]
        given = {**given, "epochs_trained": self._first}
        self._batches_in_epoch = given["steps_in_epoch"]
        number = last
        while True:
            try:
                while number <= last:
                    self._run(run, {**given, "epoch": number})
                    if trainer.control.should_training_stop:
                        break
                    number += 1
                    if number <= last:
                        self._begin_epoch()
                if (
                    trainer.control.should_training_stop
                    or last == trainer.state.num_train_epochs - 1
                ):
                    self.finish()
                return
            except Rewound:
                self.steps.forget()
                self.in_tail = False
                self.book.settle()
                self._told.write(self.session.step - 1)
                self._enters, number = True, self.book.epoch

    def _begin_epoch(self) -> None:
        trainer = self._trainer
        trainer.control = trainer.callback_handler.on_epoch_begin(
            trainer.args, trainer.state, trainer.control
        )

    def _run(self, run: Callable[..., None], given: dict[str, Any]) -> None:
        epoch, each = given["epoch"], self._trainer.args.gradient_accumulation_steps
        first, self._begins = self._begins, False
        if not self._enters:
            taken = 0
            # only the first epoch of the process continues from the Trainer's checkpoint
            if not first:
                given = {**given, "resume_from_checkpoint": None}
            elif given["resume_from_checkpoint"] is not None:
                taken = given["steps_trained_in_current_epoch"]
            self.book.epoch, self.book.done = epoch, taken // each
            self.source.begin(epoch, taken)
            run(**given)
            return
        self._enters = False
        self._tell()
        if self._export is not None:
            self._write(self._export, given)
        self.evaluate_and_save(given)
        control, done = self._trainer.control, self.book.done
        if control.should_epoch_stop or control.should_training_stop or self.session.over:
            done = given["num_update_steps_per_epoch"]
        entry = {
            "epochs_trained": epoch,
            "steps_trained_in_current_epoch": done * each,
            "resume_from_checkpoint": ENTERED,
        }
        run(**{**given, **entry})

    def _write(self, place: Path, given: dict[str, Any]) -> NoReturn:
        """
        Write a checkpoint of the Trainer under `place`, and end the job. If an evaluation is due
        after the last step, it is made before the checkpoint is written, as the Trainer does in
        each training.
        """
        self._trainer.args.output_dir = str(place)
        self._trainer.control.should_save = True
        self.evaluate_and_save(given)
        self.finish()
        raise JobEnded(0)

    def _tell(self) -> None:
        """
        Put the bookkeeping of the end of the last step into the Trainer. Called when the Trainer of
        this process has begun its training. Call the callbacks of that step if the lost process has
        not called them.
        """
        trainer, step = self._trainer, self.session.step - 1
        told = self._told.read() >= step
        self._settle(told=told)
        if not told:
            handler = trainer.callback_handler
            for call in (handler.on_optimizer_step, handler.on_step_end):
                call(trainer.args, trainer.state, trainer.control)
            self.book.settle()
        self._told.write(step)

    def _settle(self, *, told: bool = False) -> None:
        """
        Put received bookkeeping and rank-local state into the Trainer.

        The rank-local state was captured before the step was logged. The user's method `log` may
        change attributes of the Trainer when it logs. So `log` is called again for the step,
        without callbacks.
        """
        assert self._local is not None, "training has not begun"
        self.book.settle(told=told)
        self._local.settle()
        logged = self.book.logged_last()
        if logged is not None:
            with self._surroundings.muted():
                self._trainer.log(logged)
            self.book.settle(told=told)

    # ------------------------------------------------------------ the operations of a step

    def fetch(self, count: Callable[[Iterator[Any]], Any], number: int) -> Any:
        """
        Read up to `number` micro-batches for a step, and return `count(batches)`. The function
        `count` counts their items over all ranks, so the ranks communicate in it.
        """
        source = self.source
        before = after = source.position
        kept: list[Any] | None = None
        versions: list[int] = []
        drawn: Any = None

        def take() -> Any:
            nonlocal kept, after, drawn
            if kept is None:
                source.position = before
                kept = list(self._take(number))
                versions.extend(_versions(kept))
                after, drawn = source.position, source.owners.drawn()
            elif versions != _versions(kept):
                raise UsageError(
                    "the step cannot be repeated, because the loss changes a tensor of its batch in "
                    "place: let compute_loss change a copy"
                )
            source.position = after
            # Reading the items may have drawn random numbers, and a repetition does not read the
            # items again. So set the generators to their states after the reading.
            source.owners.restore(drawn)
            self.book.agree()
            return count(iter(kept))

        return self.steps.perform(take, None)

    def _take(self, number: int) -> Iterator[Any]:
        for _ in range(number):
            try:
                yield self.source.next()
            except StopIteration:
                return

    def compute(self, function: Callable[[Any], Tensor], *, last: bool) -> Tensor:
        """
        Compute the gradients of a micro-batch by `function(model)`, and return its loss. Gradients
        are reduced only in the last micro-batch of the step, unless accelerate has
        `sync_each_batch` set.
        """
        trainer = self._trainer
        each = trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)

        def work() -> Tensor:
            model: Any = self.session.model
            with (
                _wraps(trainer, model),
                nullcontext() if last or each else model.no_sync(),
            ):
                return function(model)

        return self.steps.perform(work, torch.zeros((), device=trainer.args.device))

    def norm(self, function: Callable[[], Any]) -> Any:  # Any: a tensor, a number, or None
        """
        Call `function`, which computes the norm of the gradients and may clip them. Return the
        norm.
        """
        return self.steps.perform(function, torch.zeros((), device=self._trainer.args.device))

    def repeats_callback(self, name: str) -> None:
        """
        Arrange that the callbacks' method `name`, such as `on_substep_end`, is called again when
        the step is repeated. The reason: the method may change gradients, which a repetition
        computes again.
        """
        trainer = self._trainer

        def again() -> None:
            call = getattr(trainer.callback_handler, name)
            call(trainer.args, trainer.state, trainer.control)

        self.steps.also_repeat(again)

    def update(self, step: Callable[[], object]) -> None:
        """
        Update the parameters: call `step()` in the update window.
        """
        optimizer = self._trainer.optimizer

        def work() -> None:
            self.book.exchange()
            optimizer._accelerate_step_called = optimizer._is_overflow = False
            with self.session.update():
                step()

        # no further wait is needed, because opening and closing the update window waits already
        self.steps.perform(work, None, waits=False)
        self.in_tail = True
        if self._unchecked and not self.steps.skips:
            self._unchecked -= 1
            self._updated = self._changes()
        if self.steps.skips:
            # The state of this step has come from another rank, where the scheduler has made its
            # step already, so the scheduler must not make a step here. The Trainer does not call
            # the scheduler if the step counts as an overflow, so let it count as one.
            optimizer._is_overflow = True

    # ------------------------------------------------------------ after a step

    def check_parameters(self) -> None:
        """
        Raise `UsageError` if a callback has changed parameters after the update. After an incident
        such a callback may run twice, or not at all on a replacement process.
        """
        noted, self._updated = self._updated, []
        if noted and noted != self._changes():
            raise UsageError(
                "a callback changes parameters in on_optimizer_step, so ranks would differ after an "
                "incident: change them in a hook of the optimizer (register_step_post_hook), or "
                "change gradients in on_pre_optimizer_step"
            )

    def _changes(self) -> list[int]:
        return [parameter._version for parameter in self._trainer.model.parameters()]

    def end_step(self, log: Callable[[Tensor], None], facts: Sequence[Any]) -> None:
        """
        End the step. `log` is a function that takes the losses, and logs them if the Trainer wants
        to log now. `facts` are the norm of the gradients and the learning rate, which the Trainer
        may log again at the end of the epoch.
        """
        if self.steps.skips:
            self._trainer.optimizer._is_overflow = False
            self._settle()
        else:
            self.book.facts = tuple(facts)
            self.log(log)
            self.book.done += 1
            self.book.end_step()
        self.in_tail = False
        self._told.write(self.session.step - 1)
        self.steps.end_step()
        if self.session.over:
            self._trainer.control.should_training_stop = True

    def log(self, log: Callable[[Tensor], None]) -> None:
        """
        Let the Trainer log the losses of all ranks if it wants to, but not evaluate or save.
        """
        trainer = self._trainer
        control, before = trainer.control, trainer._globalstep_last_logged
        wanted = control.should_evaluate, control.should_save
        control.should_evaluate = control.should_save = False
        try:
            with _gathered():
                log(self.book.losses())
        finally:  # also if a callback has raised an exception
            trainer.control.should_evaluate, trainer.control.should_save = wanted
            if trainer._globalstep_last_logged != before:
                self.book.logged()

    def afterwards(self, function: Callable[[], Any]) -> Any:
        """
        Call `function`, which evaluates or writes a checkpoint, as an operation: all ranks call it
        again if a fault comes before the next update window.
        """

        def work() -> Any:
            self.session.expect(self._limit)
            self.book.agree()
            result = function()
            self.session.expect(0.0)
            return result

        return self.steps.perform(work, {})

    def protected(self, function: Callable[[], Any]) -> Any:
        """
        Call `function`, which evaluates or predicts. If a callback asks for this between two
        operations, for example in `on_epoch_end`, it becomes an operation, so that it is repeated
        after a fault. Between the update window and the end of the step it does not become an
        operation, because no rank may wait for other ranks there.
        """
        if not self.entered or self.finished or self.in_tail or self.steps.inside:
            return function()
        return self.afterwards(function)

    def evaluate_and_save(self, given: dict[str, Any]) -> None:
        """
        Evaluate and save a checkpoint, if the Trainer would do so after the last complete step.
        Called in a process that joins training after that step. All other ranks repeat this
        operation, and its collectives need all ranks.
        """
        names = ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")
        trainer = self._trainer
        trainer._afterwards(trainer._tr_loss, *self.book.facts, **{n: given[n] for n in names})


class TrainerSurroundings:
    """
    Notes and restores what operations depend on: random generators, settings of the optimizer,
    bookkeeping, and whether accelerate takes the present micro-batch for the last one of its step.
    Implements `tft_transformers.steps.Surroundings`.
    """

    def __init__(self, trainer: Any, book: Bookkeeping) -> None:
        self._trainer = trainer
        self._book = book
        self.local: Local | None = None
        """The rank-local state. None before training has begun."""

    def noted(self) -> Any:
        groups = self._trainer.optimizer.param_groups
        settings = [{n: _kept(v) for n, v in g.items() if n != "params"} for g in groups]
        random = generators(self._trainer.args.device)
        last = self._trainer.accelerator.sync_gradients
        local = None if self.local is None else self.local.noted()
        return random, settings, last, local, self._book.noted()

    def put_back(self, noted: Any, *, only_bookkeeping: bool = False) -> None:
        random, settings, last, local, book = noted
        self._book.put_back(book)
        if only_bookkeeping:
            return
        restore(random, self._trainer.args.device)
        if self.local is not None and local is not None:
            self.local.put_back(local)
        self._trainer.accelerator.gradient_state._set_sync_gradients(last)
        for group, kept in zip(self._trainer.optimizer.param_groups, settings, strict=True):
            for name, value in kept.items():
                if isinstance(value, Tensor) and isinstance(group[name], Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value

    def report(self, session: Session) -> None:
        """
        Report attributes of the Trainer that change and are not kept.
        """
        if self.local is not None:
            self.local.report(session)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """
        Within the `with` block, call only callbacks that have a state, which is restored afterwards.
        """
        handler = self._trainer.callback_handler
        quiet = copy(handler)
        quiet.callbacks = self._book.stateful()
        self._trainer.callback_handler = quiet
        try:
            yield
        finally:
            self._trainer.callback_handler = handler


@contextmanager
def _wraps(trainer: Any, model: Any) -> Iterator[None]:
    """
    Within the `with` block, `trainer.model_wrapped` is `model`, the DDP, because `compute_loss` may
    use this attribute. At the end of the block the trainer drops its reference to the DDP, because
    every incident replaces it.
    """
    trainer.model_wrapped = model
    try:
        yield
    finally:
        trainer.model_wrapped = trainer.model


@contextmanager
def _gathered() -> Iterator[None]:
    """
    Replace the function by which the Trainer gathers losses from all ranks, within the `with`
    block. The Trainer gets the losses of all ranks beforehand, because at the end of a step no rank
    may wait for another rank.
    """
    gather = transformers.trainer.nested_gather
    transformers.trainer.nested_gather = lambda tensors, *more: tensors
    try:
        yield
    finally:
        transformers.trainer.nested_gather = gather


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _versions(batches: list[Any]) -> list[int]:
    """
    Return how often each tensor in the batches was changed in place.
    """
    plain = [dict(each) if hasattr(each, "keys") else each for each in batches]
    return [leaf._version for leaf in tree_leaves(plain) if isinstance(leaf, Tensor)]


def _guard(optimizer: Any, update: Callable[[Callable[[], object]], None]) -> None:
    """
    Replace the method `step` of `optimizer` by a function that calls `update(step)`, where `step`
    is the original method.
    """
    step = optimizer.step

    # copies the attributes of `step`: by one of them, torch's schedulers recognize a method that
    # they have wrapped
    @wraps(step)
    def guarded(closure: Any = None) -> None:
        if closure is not None:
            raise UsageError("the optimizer was called with a closure, which tft does not support")
        update(step)

    optimizer.step = guarded
