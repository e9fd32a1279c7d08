"""
Checks that the set of trained parameters (`requires_grad`) does not change during training.

A wrapper such as DDP is built for the trained parameters. After an incident the wrapper is built
again. A replacement process then has the trained parameters with which the script begins. So the
set of trained parameters must stay the same during the whole training.
"""

from collections.abc import Mapping
from operator import attrgetter

from torch import nn

from tft.errors import UsageError

_FLAG = attrgetter("requires_grad")


class Trained:
    """
    Notes which parameters of a model are trained, and checks that the set of trained parameters
    does not change.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._flags: list[bool] = []

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """
        Note which of `parameters` are trained now.
        """
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._flags = list(map(_FLAG, self._parameters))

    def let_go(self) -> None:
        """
        Drop the references to the parameters.
        """
        self.watch({})

    def opening(self) -> None:
        """
        Check, before an update window opens, that the same parameters are trained as before.

        A check when the window closes would be too late. The wrapper does not reduce the gradients
        of parameters that it was not built for, so the copies of the ranks would differ then. The
        check costs 25 ns for each parameter. Raises `UsageError` if other parameters are
        trained now.
        """
        found = list(map(_FLAG, self._parameters))
        if found == self._flags:
            return
        changed = [n for n, a, b in zip(self._names, found, self._flags, strict=True) if a != b]
        raise UsageError(
            "requires_grad of "
            f"{', '.join(changed[:3])}{' and others' if len(changed) > 3 else ''} was changed "
            "while training: after a fault the wrapper would be built for other parameters than "
            "before, and a replacement process would miss the change. Set requires_grad before "
            "session.adopt, or in make, and do not change it later. To hold parameters still for "
            "some steps, drop their gradients (parameter.grad = None) before the optimizer's step"
        )

    def put_back(self) -> None:
        """
        Set `requires_grad` of all parameters to the values that `watch` has noted.

        This is needed if a script changes `requires_grad` for a part of a step, and a fault
        interrupts the script in that part.
        """
        for parameter, flag in zip(self._parameters, self._flags, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
