"""
What scripts set anew at the head of an iteration: the settings of parameter groups, such as the learning rate, and the
scheduler. A rank that has begun the next step has other ones than a rank that has not, so what counts is what they
were when the last step ended.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_MEMBERS = "params"


class Settings:
    """
    Those of some optimizers and a scheduler, and their way back.
    """

    def __init__(self) -> None:
        self._optimizers: Sequence[Optimizer] = ()
        self._scheduler: Any = None  # Any: whatever has state_dict and load_state_dict
        self._plain = False
        """The scheduler is one of torch's kind, without others in it."""
        self._groups: list[dict[str, Any]] | None = None
        self._scheduled: Mapping[str, Any] = {}

    def watch(self, optimizers: Sequence[Optimizer], scheduler: Any) -> None:  # Any: as above
        """
        These from now on.
        """
        self._optimizers, self._scheduler = optimizers, scheduler
        # what torch's own keep is numbers, and lists that are replaced: asking for their state takes ten times as long
        self._plain = type(scheduler).__module__.startswith("torch.optim.") and not any(
            isinstance(value, list | tuple) and any(isinstance(each, LRScheduler) for each in value)
            for value in vars(scheduler).values()
        )
        self.forget()

    def note(self) -> None:
        """
        The step has ended: what there is now is to be put back.
        """
        groups = [dict(group) for each in self._optimizers for group in each.param_groups]
        for group in groups:
            if isinstance(group.get("lr"), Tensor):  # which may be changed in place
                group |= {k: v.clone() for k, v in group.items() if isinstance(v, Tensor)}
        self._groups = groups
        if self._plain:
            self._scheduled = dict(vars(self._scheduler))
        elif self._scheduler is not None:
            # one that returns what it goes on changing would have nothing put back
            self._scheduled = {k: _apart(v) for k, v in self._scheduler.state_dict().items()}

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
        if self._plain:
            vars(self._scheduler).update(self._scheduled)
        elif self._scheduler is not None and self._scheduler.state_dict() != self._scheduled:
            self._scheduler.load_state_dict(self._scheduled)


def _apart(value: object) -> object:
    return value.copy() if isinstance(value, list | dict) else value


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
