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
"""The state of an optimizer, as a dict with two keys. `state` has the state of each parameter by
parameter name, `param_groups` has the settings. The values are Any, because optimizers keep values
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
        Put `state` into the optimizer. The masters (32-bit copies of 16-bit parameters) already
        have their new content when this method is called.
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
                "this state in optimizer.state[parameter] or in a parameter group"
            )
        return {"state": _ordered(kept, groups), "param_groups": groups}

    def masters(self) -> Mapping[str, Tensor]:
        """
        Return an empty dict, because an ordinary optimizer has no masters (32-bit copies of
        parameters).
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
    The settings of the parameter groups of a `ReplicaOptimizer`, without any optimizer state. These
    settings are the same on all ranks.
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
        Return an empty dict. The masters (32-bit copies of 16-bit parameters) belong to the class
        `Share`.
        """
        return {}

    def settle(self, state: State) -> None:
        """
        Set the parameter groups of the optimizer (learning rate, weight decay) to those in `state`.
        """
        set_groups(self._optimizer.param_groups, state["param_groups"])


class Share:
    """
    This rank's share of the state of a `ReplicaOptimizer`: the state for the parameters that this
    rank owns. A rank owns the parameters that it updates."""

    def __init__(self, model: nn.Module, optimizer: ReplicaOptimizer) -> None:
        names = parameter_names(model)
        self._optimizer = optimizer
        self._owned = {names[p]: p for p in optimizer.owned}

    def state(self) -> State:
        """
        Return the optimizer state of the parameters that this rank owns (updates). In the result
        these parameters form one parameter group, which has no settings.
        """
        kept = self._optimizer.state
        held = {name: self._optimizer.kept_for(p) for name, p in self._owned.items()}
        return {
            "state": {name: dict(kept[key]) for name, key in held.items() if key in kept},
            "param_groups": [{"params": list(self._owned)}],
        }

    def masters(self) -> Mapping[str, Tensor]:
        """
        Return the masters (32-bit copies) of the 16-bit parameters that this rank owns, by
        parameter name.
        """
        found = {name: self._optimizer.master(p) for name, p in self._owned.items()}
        return {name: master for name, master in found.items() if master is not None}

    def settle(self, state: State) -> None:
        """
        Put `state` into the optimizer. Then set each owned 16-bit parameter to the rounded value of
        its master, the 32-bit copy.
        """
        kept = self._optimizer.state
        kept.clear()
        for name, values in state["state"].items():
            kept[self._optimizer.kept_for(self._owned[name])] = values
        self._optimizer.taken()


def _groups(groups: Iterable[State], names: Mapping[object, str]) -> list[State]:
    """
    Return the parameter groups of an optimizer with parameter names instead of parameters. The key
    `params` comes first in each group.

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
