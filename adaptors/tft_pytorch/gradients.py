"""
Notes which parameters have a gradient at the end of a step, and restores these gradients as zeros.

A script may set its gradients to zero (`zero_grad(set_to_none=False)`), or drop them. Optimizers
apply weight decay to a parameter with a zero gradient, even if the step does not use the parameter.
Optimizers skip a parameter without a gradient. So when a step is computed again, the same
parameters must have a gradient at the beginning of the step.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tft.errors import MalformedMessage

_NONE, _DENSE, _SPARSE = 0, 1, 2
_EVERY_ONE = 4
"""The number of steps, from the first one on, at whose ends the gradients are always inspected."""
_FURTHER = 16
"""After the first `_EVERY_ONE` steps, the gradients are inspected only once in this many steps,
because a script handles its gradients in the same way in all steps."""


class Gradients:
    """
    Notes which parameters have a gradient at the end of a step. Gives the same parameters a
    gradient at the beginning of the next step.
    """

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []
        self._ended = 0
        self._noted: bytes | None = None
        """The kind of gradient of each parameter, as one byte. None if no parameter has a
        gradient."""
        self._open: list[nn.Parameter] = []
        """The trained parameters that had no gradient at the last inspection, while other
        parameters had one. These parameters may get a gradient later."""

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """
        From now on note which of `parameters` have a gradient. The notes are in the order of
        `parameters`.
        """
        self._parameters = list(parameters)
        self._open = []

    @property
    def noted(self) -> bytes | None:
        """
        The kind of gradient (none, dense or sparse) that each parameter had at the end of the last
        inspected step, as one byte for each parameter. None if no parameter had a gradient.
        """
        return self._noted

    def ended(self) -> bytes | None:
        """
        Note that a step has ended. Called only for a training loop that marks the end of its steps.
        Return the property `noted`, the kinds of gradients.

        Not every step is inspected: only the first four, then every 16th. Another step is inspected
        too if a trained parameter has a gradient now, but had none at the last inspection while
        other parameters had gradients.
        """
        self._ended += 1
        if (
            self._ended <= _EVERY_ONE
            or self._ended % _FURTHER == 0
            or (self._open and any(each.grad is not None for each in self._open))
        ):
            self._look()
        return self._noted

    def put_back(self, noted: object) -> None:
        """
        Set the gradients for the beginning of the next step. `noted` is a result of the property
        `noted`. The gradient of a parameter becomes zeros if the parameter had a gradient when
        `noted` was made, else None.

        The present gradients are always dropped, because the backward may have been interrupted
        while it added to them. Raises `MalformedMessage` if `noted` cannot be read.
        """
        if noted is not None and (
            not isinstance(noted, bytes) or not {_NONE, _DENSE, _SPARSE}.issuperset(noted)
        ):
            raise MalformedMessage(
                "the gradients in the rank-local state must be bytes, each of them 0, 1 or 2"
            )
        # The number of parameters differs if the script was changed before the job was resumed.
        # Then no gradient is made.
        fits = isinstance(noted, bytes) and len(noted) == len(self._parameters)
        kinds = noted if isinstance(noted, bytes) and fits else bytes(len(self._parameters))
        for parameter, kind in zip(self._parameters, kinds, strict=True):
            parameter.grad = None if kind == _NONE else _zeros(parameter, kind)
        self._noted, self._ended = (kinds if any(kinds) else None), 0

    def _look(self) -> None:
        found = bytes(map(_kind, self._parameters))
        self._noted = found if any(found) else None
        self._open = []
        if self._noted is not None:
            self._open = [
                parameter
                for parameter, kind in zip(self._parameters, found, strict=True)
                if kind == _NONE and parameter.requires_grad
            ]


def _kind(parameter: nn.Parameter) -> int:
    gradient = parameter.grad
    if gradient is None:
        return _NONE
    return _DENSE if gradient.layout == torch.strided else _SPARSE


def _zeros(parameter: nn.Parameter, kind: int) -> Tensor:
    dtype = parameter.grad_dtype or parameter.dtype
    if kind == _SPARSE:
        return torch.zeros_like(parameter, dtype=dtype, layout=torch.sparse_coo)
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
