"""
Checks that the set of trained parameters (`requires_grad`) does not change during training.

A wrapper such as DDP is built for the trained parameters. After an incident the wrapper is built
again. A replacement process then has the trained parameters with which the script begins. So the
set of trained parameters must stay the same during the whole training. Other modules that the
script has handed over may have wrappers too, so their parameters are put back as well.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
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
        self._beside: list[tuple[nn.Parameter, bool]] = []
        """The parameters of other modules, such as the discriminator of a GAN, each with whether it
        was trained at first."""

    def watch(self, parameters: Mapping[str, nn.Parameter], others: Iterable[object] = ()) -> None:
        """
        Note which of `parameters` are trained now, and which parameters of the modules among
        `others`.

        The parameters of `others` are only put back, and may change while training: a script may
        train two models in turns, and hold the one still in some steps.
        """
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._flags = list(map(_FLAG, self._parameters))
        known = set(self._parameters)
        modules = [each for each in others if isinstance(each, nn.Module)]
        beside = chain.from_iterable(module.parameters() for module in modules)
        self._beside = [(each, each.requires_grad) for each in beside if each not in known]

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
        for parameter, flag in (*zip(self._parameters, self._flags, strict=True), *self._beside):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
