"""
Reads the part of an optimizer's state that belongs to a shard, and puts such a part into the
optimizer.

The state refers to parameters by name, as in torch's own
`torch.distributed.checkpoint.state_dict.get_state_dict`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from tft.errors import UsageError
from tft_pytorch.names import named_parameters, parameter_names
from tft_pytorch.replicas import ReplicaOptimizer, set_groups

State = dict[str, Any]
"""A dict with the keys `state`, by parameter name, and `param_groups`. Any: optimizers keep values
of any type."""


class OptimizerPart(Protocol):
    """
    A part of an optimizer: some or all of its state, and some or all settings of its parameter
    groups.
    """

    def state(self) -> State:
        """
        Return the present state and settings of this part.
        """

    def masters(self) -> Mapping[str, Tensor]:
        """
        Return the masters (32-bit copies of 16-bit parameters), by parameter name.

        When the shard moves to another rank, the master is sent instead of the parameter. The
        receiving rank rounds the parameter from the master.
        """

    def settle(self, state: State) -> None:
        """
        Put `state` into the optimizer. The masters already have their new content when this method
        is called.
        """


class Whole:
    """
    The state of a whole optimizer."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._parameters = named_parameters(model)
        self._names: dict[object, str] = {p: name for name, p in self._parameters.items()}
        self._optimizer = optimizer

    def state(self) -> State:
        """
        Return the state of the optimizer and the settings of its parameter groups. Raises
        `UsageError` for state that belongs to no parameter.
        """
        kept = {self._names.get(key, key): value for key, value in self._optimizer.state.items()}
        groups = _groups(self._optimizer.param_groups, self._names)
        strange = kept.keys() - {name for group in groups for name in group["params"]}
        if strange:
            raise UsageError(
                f"the optimizer has state that belongs to none of its parameters: {strange}. Keep "
                "it in optimizer.state[parameter] or in a parameter group"
            )
        return {"state": _ordered(kept, groups), "param_groups": groups}

    def masters(self) -> Mapping[str, Tensor]:
        """
        Return an empty dict, because an ordinary optimizer has no masters.
        """
        return {}

    def settle(self, state: State) -> None:
        """
        Put `state` into the user's optimizer. The optimizer object stays the same, because the user
        refers to it.
        """
        self._optimizer.state.clear()
        for name, kept in state["state"].items():
            self._optimizer.state[self._parameters[name]] = kept
        set_groups(self._optimizer.param_groups, state["param_groups"])


class Settings:
    """
    The settings of the parameter groups of a `ReplicaOptimizer`, without any optimizer state. They
    are the same on all ranks.
    """

    def __init__(self, model: nn.Module, optimizer: ReplicaOptimizer) -> None:
        self._names = parameter_names(model)
        self._optimizer = optimizer

    def state(self) -> State:
        """
        Return the settings of the parameter groups. The optimizer state in the result is empty.
        """
        return {"state": {}, "param_groups": _groups(self._optimizer.param_groups, self._names)}

    def masters(self) -> Mapping[str, Tensor]:
        """
        Return an empty dict, because the masters belong to `Share`.
        """
        return {}

    def settle(self, state: State) -> None:
        """
        Set the parameter groups of the optimizer (learning rate, weight decay) to those in `state`.
        """
        set_groups(self._optimizer.param_groups, state["param_groups"])


class Share:
    """
    The optimizer state of this rank's share of a `ReplicaOptimizer`: of the parameters that this
    rank owns, which means that it updates them."""

    def __init__(self, model: nn.Module, optimizer: ReplicaOptimizer) -> None:
        names = parameter_names(model)
        self._optimizer = optimizer
        self._owned = {names[p]: p for p in optimizer.owned}

    def state(self) -> State:
        """
        Return the optimizer state of the owned parameters. They form one parameter group, which has
        no settings.
        """
        kept = self._optimizer.state
        held = {name: self._optimizer.kept_for(p) for name, p in self._owned.items()}
        return {
            "state": {name: dict(kept[key]) for name, key in held.items() if key in kept},
            "param_groups": [{"params": list(self._owned)}],
        }

    def masters(self) -> Mapping[str, Tensor]:
        """
        Return the masters of the owned 16-bit parameters.
        """
        found = {name: self._optimizer.master(p) for name, p in self._owned.items()}
        return {name: master for name, master in found.items() if master is not None}

    def settle(self, state: State) -> None:
        """
        Put `state` into the optimizer, and set the owned 16-bit parameters to their rounded
        masters.
        """
        kept = self._optimizer.state
        kept.clear()
        for name, values in state["state"].items():
            kept[self._optimizer.kept_for(self._owned[name])] = values
        self._optimizer.taken()


def _groups(groups: Iterable[State], names: Mapping[object, str]) -> list[State]:
    """
    Return the parameter groups with parameter names in them, and with `params` as the first key.

    After a state was loaded, torch has `params` as the last key. With a fixed order of keys, equal
    groups have equal digests.
    """
    return [
        {"params": [names[p] for p in group["params"]]}
        | {key: value for key, value in group.items() if key != "params"}
        for group in groups
    ]


def _ordered(kept: Mapping[Any, Any], groups: Iterable[State]) -> State:
    """
    Return the optimizer state, sorted in the order in which the parameters appear in the groups.
    This order is the same on all ranks.
    """
    return {name: dict(kept[name]) for group in groups for name in group["params"] if name in kept}
