"""
What a shard has of an optimizer, with parameters by name, as torch's own
`torch.distributed.checkpoint.state_dict.get_state_dict` has them.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from tft.errors import UsageError
from tft_pytorch.names import named_parameters, parameter_names
from tft_pytorch.replicas import ReplicaOptimizer, set_groups

State = dict[str, Any]
"""`state` by parameter, and `param_groups`. Any: optimizers keep what they like."""


class Part(Protocol):
    """
    Of an optimizer; some of its state, some of its groups' settings, or all.
    """

    def state(self) -> State:
        """The present content."""

    def masters(self) -> Mapping[str, Tensor]:
        """What is moved in the place of parameters that are rounded from it, by parameter."""

    def settle(self, state: State) -> None:
        """Use this content from now on; the masters are in place."""


class Whole:
    """
    All of an optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._parameters = named_parameters(model)
        self._names: dict[object, str] = {p: name for name, p in self._parameters.items()}
        self._optimizer = optimizer

    def state(self) -> State:
        """
        State and settings. Raises `UsageError` for state that no parameter owns.
        """
        kept = {self._names.get(key, key): value for key, value in self._optimizer.state.items()}
        groups = _groups(self._optimizer.param_groups, self._names)
        strange = kept.keys() - {name for group in groups for name in group["params"]}
        if strange:
            raise UsageError(
                f"the optimizer keeps state that belongs to no parameter of its groups: {strange}"
            )
        return {"state": _ordered(kept, groups), "param_groups": groups}

    def masters(self) -> Mapping[str, Tensor]:
        """
        None: parameters are their own masters.
        """
        return {}

    def settle(self, state: State) -> None:
        """
        Into the optimizer itself, whose objects the user holds.
        """
        self._optimizer.state.clear()
        for name, kept in state["state"].items():
            self._optimizer.state[self._parameters[name]] = kept
        set_groups(self._optimizer.param_groups, state["param_groups"])


class Settings:
    """
    The groups of a `ReplicaOptimizer`, which are the same on all ranks, without any state.
    """

    def __init__(self, model: nn.Module, optimizer: ReplicaOptimizer) -> None:
        self._names = parameter_names(model)
        self._optimizer = optimizer

    def state(self) -> State:
        """
        The settings.
        """
        return {"state": {}, "param_groups": _groups(self._optimizer.param_groups, self._names)}

    def masters(self) -> Mapping[str, Tensor]:
        """
        None: they are in the shares.
        """
        return {}

    def settle(self, state: State) -> None:
        """
        Into the optimizer's groups.
        """
        set_groups(self._optimizer.param_groups, state["param_groups"])


class Share:
    """
    What a `ReplicaOptimizer` keeps on this rank.
    """

    def __init__(self, model: nn.Module, optimizer: ReplicaOptimizer) -> None:
        names = parameter_names(model)
        self._optimizer = optimizer
        self._owned = {names[p]: p for p in optimizer.owned}

    def state(self) -> State:
        """
        The state of the owned parameters, which make up one group without settings.
        """
        kept = self._optimizer.state
        held = {name: self._optimizer.kept_for(p) for name, p in self._owned.items()}
        return {
            "state": {name: dict(kept[key]) for name, key in held.items() if key in kept},
            "param_groups": [{"params": list(self._owned)}],
        }

    def masters(self) -> Mapping[str, Tensor]:
        """
        Those of the owned parameters of 16 bits.
        """
        found = {name: self._optimizer.master(p) for name, p in self._owned.items()}
        return {name: master for name, master in found.items() if master is not None}

    def settle(self, state: State) -> None:
        """
        Into the optimizer, and from the masters into the parameters.
        """
        kept = self._optimizer.state
        kept.clear()
        for name, values in state["state"].items():
            kept[self._optimizer.kept_for(self._owned[name])] = values
        self._optimizer.taken()


def _groups(groups: Iterable[State], names: Mapping[object, str]) -> list[State]:
    """
    With the parameters first: torch has them last once a state was loaded, and nothing else differs.
    """
    return [
        {"params": [names[p] for p in group["params"]]}
        | {key: value for key, value in group.items() if key != "params"}
        for group in groups
    ]


def _ordered(kept: Mapping[Any, Any], groups: Iterable[State]) -> State:
    """
    In the order of the groups, so that it is the same on all ranks.
    """
    return {name: dict(kept[name]) for group in groups for name in group["params"] if name in kept}
