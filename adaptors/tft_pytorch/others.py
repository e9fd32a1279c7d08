"""
What is kept beside model and optimizer and has `state_dict` and `load_state_dict`: a scheduler, a GradScaler,
a moving average. How its state is divided among the shards of a model that was made over groups.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from tft.errors import UsageError
from tft_pytorch.kinds import Holders, Kinds, same_part

_TAKEN = frozenset(
    {"model", "optim", "master", "tft", "parameters", "optimizer", "scheduler", "rng", "data"}
)
"""Names in checkpoints and digests."""

State = Any
"""What `state_dict` returned. Any: each has its own type; only dicts are looked into."""


def check_others(others: Any, beside: Mapping[str, Any]) -> None:  # Any: the user's own objects
    """
    Raises `UsageError` for names that are not free, and for what cannot be asked for its state; that is
    said of what stands `beside` them, too.
    """
    if not isinstance(others, Mapping):
        raise UsageError(f"others must be a dict of objects by name, not a {type(others).__name__}")
    for name in others:
        if not str(name).isidentifier() or name in _TAKEN:
            raise UsageError(f"others has {name!r}: choose a name that is a word of its own")
    for part, stranger in {**beside, **others}.items():
        if stranger is not None and not (
            hasattr(stranger, "state_dict") and hasattr(stranger, "load_state_dict")
        ):
            raise UsageError(
                f"{part} must have state_dict() and load_state_dict(); "
                f"a {type(stranger).__name__} has not"
            )


def forget_stages(others: Mapping[str, Any]) -> None:  # Any: each has its own type
    """
    Forget how far each optimizer has come in a step: a `GradScaler` takes no second beginning of it. What it notes
    there is no part of its state, and is empty where a step is complete.
    """
    for other in others.values():
        if isinstance(other, GradScaler) and other.is_enabled():
            other._per_optimizer_states.clear()


def divided(state: State, name: str, kinds: Kinds) -> dict[Holders, State]:
    """
    The part of the state in each shard, in the same dicts.

    What has the name of a parameter or buffer, as a moving average of it has, is where that is; a distributed
    tensor is with those who have the same of it; other tensors with those who have the same of everything.
    What is no tensor, and single numbers, are in the shard that most have.
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


def _own_kind(state: State, name: str, kinds: Kinds) -> Holders | None:
    """
    That of the parameter or buffer by which a part of the state is called. What is called so and has another
    shape, single numbers apart, is something else.
    """
    _, _, called = name.partition(".")  # the first word says whose state it is
    return kinds.ending(called, {tensor.shape for tensor in _tensors(state) if tensor.dim() > 0})


def _kind_of(leaf: object, name: str, kinds: Kinds) -> Holders:
    holders: set[int] = set(kinds.all[0])
    for tensor in _tensors(leaf):
        if isinstance(tensor, DTensor):
            holders &= same_part(tensor)
        elif tensor.dim() > 0:
            holders &= set(kinds.everything)
    kind = kinds.within(holders)
    if kind is None:
        raise UsageError(
            f"{name} belongs to no parameter, and no shard is held by those alone who have the same of "
            "it: call it as the parameter it belongs to"
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
    What `divided` has cut up; the keys in the order in which `like`, the state of the object that is to
    take it, has them.
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
    The same with every tensor changed, which is told its name.
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
