"""
Running statistics of modules that are kept beside the model, such as a teacher or a moving average
that averages the buffers of BatchNorm too.

These statistics are different on each rank, like those of the model, but they are no part of the
rank-local state. So a rank that takes the state of another rank also gets the statistics of that
rank. And a forward pass that is computed again counts twice in them. After such an incident the
training is not bit-identical to one without faults, so this module reports it.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # the base class of BatchNorm and InstanceNorm
from torch.optim.swa_utils import AveragedModel


class OtherStatistics:
    """
    Notices when running statistics of modules beside the model change.
    """

    def __init__(self) -> None:
        self._counters: list[tuple[str, Tensor]] = []
        """The counters of batches of the normalization layers, by the name of the layer. A counter
        changes in each forward pass of training, and also when an average copies it."""
        self._seen: list[int] = []
        self.moving = ""
        """The name of a layer whose statistics have changed. Empty: no such change was seen."""
        self._foreign = False
        """True if the state of this rank, with these statistics, was copied from another rank or a
        checkpoint, and `lost` was not called since."""

    def watch(self, model: nn.Module, others: Mapping[str, object]) -> None:
        """
        Watch the statistics of `others` from now on, without those of the model itself. An
        `AveragedModel` that does not average buffers is left out: it copies the model's buffers at
        each update.
        """
        own = {id(module) for module in model.modules()}
        self._counters = [
            (f"{name}.{path}" if path else name, counter)
            for name, other in others.items()
            if isinstance(other, nn.Module)
            and not (isinstance(other, AveragedModel) and not other.use_buffers)
            for path, module in other.named_modules()
            if isinstance(module, _NormBase) and id(module) not in own
            for counter in [module.num_batches_tracked]
            if counter is not None
        ]
        self._rest()

    def note(self) -> None:
        """
        Note which statistics have changed in the step that is complete now.
        """
        if self._counters:
            self.moving = self.moving or self._changed()
            self._rest()

    def fetched(self, *, foreign: bool = True) -> None:
        """
        Note that the state of this rank now comes from another rank or a checkpoint. Pass
        `foreign=False` if the state comes from a copy of this rank's own earlier state.
        """
        self._foreign = foreign

    def lost(self, moving: object) -> str | None:
        """
        Called when this rank goes back to the end of an earlier step. If the statistics differ from
        those that the rank had at that time, return a sentence that says so, else None. `moving` is
        the value of the attribute `moving` when the rank-local state was captured, perhaps in an
        earlier process of this rank.
        """
        foreign, self._foreign = self._foreign, False
        again = "" if foreign else self._changed()
        self.moving = self.moving or (moving if isinstance(moving, str) else "")
        self._rest()
        if foreign and self.moving:
            return (
                f"the running statistics of {self.moving} differ between ranks, and only those of "
                "the model are kept: they are now those of the rank from which the state was copied"
            )
        if again:
            return (
                f"the running statistics of {again} have counted a forward pass that is computed "
                "again, because only those of the model are kept"
            )
        return None

    def _changed(self) -> str:
        pairs = zip(self._counters, self._seen, strict=True)
        return next((name for (name, each), seen in pairs if each._version != seen), "")

    def _rest(self) -> None:
        self._seen = [counter._version for _, counter in self._counters]
