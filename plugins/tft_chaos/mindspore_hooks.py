"""
The places in a step where chaos makes a fault, for models and optimizers (Cells) of MindSpore.

MindSpore is not imported: only methods of the Cells are called.

MindSpore compiles its optimizers, so a call changes all parameters at once and cannot be
interrupted. So chaos imitates a partial update: it lets the call complete, and then gives half of
the parameters their earlier values back. The result is the same as after an interrupted call.
"""

from collections.abc import Callable

from tft_chaos.actions import ChaosMissed, Theirs

_KEPT = {
    "exp_avg": ("exp_avg.", "moment1.", "adam_m.", "moments."),
    "exp_avg_sq": ("exp_avg_sq.", "moment2.", "adam_v."),
}
"""By name of the state in a spec: the prefixes that MindSpore's optimizers use for it. The name of
an optimizer state is such a prefix and the name of the parameter."""


def is_cell(model: Theirs) -> bool:
    """
    Return whether an object is a Cell of MindSpore.
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
    Install `computed(name)` as a hook of each Cell in the model. MindSpore calls the hook each time
    that the Cell has been computed.
    """
    for name, cell in model.cells_and_names():
        cell.register_forward_hook(computed(name))


def watch_gradients(model: Theirs, begin: Callable[..., None], came: Callable[..., None]) -> int:
    """
    Arrange that `begin` is called when a forward pass begins, and `came` whenever a gradient is
    computed in its backward pass.

    Return the number of gradients in a backward pass.
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
    Arrange that half of the optimizer's parameters get their earlier values back after a step, and
    that `halfway(changed, of)` is called then. `changed` is the number of parameters that still
    have new values, and `of` the number of all parameters.

    This is done only in steps for which `due()` is True. The call of the optimizer raises
    `ChaosMissed` if there are fewer than two parameters.
    """
    before: list[Theirs] = []

    def enter(*_: object) -> None:
        before[:] = [p.asnumpy().copy() for p in optimizer.parameters] if due() else []

    def leave(*_: object) -> None:
        if not before:
            return
        parameters = list(optimizer.parameters)
        if len(parameters) < 2:
            raise ChaosMissed("chaos: phase update needs an optimizer with at least two parameters")
        for parameter, old in zip(
            parameters[len(parameters) // 2 :], before[len(parameters) // 2 :], strict=True
        ):
            parameter.asnumpy()[...] = old  # `asnumpy` returns a view of the parameter's memory
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
    Return the names of all trained parameters, and, by these names, the tensors of the state `part`
    that this rank has.

    If `part` is `buffer`, the names and the tensors are those of the parameters that are not
    trained, such as the moving averages of BatchNorm. Raises `ChaosMissed` if `part` is `master`,
    because MindSpore's optimizers keep no 32-bit master weights.
    """
    if part == "master":
        raise ChaosMissed("chaos: the optimizers of MindSpore keep no 32-bit masters")
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
        Return the element with the largest absolute value.
        """
        return int(abs(self._array).argmax())

    def read(self) -> bytes:
        """
        Return the content, in row-major order.
        """
        content: bytes = self._array.tobytes()
        return content

    def write(self, content: bytes) -> None:
        """
        Replace the content in place.
        """
        self._array.reshape(-1).view("uint8").data[:] = content
