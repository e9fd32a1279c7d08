"""
Notes and restores the settings that scripts change at the beginning of an iteration: the settings
of parameter groups, such as the learning rate, and the state of the scheduler.

A rank that has begun the next step may have other settings than a rank that has not begun it. So
after a fault tft restores the settings of the end of the last step.
"""

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

_MEMBERS = "params"
_CONTAINERS = (list, dict)


class _Scheduled:
    """
    Notes the state of one scheduler, and restores it.
    """

    def __init__(self, scheduler: Any) -> None:  # Any: the user's own scheduler may have any type
        self._scheduler = scheduler
        self.tells = _is_plain(scheduler)
        """True if the scheduler's state can be read from its attributes, which is faster than a
        call of its `state_dict`."""
        self._containers: list[str] = []
        """The keys of lists and dicts in the scheduler's state. These lists and dicts must be
        copied, because the scheduler may change them in place."""
        self._containers = [k for k, v in self._told().items() if isinstance(v, _CONTAINERS)]
        self._noted: dict[str, Any] = {}

    def note(self) -> None:
        """
        Note the present state for `put_back`.
        """
        self._noted = self._told()

    def put_back(self) -> None:
        """
        Restore the noted state.
        """
        if self._told() == self._noted:
            return
        if self.tells:
            vars(self._scheduler).update(self._noted)
        else:
            self._scheduler.load_state_dict(self._noted)

    def _told(self) -> dict[str, Any]:
        """
        Return the present state of the scheduler, with copies of its lists and dicts.
        """
        state: Mapping[str, Any] = (
            vars(self._scheduler) if self.tells else self._scheduler.state_dict()
        )
        # Copy the dict, because some schedulers return their own dict from `state_dict` and change
        # it later.
        told = dict(state)
        for key in self._containers:
            value = told.get(key)
            if type(value) is list or isinstance(value, _CONTAINERS):
                told[key] = value.copy()
        return told


class Settings:
    """
    Notes the settings of some optimizers (such as learning rates) and the state of schedulers, and
    restores both.
    """

    def __init__(self) -> None:
        self._optimizers: Sequence[Optimizer] = ()
        self._schedulers: Sequence[_Scheduled] = ()
        self._groups: list[dict[str, Any]] | None = None

    # Any: the user's own schedulers may have any type
    def watch(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """
        From now on note the settings of `optimizers`, such as learning rates, and the state of
        `schedulers`.
        """
        self._optimizers = optimizers
        # this drops the states of the old schedulers, which may refer to the old optimizers
        self._schedulers = [_Scheduled(each) for each in schedulers]
        self.forget()

    def note(self) -> None:
        """
        Note the present settings, such as learning rates, for `put_back`. Called at the end of a
        step.
        """
        groups = [group.copy() for each in self._optimizers for group in each.param_groups]
        for group in groups:
            lr = group.get("lr")
            # clone tensors, because the script may change a learning rate that is a tensor in place
            if type(lr) is not float and isinstance(lr, Tensor):
                group |= {k: v.clone() for k, v in group.items() if isinstance(v, Tensor)}
        self._groups = groups
        for scheduler in self._schedulers:
            scheduler.note()

    def note_in_tail(self) -> None:
        """
        Note the present settings if none are noted since the last update. Can be called on any
        thread.

        Does nothing if settings are on a device, because reading them would wait for the device,
        which may itself be waiting for other ranks. Does nothing either if the scheduler's state
        can be read only by a call of its `state_dict`.
        """
        on_device = any(
            isinstance(value, Tensor) and value.device.type != "cpu"
            for each in self._optimizers
            for group in each.param_groups
            for value in group.values()
        )
        if self._groups is None and not on_device and all(each.tells for each in self._schedulers):
            self.note()

    def forget(self) -> None:
        """
        Forget the noted settings, such as learning rates, so that `put_back` keeps the present
        settings. Called when a further step is complete, or when the state of this rank now comes
        from another rank or a checkpoint.
        """
        self._groups = None

    def put_back(self) -> None:
        """
        Restore those noted settings, such as learning rates, that the unfinished step has changed.
        Do nothing if no settings are noted.
        """
        noted, self._groups = self._groups, None
        if noted is None:
            return
        present = [group for each in self._optimizers for group in each.param_groups]
        # not strict, because the script may have added parameter groups in the step
        for group, before in zip(present, noted, strict=False):
            _put_back(group, before)
        for scheduler in self._schedulers:
            scheduler.put_back()


def _is_plain(scheduler: object) -> bool:
    """
    Return whether the state of `scheduler` can be read from its attributes, without a call of its
    `state_dict`.

    The result is True for torch's schedulers that inherit the common `state_dict`, and for a
    `LambdaLR` whose `lr_lambdas` are all plain functions.
    """
    kind: Any = type(scheduler)  # Any: only torch's classes have a `state_dict`
    if isinstance(scheduler, LambdaLR) and kind.state_dict is LambdaLR.state_dict:
        return all(isinstance(each, FunctionType) for each in scheduler.lr_lambdas)
    return isinstance(scheduler, LRScheduler) and kind.state_dict is LRScheduler.state_dict


def _put_back(group: dict[str, Any], before: Mapping[str, Any]) -> None:
    for key in [key for key in group if key not in before]:
        del group[key]
    for key, value in before.items():
        if key == _MEMBERS:
            continue
        if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
            # change the tensor in place, because compiled code or a captured graph uses it
            group[key].copy_(value)
        else:
            group[key] = value
