"""
The places in a step where chaos makes a fault, for models and optimizers (Cells) of MindSpore.

The functions do not import MindSpore: they only call methods of the Cells.

MindSpore compiles its optimizers, so a call of an optimizer changes all parameters at once and
cannot be interrupted. So chaos imitates a partial update: it lets the call complete, and then gives
half of the parameters their earlier values back. The state is then like that after an interrupted
call.
"""

from collections.abc import Callable

from tft_chaos.actions import ChaosMissed, Theirs

_KEPT = {
    "exp_avg": ("exp_avg.", "moment1.", "adam_m.", "moments."),
    "exp_avg_sq": ("exp_avg_sq.", "moment2.", "adam_v."),
}
"""Maps the name that a spec uses for a part of the optimizer state to the prefixes that MindSpore's
optimizers use for this part. In MindSpore the name of such a state is a prefix followed by the name
of the parameter."""


def is_cell(model: Theirs) -> bool:
    """
    Return whether `model`, which may also be an optimizer, is a Cell of MindSpore.
    """
    return hasattr(model, "cells_and_names")


def watch_calls(model: Theirs, enter: Callable[..., None], leave: Callable[..., None]) -> None:
    """
    Arrange that `enter` is called when the model is called, and `leave` when the model returns.
    """
    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave)


def watch_parts(model: Theirs, computed: Callable[[str], Callable[..., None]]) -> None:
    """
    Install a hook in each Cell of the model: the function that `computed(name)` returns for the
    name of the Cell. MindSpore calls this hook each time that the Cell has been computed.
    """
    for name, cell in model.cells_and_names():
        cell.register_forward_hook(computed(name))


def watch_gradients(model: Theirs, begin: Callable[..., None], came: Callable[..., None]) -> int:
    """
    Arrange that `begin` is called when a forward pass begins, and `came` whenever a gradient is
    computed in a backward pass.

    Return the number of gradients that a backward pass computes.
    """
    model.register_forward_pre_hook(begin)
    parameters = list(model.trainable_params())
    for parameter in parameters:
        parameter.register_hook(came)
    return len(parameters)


def watch_halfway(
    optimizer: Theirs, due: Callable[[], bool], halfway: Callable[[int, int], None]
) -> None:
    """
    Arrange that half of the optimizer's parameters get their earlier values back after an update,
    and that `halfway(changed, of)` is called then. `changed` is the number of parameters that have
    new values, and `of` the number of all parameters.

    This is done only in steps for which `due()` is True. In these steps the call of the optimizer
    raises `ChaosMissed` if it has fewer than two parameters.
    """
    before: list[Theirs] = []

    def enter(*_: object) -> None:
        before[:] = [p.asnumpy().copy() for p in optimizer.parameters] if due() else []

    def leave(*_: object) -> None:
        if not before:
            return
        parameters = list(optimizer.parameters)
        if len(parameters) < 2:
            raise ChaosMissed(
                "chaos: no fault was made, because phase=update needs an optimizer with at least "
                "two parameters: choose another phase"
            )
        for parameter, old in zip(
            parameters[len(parameters) // 2 :], before[len(parameters) // 2 :], strict=True
        ):
            # `asnumpy` returns a view of the parameter's memory, so this line changes the parameter
            parameter.asnumpy()[...] = old
        changed = sum(
            p.asnumpy().tobytes() != old.tobytes()
            for p, old in zip(parameters, before, strict=True)
        )
        before.clear()
        halfway(changed, len(parameters))

    optimizer.register_forward_pre_hook(enter)
    optimizer.register_forward_hook(leave)


def state_of(part: str, model: Theirs, optimizer: Theirs) -> tuple[list[str], dict[str, Theirs]]:
    """
    Return the names of all trained parameters, and a mapping from these names to the tensors that
    this rank has for the part `part` of the state.

    If `part` is `buffer`, the names and the tensors are those of the parameters that are not
    trained, such as the moving averages of BatchNorm. Raises `ChaosMissed` if `part` is `master`,
    because MindSpore's optimizers keep no 32-bit master weights.
    """
    if part == "master":
        raise ChaosMissed(
            "chaos: no bit was flipped, because the optimizers of MindSpore keep no 32-bit "
            "masters: choose another target"
        )
    if part == "buffer":
        buffers = {p.name: p for p in model.untrainable_params()}
        return list(buffers), buffers
    parameters = {p.name: p for p in model.trainable_params()}
    if part == "param":
        return list(parameters), parameters
    kept = {p.name: p for p in optimizer.get_parameters()}
    held = {
        name: kept[prefix + name]
        for name in parameters
        for prefix in _KEPT[part]
        if prefix + name in kept
    }
    return list(parameters), held


class ArrayMemory:
    """
    The memory of a tensor of MindSpore. `array` is the result of the tensor's `asnumpy`, which
    shares memory with the tensor.
    """

    def __init__(self, array: Theirs) -> None:
        self._array = array
        self.dtype = str(array.dtype)
        self.itemsize: int = array.itemsize
        self.size: int = array.size

    def largest(self) -> int:
        """
        Return the index of the element with the largest absolute value.
        """
        return int(abs(self._array).argmax())

    def read(self) -> bytes:
        """
        Return the content of the tensor as bytes, in row-major order.
        """
        content: bytes = self._array.tobytes()
        return content

    def write(self, content: bytes) -> None:
        """
        Replace the content of the tensor in place.
        """
        self._array.reshape(-1).view("uint8").data[:] = content
