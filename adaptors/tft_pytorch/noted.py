"""
What scripts set anew at the head of an iteration: the settings of parameter groups, such as the learning rate, and the
scheduler. A rank that has begun the next step has other ones than a rank that has not, so what counts is what they
were when the last step ended.
"""

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

_MEMBERS = "params"
_CONTAINERS = (list, dict)


class Settings:
    """
    Those of some optimizers and a scheduler, and their way back.
    """

    def __init__(self) -> None:
        self._optimizers: Sequence[Optimizer] = ()
        self._scheduler: Any = None  # Any: whatever has state_dict and load_state_dict
        self._groups: list[dict[str, Any]] | None = None
        self._scheduled: dict[str, Any] = {}
        self._tells = False
        """What the scheduler is can be read from its attributes: its `state_dict` does no more, and takes longer."""
        self._containers: list[str] = []
        """What a scheduler may go on changing of what it has told."""

    def watch(self, optimizers: Sequence[Optimizer], scheduler: Any) -> None:  # Any: as above
        """
        These from now on.
        """
        self._optimizers, self._scheduler = optimizers, scheduler
        self._tells = _is_plain(scheduler)
        self._containers = [k for k, v in self._told().items() if isinstance(v, _CONTAINERS)]
        self.forget()

    def note(self) -> None:
        """
        The step has ended: what there is now is to be put back.
        """
        groups = [group.copy() for each in self._optimizers for group in each.param_groups]
        for group in groups:
            lr = group.get("lr")
            if type(lr) is not float and isinstance(lr, Tensor):  # which may be changed in place
                group |= {k: v.clone() for k, v in group.items() if isinstance(v, Tensor)}
        self._groups = groups
        if self._scheduler is not None:
            self._scheduled = self._told()

    def forget(self) -> None:
        """
        A step has been taken since, or the state has come from elsewhere: what there is counts.
        """
        self._groups = None

    def put_back(self) -> None:
        """
        What was noted, where the step that is not done has changed it.
        """
        noted, self._groups = self._groups, None
        if noted is None:
            return
        present = [group for each in self._optimizers for group in each.param_groups]
        for group, before in zip(present, noted, strict=False):  # a group that was added stays
            _put_back(group, before)
        if self._scheduler is None or self._told() == self._scheduled:
            return
        if self._tells:
            vars(self._scheduler).update(self._scheduled)
        else:
            self._scheduler.load_state_dict(self._scheduled)

    def _told(self) -> dict[str, Any]:
        """
        What the scheduler is now.
        """
        if self._scheduler is None:
            return {}
        state: Mapping[str, Any] = (
            vars(self._scheduler) if self._tells else self._scheduler.state_dict()
        )
        told = dict(state)  # one that returns what it goes on changing would have nothing put back
        for key in self._containers:
            value = told.get(key)
            if type(value) is list or isinstance(value, _CONTAINERS):
                told[key] = value.copy()
        return told


def _is_plain(scheduler: object) -> bool:
    """
    One of torch's that has nothing in it but its own attributes, and functions.
    """
    kind: Any = type(scheduler)  # Any: what is asked for is there where it is one of torch's
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
            group[key].copy_(value)  # a compiled or captured step has taken the tensor itself
        else:
            group[key] = value
