"""
Which parameters have a gradient where a step has ended: those of a script that sets gradients to zero
(`zero_grad(set_to_none=False)`) have one, with which optimizers decay a parameter that the next step does not use;
those of a script that drops them have none, and are passed over.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tft.errors import MalformedMessage

_NONE, _DENSE, _SPARSE = 0, 1, 2
_EVERY_ONE = 4
"""So many ends of steps are looked at,"""
_FURTHER = 16
"""and then each that this divides: a script has one habit."""


class Gradients:
    """
    Of some parameters; what they are to be where the next step begins.
    """

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []
        self._ended = 0
        self._noted: bytes | None = None
        """The kind of each; None: there is none."""
        self._open: list[nn.Parameter] = []
        """Those that may come to have one that is kept."""

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """
        These from now on, in their order.
        """
        self._parameters = list(parameters)
        self._open = []

    @property
    def noted(self) -> bytes | None:
        """
        As they were when the last step ended.
        """
        return self._noted

    def ended(self) -> bytes | None:
        """
        A step has ended, in a loop that says so. Not every one is looked at, but for parameters that had no gradient yet
        where others keep theirs.
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
        As they are to be where the next step begins: zeros, or none. Dropped in any case: backward may have been left in
        the middle of adding to them.
        """
        if noted is not None and (
            not isinstance(noted, bytes) or not {_NONE, _DENSE, _SPARSE}.issuperset(noted)
        ):
            raise MalformedMessage("private state with gradients that cannot be read")
        # a script that was changed before it was resumed has others
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
