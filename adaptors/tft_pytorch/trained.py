"""
Which parameters are trained (`requires_grad`): the wrapper is built for these, and so it is built again after an
incident, in processes that begin as the script does. So they stay the same for the whole training.
"""

from collections.abc import Mapping
from operator import attrgetter

from torch import nn

from tft.errors import UsageError

_FLAG = attrgetter("requires_grad")


class Trained:
    """
    Of some parameters, whether they are trained.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._flags: list[bool] = []

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """
        These from now on, as they are now.
        """
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._flags = list(map(_FLAG, self._parameters))

    def let_go(self) -> None:
        """
        Of the parameters.
        """
        self.watch({})

    def closing(self) -> None:
        """
        A step is complete. Raises `UsageError` where other parameters are trained than before. 25 ns for each.
        """
        found = list(map(_FLAG, self._parameters))
        if found == self._flags:
            return
        changed = [n for n, a, b in zip(self._names, found, self._flags, strict=True) if a != b]
        raise UsageError(
            f"requires_grad of {', '.join(changed[:3])}{' and others' if len(changed) > 3 else ''} was changed while "
            "training: after a fault the wrapper would be built for other parameters than before, and a replacement "
            "would not know of it. Set it before session.adopt, or in make, and leave it; to hold parameters still "
            "for some steps drop their gradients (parameter.grad = None) before the optimizer's step"
        )

    def put_back(self) -> None:
        """
        As they were: a script that changes it within a step may have been interrupted there.
        """
        for parameter, flag in zip(self._parameters, self._flags, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
