"""
Handles the objects that are kept in addition to model and optimizer, such as a scheduler, a
GradScaler or a moving average. The code calls these objects `others`. Each has `state_dict` and
`load_state_dict`.

If a factory made the model over process groups, the model may have several shards. This module
divides the state of the `others` among these shards.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tft.errors import UsageError
from tft.spi import Made
from tft_pytorch.replicas import set_groups
from tft_pytorch.tensor_holders import Holders, TensorHolders, same_part

_TAKEN = frozenset(
    {"model", "optim", "master", "tft", "parameters", "optimizer", "scheduler", "rng", "data"}
)
"""Names that a user's object cannot have, because checkpoints and digests use these names for other
parts of the state."""

_HOOKS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
"""The kinds of hooks that change what an optimizer of torch saves and loads."""

State = Any
"""The value that the `state_dict` method of an object returns. The type is Any, because each class
may return another type."""


def parameters_beside(made: Made) -> list[nn.Parameter]:
    """
    Return the parameters that may be trained in addition to those of the model. They are those of
    the modules among `others`, and those in the groups of all optimizers. Each appears once.
    """
    given = list(made.others.values())
    found: list[nn.Parameter] = []
    for each in given:
        if isinstance(each, nn.Module):
            found += each.parameters()
    for each in (made.optimizer, *given):
        if isinstance(each, Optimizer):
            found += [parameter for group in each.param_groups for parameter in group["params"]]
    known = {id(parameter) for parameter in made.model.parameters()}
    return [each for key, each in {id(each): each for each in found}.items() if key not in known]


def check_others(others: Any, beside: Mapping[str, Any]) -> None:  # Any: objects of many types
    """
    Check the objects that the user handed over in addition to model and optimizer.

    The names in `others` must be usable. All objects in `others` and `beside` must have
    `state_dict` and `load_state_dict`. `beside` has the objects with fixed names, such as the
    scheduler. These objects may be None. Raises `UsageError` if a check fails.
    """
    if not isinstance(others, Mapping):
        raise UsageError(
            f"the argument others must be a dict of objects by name, not a {type(others).__name__}"
        )
    for name in others:
        if not str(name).isidentifier() or name in _TAKEN:
            raise UsageError(
                f"the argument others has the name {name!r}, which is reserved or "
                "is not a Python identifier: choose another name for the object"
            )
    for part, stranger in {**beside, **others}.items():
        if stranger is not None and not (
            hasattr(stranger, "state_dict") and hasattr(stranger, "load_state_dict")
        ):
            raise UsageError(
                f"the object {part} must have the methods state_dict() and load_state_dict(), "
                f"which a {type(stranger).__name__} does not have"
            )
        if set_directly(stranger):
            check_lasting(stranger)


def check_lasting(optimizer: Optimizer) -> None:
    """
    Raise `UsageError` if `optimizer` gathers its state, or its parameter groups, again each time
    they are read. State that is put into such an optimizer would be lost.
    """
    groups = zip(optimizer.param_groups, optimizer.param_groups, strict=True)
    if optimizer.state is not optimizer.state or any(one is not other for one, other in groups):
        kind = type(optimizer).__name__
        raise UsageError(
            f"the optimizer {kind} gathers its state or its parameter groups anew each time they are "
            "read, so state that tft puts into it would be lost: hand over one of the optimizers "
            f"of which {kind} consists, and put the others among `others`"
        )


def load(other: Any, state: State) -> None:  # Any: the user's own object may have any type
    """
    Put `state`, which the `state_dict` of an object like `other` has returned, into `other`.

    The state of an optimizer of torch is set directly. Its `load_state_dict` would convert the state
    to the type of the parameters. It would also copy tensors in parameter groups, which a scheduler
    or another optimizer may share.
    """
    if not set_directly(other):
        other.load_state_dict(state)
        return
    parameters = [p for group in other.param_groups for p in group["params"]]
    other.state.clear()
    for key, values in state["state"].items():
        # torch's `state_dict` replaces each parameter by its number. A key that is not a number was
        # not a parameter, so it is used unchanged.
        other.state[parameters[key] if type(key) is int else key] = values
    set_groups(other.param_groups, state["param_groups"])


def set_directly(other: object) -> TypeGuard[Optimizer]:
    """
    Return whether `other` is an optimizer whose state is set without its `load_state_dict`. This is
    so if nothing but the methods of torch's class `Optimizer` reads and writes the state.
    """
    if not isinstance(other, Optimizer):
        return False
    own = vars(other).keys() & {"state_dict", "load_state_dict"}
    # an object of a subclass that does not call torch's constructor lacks these attributes, and so
    # has no hooks
    hooks = [getattr(other, f"_optimizer_{name}_hooks", None) for name in _HOOKS]
    kind = type(other)
    return (
        kind.state_dict is Optimizer.state_dict
        and kind.load_state_dict is Optimizer.load_state_dict
        and not own
        and not any(hooks)
    )


def forget_stages(others: Mapping[str, Any]) -> None:  # Any: the objects may have any type
    """
    Clear each `GradScaler`'s record of how far each optimizer has come in the present step.
    Otherwise the `GradScaler` raises an exception when the same step begins again.

    The record is not in the `state_dict` of the `GradScaler`. The record is empty whenever a step
    is complete.
    """
    for other in others.values():
        if isinstance(other, GradScaler) and other.is_enabled():
            other._per_optimizer_states.clear()


def divided(state: State, name: str, kinds: TensorHolders) -> dict[Holders, State]:
    """
    Divide `state`, which an object of the user returned from `state_dict`, among the shards. Return
    a dict with the part of each shard. Its keys are the tuples of ranks that hold a shard. Each
    part has the same nested dicts as `state`.

    `name` is the name of the user's object. `kinds` knows which ranks hold each parameter and
    buffer.

    State that has the name of a parameter or buffer, such as a moving average, goes to the shard of
    that parameter or buffer. For other state:

    - A distributed tensor goes to a shard whose holders all have the same part of the tensor.
    - Any other tensor goes to a shard whose holders all have the same part of the whole model.
    - Tensors that are single numbers, and values that are not tensors, go to the shard with the
      most holders.

    Raises `UsageError` for a tensor for which no shard fits.
    """
    own = _own_kind(state, name, kinds)
    if own is not None:
        return {own: state}
    if not isinstance(state, dict):
        return {_kind_of(state, name, kinds): state}
    found: dict[Holders, State] = {kinds.all[0]: type(state)()}
    for key, value in state.items():
        for kind, part in divided(value, f"{name}.{key}", kinds).items():
            found.setdefault(kind, type(state)())[key] = part
    return found


def _own_kind(state: State, name: str, kinds: TensorHolders) -> Holders | None:
    """
    Return the holders of the parameter or buffer to which the state `state` belongs. The name of
    this parameter or buffer is the end of `name`, the name of the state. Return None if there is no
    such parameter or buffer.

    The tensors in the state must have the shape of the parameter or buffer. Tensors that are single
    numbers may have another shape.
    """
    # the first word of `name` names the user's object, the rest may name a parameter
    _, _, called = name.partition(".")
    return kinds.ending(called, {tensor.shape for tensor in _tensors(state) if tensor.dim() > 0})


def _kind_of(leaf: object, name: str, kinds: TensorHolders) -> Holders:
    holders: set[int] = set(kinds.all[0])
    for tensor in _tensors(leaf):
        if isinstance(tensor, DTensor):
            holders &= same_part(tensor)
        elif tensor.dim() > 0:
            holders &= set(kinds.everything)
    kind = kinds.within(holders)
    if kind is None:
        raise UsageError(
            f"tft cannot find a shard for the state {name}: this state belongs to no parameter, "
            "and each shard is also held by ranks that may have another value of this state. Give the "
            "state the name of the parameter to which it belongs"
        )
    return kind


def _tensors(leaf: object) -> list[Tensor]:
    if isinstance(leaf, Tensor):
        return [leaf]
    if isinstance(leaf, list | tuple):
        return [tensor for each in leaf for tensor in _tensors(each)]
    if isinstance(leaf, dict):
        return [tensor for each in leaf.values() for tensor in _tensors(each)]
    return []


def joined(parts: Sequence[State], like: State) -> State:
    """
    Join the parts into which the function `divided` has cut a state. Return the whole state.

    The keys are in the order of `like`, the state of the object that will load the result. Keys
    that are not in `like` come last.
    """
    dicts = [part for part in parts if isinstance(part, dict)]
    if len(dicts) < len(parts) or not parts:
        return parts[0] if parts else None
    own = like if isinstance(like, dict) else {}
    keys = dict.fromkeys(key for each in dicts for key in each)
    found = type(dicts[0])()
    for key in [*(key for key in own if key in keys), *(key for key in keys if key not in own)]:
        found[key] = joined([each[key] for each in dicts if key in each], own.get(key))
    return found


def mapped(state: State, name: str, change: Callable[[str, Tensor], object]) -> State:
    """
    Return `state` with every tensor replaced by the result of `change(name, tensor)`.

    The argument `name` is the name of the whole `state`. The keys on the way to a tensor are
    appended to this name, as in `name.key`.
    """
    if isinstance(state, Tensor):
        return change(name, state)
    if isinstance(state, dict):
        changed = type(state)()
        for key, value in state.items():
            changed[key] = mapped(value, f"{name}.{key}", change)
        return changed
    if type(state) in (list, tuple):
        return type(state)(
            mapped(each, f"{name}.{index}", change) for index, each in enumerate(state)
        )
    return state
