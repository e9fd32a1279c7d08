"""
Trainers with something special, which `job.py --special NAME` trains with.
"""

from typing import Any

from transformers import Trainer


class Wrapped(Trainer):  # type: ignore[misc]  # Transformers ships no types
    """
    Computes the loss with `self.model_wrapped` in the place of the argument.
    """

    def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
        chosen = self.model_wrapped if model.training else model
        return super().compute_loss(chosen, inputs, **named)


SPECIALS = {"": Trainer, "wrapped": Wrapped}
