"""
The same places in the Cells of MindSpore, which are used by their methods alone, too: nothing of MindSpore is
imported.

An optimizer of MindSpore's is compiled: it changes all its parameters in one call, and nothing can come
between. So the half-done update is made: the whole one is let through, and half of the parameters get back what
they had. What is left is what a call that was broken off would have left.
"""

from collections.abc import Callable

from tft_chaos.actions import ChaosMissed, Theirs

_KEPT = {
    "exp_avg": ("exp_avg.", "moment1.", "adam_m.", "moments."),
    "exp_avg_sq": ("exp_avg_sq.", "moment2.", "adam_v."),
}
"""What MindSpore's optimizers put before the name of a parameter for what they keep for it."""


def is_cell(model: Theirs) -> bool:
    """
    Whether it is one of MindSpore's.
    """
    return hasattr(model, "cells_and_names")


def watch_calls(model: Theirs, enter: Callable[..., None], leave: Callable[..., None]) -> None:
    """
    Call these when the model is called and when it returns.
    """
    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave)


def watch_parts(model: Theirs, computed: Callable[[str], Callable[..., None]]) -> None:
    """
    Call `computed(name)` of each of its cells when that has been computed.
    """
    for name, cell in model.cells_and_names():
        cell.register_forward_hook(computed(name))


def watch_gradients(model: Theirs, begin: Callable[..., None], came: Callable[..., None]) -> int:
    """
    Call these when a forward begins, and at each gradient of its backward; how many there are.
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
    Call `halfway(changed, of)` when it has changed some of its parameters and not the others.
    """
    before: list[Theirs] = []

    def enter(*_: object) -> None:
        before[:] = [p.asnumpy().copy() for p in optimizer.parameters] if due() else []

    def leave(*_: object) -> None:
        if not before:
            return
        parameters = list(optimizer.parameters)
        if len(parameters) < 2:
            raise ChaosMissed("chaos: phase update needs an optimizer of two parameters or more")
        for parameter, old in zip(
            parameters[len(parameters) // 2 :], before[len(parameters) // 2 :], strict=True
        ):
            parameter.asnumpy()[...] = old  # its own memory
        changed = sum(
            p.asnumpy().tobytes() != old.tobytes()
            for p, old in zip(parameters, before, strict=True)
        )
        before.clear()
        halfway(changed, len(parameters))

    optimizer.register_forward_pre_hook(enter)
    optimizer.register_forward_hook(leave)


def array_of(optimizer: Theirs, part: str) -> Theirs:
    """
    The memory of its first parameter, or of what it keeps for that.
    """
    first = optimizer.parameters[0]
    if part == "param":
        return first.asnumpy()
    kept = {p.name: p for p in optimizer.get_parameters()}
    for prefix in _KEPT[part]:
        if prefix + first.name in kept:
            return kept[prefix + first.name].asnumpy()
    raise ChaosMissed(f"chaos: the optimizer keeps {sorted(kept)}, and no {part} of {first.name}")


def flip(array: Theirs, element: int) -> None:
    """
    Flip the highest bit of the mantissa of one element, as `actions.flip` does.
    """
    content = array.reshape(-1).view("uint8")
    content[(element + 1) * array.itemsize - 2] ^= 0x40
