"""
Overrides small methods of the `Trainer`, so that its loop survives incidents. The overrides only
call the class `Training` in `training.py`, which does the work.
"""

from functools import partial
from typing import Any

from transformers import Trainer

from tft import Session
from tft.errors import UsageError
from tft_transformers.training import ENTERED, Training
from tft_transformers.wrapping import without_ddp


class FaultTolerant(Trainer):  # type: ignore[misc]  # Transformers ships no types
    """
    Base class that overrides those methods of a Trainer that make up a step or that communicate
    with other ranks. Each override calls the same method of the user's Trainer as an operation,
    which can be repeated after an incident.
    """

    _tft: Training
    _batches = 0
    """The number of micro-batches of the present step."""
    _computed = 0
    """The number of micro-batches of the present step that were computed so far."""

    # ------------------------------------------------------------ begin and end

    def train(self, *arguments: Any, **named: Any) -> Any:
        training: Any = self._tft
        if training.entered:
            raise UsageError(
                "trainer.train() was called a second time: the job ends with the first training. "
                "Train further in another job"
            )
        try:
            return super().train(*arguments, **named)
        except Exception as error:
            if training.entered and not training.finished:
                training.fail(error)
            raise

    def hyperparameter_search(self, *arguments: Any, **named: Any) -> Any:
        raise UsageError("hyperparameter_search is not supported with tft: train without it")

    def _init_training_state(self, *arguments: Any, **named: Any) -> Any:
        epochs, batches = super()._init_training_state(*arguments, **named)
        self._tft.book.epoch = epochs
        self._tft.book.done = batches // self.args.gradient_accumulation_steps
        # The number of the first epoch is known only after `Training.enter`, which is called later.
        # So return an object that looks the number up when it is used.
        return _FirstEpoch(self._tft), batches

    def _prepare_for_training(self, max_steps: Any, loader: Any, checkpoint: Any) -> Any:
        training = self._tft
        begin = training.book.epoch, training.book.done
        with without_ddp(self.accelerator):
            prepared = super()._prepare_for_training(max_steps, loader, checkpoint)
        training.enter(prepared[1], *begin)
        return prepared

    def _finalize_training(self, *arguments: Any, **named: Any) -> Any:
        self._tft.finish()
        return super()._finalize_training(*arguments, **named)

    def _run_epoch(self, **given: Any) -> None:
        self._tft.run_epoch(super()._run_epoch, given)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint is not ENTERED:
            super()._load_rng_state(checkpoint)

    # ------------------------------------------------------------ a step

    def get_batch_samples(self, iterator: Any, number: int, device: Any) -> Any:
        count = super().get_batch_samples
        found = self._tft.fetch(lambda batches: count(batches, number, device), number)
        self._batches, self._computed = len(found[0]), 0
        return found

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        step = super().training_step
        self._computed += 1
        last = self._computed == self._batches
        return self._tft.compute(
            lambda wrapped: step(wrapped, _copied(inputs), num_items_in_batch), last=last
        )

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self._tft.steps.perform(partial(super()._track_num_input_tokens, inputs), None)
        if self._computed < self._batches:
            self._tft.repeats_callback("on_substep_end")  # the loop calls this callback next

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._tft.norm(partial(super()._clip_grad_norm, model))

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = self._tft.norm(partial(super()._get_grad_norm, model, grad_norm=grad_norm))
        self._tft.repeats_callback("on_pre_optimizer_step")  # the loop calls this callback next
        return norm

    # ------------------------------------------------------------ after a step

    def _get_learning_rate(self) -> Any:
        self._tft.check_parameters()  # the loop calls this right after on_optimizer_step
        return super()._get_learning_rate()

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *arguments: Any, learning_rate: Any = None
    ) -> None:
        training, own = self._tft, super()._maybe_log_save_evaluate
        if training.in_tail:
            training.end_step(
                lambda losses: own(losses, grad_norm, *arguments, learning_rate=learning_rate),
                (grad_norm, learning_rate),
            )
        # Take gradient norm and learning rate from the bookkeeping. If other ranks have completed
        # the step without this process, the loop in this process does not know them.
        self._afterwards(self._tr_loss, *training.book.facts, *arguments)

    def _afterwards(
        self, tr_loss: Any, grad_norm: Any, rate: Any, *arguments: Any, **named: Any
    ) -> None:
        training, own, control = self._tft, super()._maybe_log_save_evaluate, self.control
        if training.session.over:
            return
        if control.should_log or control.should_evaluate or control.should_save:

            def work() -> None:
                training.log(
                    lambda losses: own(losses, grad_norm, *arguments, learning_rate=rate, **named)
                )
                self.control.should_log = False
                own(tr_loss, grad_norm, *arguments, **named)

            training.afterwards(work)

    def _evaluate(self, *arguments: Any, **named: Any) -> Any:
        evaluate = partial(super()._evaluate, *arguments, **named)
        if self._tft.steps.inside:
            return evaluate()
        # the evaluation before the first step (`eval_on_start`)
        return {} if self._tft.session.step > 1 else self._tft.afterwards(evaluate)

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        found = super().evaluation_loop(*arguments, **named)
        # check now, before the Trainer logs the metrics and decides by them which checkpoints it
        # removes
        self._tft.steps.check()
        return found

    def evaluate(self, *arguments: Any, **named: Any) -> Any:
        return self._tft.protected(partial(super().evaluate, *arguments, **named))

    def predict(self, *arguments: Any, **named: Any) -> Any:
        return self._tft.protected(partial(super().predict, *arguments, **named))

    def store_flos(self) -> None:
        self.state.total_flos += self._tft.book.take_operations()


def make_fault_tolerant(trainer: Any, session: Session, limit: float) -> None:
    """
    Make `trainer` survive incidents in its `train()`. `limit` is as in `Training`.
    """
    kind = type(trainer)
    bases = (FaultTolerant,) if kind is Trainer else (FaultTolerant, kind)
    trainer.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
    trainer._tft = Training(session, trainer, limit)


class _FirstEpoch:
    """
    Stands for the number of the first epoch of this process, where the Trainer's loop expects a
    number. The number is looked up only when it is used, because it is not known when the object is
    made.
    """

    def __init__(self, training: Training) -> None:
        self._training = training

    def __index__(self) -> int:
        return self._training.first_epoch

    def __str__(self) -> str:
        return str(self._training.first_epoch)


def _copied(inputs: Any) -> Any:
    """
    Return a copy of a micro-batch with the same tensors, because the loss may remove entries from
    it.
    """
    return (
        dict(inputs)
        if type(inputs) is dict
        else inputs.copy()
        if hasattr(inputs, "copy")
        else inputs
    )
