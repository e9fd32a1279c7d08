"""
Trainers with something special, which `job.py --special NAME` trains with.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from copy import copy
from typing import Any

import numpy
import torch
from torch.utils.data import WeightedRandomSampler
from transformers import Trainer, TrainerCallback, default_data_collator


class Wrapped(Trainer):  # type: ignore[misc]  # Transformers ships no types
    """
    Computes the loss with `self.model_wrapped` in the place of the argument.
    """

    def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
        chosen = self.model_wrapped if model.training else model
        return super().compute_loss(chosen, inputs, **named)


class Masks:
    """
    A collator that chooses labels with a generator of its own.
    """

    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(3)

    def __call__(self, items: Any) -> Any:
        batch = default_data_collator(items)
        hidden = torch.rand(batch["labels"].shape, generator=self.rng) < 0.3
        return {**batch, "labels": batch["labels"].masked_fill(hidden, -100)}


class Turning(WeightedRandomSampler):
    """
    A sampler whose order also depends on how often it has begun.
    """

    begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        order = list(super().__iter__())
        return iter([*order[self.begun :], *order[: self.begun]])


class Generators(Trainer):  # type: ignore[misc]  # as above
    """
    Has a collator and a sampler with generators of their own, and the sampler counts the epochs. The
    collator serves evaluations, too.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, data_collator=Masks())

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        number = len(self.train_dataset)
        own = torch.Generator().manual_seed(5)
        return Turning([1.0] * number, number, generator=own)


class Counting(Trainer):  # type: ignore[misc]  # as above
    """
    Counts in attributes of its own. The loss depends on one of them, and `log` clears another one.
    """

    _seen = 0

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._last: deque[int] = deque(maxlen=3)
        self._kinds: set[int] = set()
        self._noise = numpy.random.default_rng(3)

    def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
        loss = super().compute_loss(model, inputs, **named)
        if not model.training:
            return loss
        self._seen += 1
        self._metrics["train"]["seen"].append(self._seen)
        self._last.append(self._seen % 5)
        self._kinds.add(self._seen % 7)
        shift = sum(self._last) + len(self._kinds) + self._noise.random()
        return loss * (1 + 0.1 * (self._seen % 3) + 0.001 * shift)

    def log(self, logs: Any, start_time: Any = None) -> None:
        if "loss" in logs:
            logs["batches"] = len(self._metrics["train"]["seen"])
            self._metrics["train"].clear()
        super().log(logs, start_time)


class Halves(TrainerCallback):  # type: ignore[misc]  # as above
    """
    Halves the gradients between micro-batches.
    """

    def on_substep_end(self, *_: Any, model: Any, **named: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)


class Halving(Trainer):  # type: ignore[misc]  # as above
    """
    Has a callback that changes gradients between micro-batches.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.add_callback(Halves)


class Evaluating(Trainer):  # type: ignore[misc]  # as above
    """
    Has a callback that evaluates at the end of an epoch.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        outer = self

        class Evaluates(TrainerCallback):  # type: ignore[misc]  # as above
            def on_epoch_end(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
                before = copy(control)  # an evaluation changes what the Trainer wants
                outer.evaluate(metric_key_prefix="mine")
                return before

        self.add_callback(Evaluates)


class Shrinks(TrainerCallback):  # type: ignore[misc]  # as above
    """
    Makes all parameters smaller behind the update.
    """

    @torch.no_grad()
    def on_optimizer_step(self, *_: Any, model: Any, **named: Any) -> None:
        for parameter in model.parameters():
            parameter.mul_(0.99)


class Shrinking(Trainer):  # type: ignore[misc]  # as above
    """
    Has a callback that changes parameters.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.add_callback(Shrinks)


SPECIALS = {
    "": Trainer,
    "wrapped": Wrapped,
    "generators": Generators,
    "counting": Counting,
    "halving": Halving,
    "evaluating": Evaluating,
    "shrinking": Shrinking,
}
