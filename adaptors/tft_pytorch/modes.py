"""
Notes and restores the modes of modules: whether each module trains or evaluates
(`module.training`).

After a fault inside an evaluation, the modules in the surviving processes are still in evaluation
mode. So tft restores the modes of the end of the last complete step.
"""

from operator import itemgetter
from typing import Any

from torch import nn

from tft.errors import MalformedMessage
from tft.spi import Buffer

_KEY = "training"
_TRAINING = itemgetter(_KEY)


MODES = "modes"
"""The name of the buffer, in a shard, that holds the modes of the modules (training or
evaluation)."""


class Modes:
    """
    Notes the modes of the modules of some models (training or evaluation), and restores these
    modes.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._fields: list[dict[str, Any]] = []  # Any: module attributes, of any type
        self._noted: bytes | None = None
        self._found: list[bool] = []
        """The noted modes, one for each module: True if the module trains."""
        self._given: bytearray | None = None
        self._counts = False
        """True if `put_back` must restore the modes that came from another rank, instead of the
        modes in its argument."""

    def watch(self, *models: nn.Module) -> None:
        """
        From now on note the modes (training or evaluation) of the modules of `models`, in the order
        of the modules.

        Modules that are added later are not noted.
        """
        every = [module for model in models for module in model.modules()]
        # leave out modules compiled to TorchScript, which do not keep the mode in the attribute
        # `training`
        self._modules = [module for module in every if _KEY in vars(module)]
        # read the modes from the attribute dicts, because `module.training` takes four times as
        # long
        self._fields = [vars(module) for module in self._modules]
        self._noted = None

    def noted(self, *, closing: bool) -> bytes | None:
        """
        Return the modes of the modules (training or evaluation) at the end of the last complete
        step, for `put_back`. Return None if there are no modules.

        Pass `closing=True` when a step is complete now: the present modes are noted first.
        """
        if closing or self._noted is None:
            found = list(map(_TRAINING, self._fields))
            # compare the lists, because making `bytes` of a list in every step takes longer
            if found != self._found or self._noted is None:
                self._found, self._noted = found, bytes(found) or None
            self._counts = False
        return self._noted

    def present(self) -> bytes:
        """
        Return the present modes of the modules, one byte for each module: 1 for training, 0 for
        evaluation.
        """
        return bytes(map(_TRAINING, self._fields))

    def set(self, modes: bytes) -> None:
        """
        Set the modes of the modules to `modes`, which is a result of `present`.
        """
        for module, training in zip(self._modules, modes, strict=True):
            if module.training != bool(training):
                module.training = bool(training)

    def give(self) -> tuple[Buffer, ...]:
        """
        Return the modes of the modules (training or evaluation) at the end of the last step, as a
        buffer that is sent with a shard.

        The receiver is a replacement of a lost rank, or a rank that left its loop before the end of
        that step. Such a rank does not know the modes that the other ranks had at the end of the
        step.
        """
        noted = self.noted(closing=False)
        return () if noted is None else (Buffer(name=MODES, view=memoryview(noted)),)

    def take(self) -> tuple[Buffer, ...]:
        """
        Reserve memory for the modes of the modules (training or evaluation) on another rank, which
        has the same modules. Return the memory as a buffer.
        """
        self._given, self._counts = bytearray(len(self._modules)), False
        return (Buffer(name=MODES, view=memoryview(self._given)),) if self._given else ()

    def taken(self) -> None:
        """
        Note that the modes of the modules (training or evaluation) have arrived from another rank.
        Until the next step ends on this rank, `put_back` restores these modes.
        """
        self._counts = bool(self._given)

    def forget(self) -> None:
        """
        Drop the modes of modules (training or evaluation) that came from another rank.
        """
        self._given, self._counts = None, False

    def put_back(self, noted: object) -> None:
        """
        Restore the modes `noted`, a result of the method `noted`. If modes of another rank have
        arrived (see `taken`), restore the modes of that rank instead.

        Do nothing if the modes are None, or if their number is not the number of modules. Raises
        `MalformedMessage` if `noted` is neither bytes nor None.
        """
        if self._counts and self._given is not None:
            noted = bytes(self._given)
        if noted is None:
            return
        if not isinstance(noted, bytes):
            raise MalformedMessage(
                "the modes of modules in the rank-local state must be bytes, one for each module"
            )
        if len(noted) != len(self._modules):
            # the script was changed before the job was resumed, so the modules keep their present
            # modes
            return
        self.set(noted)
        self._noted, self._found = noted, []
