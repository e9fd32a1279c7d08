"""
Whether each module trains or evaluates (`module.training`). A fault inside an evaluation leaves the
processes that survive it in its modes; what counts is what they were when the last step was complete.
"""

from operator import itemgetter
from typing import Any

from torch import nn

from tft.errors import MalformedMessage
from tft.hooks import Buffer

_KEY = "training"
_TRAINING = itemgetter(_KEY)


MODES = "modes"
"""What they are called in a shard."""


class Modes:
    """
    The modes of some models' modules, and their way back.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._fields: list[dict[str, Any]] = []  # Any: what modules have, of which one is read
        self._noted: bytes | None = None
        self._found: list[bool] = []
        """The same, one by one."""
        self._given: bytearray | None = None
        self._counts = False
        """What was given goes before what this rank has noted."""

    def watch(self, *models: nn.Module) -> None:
        """
        The modules of these from now on, in their order. Modules that are added later do not count.
        """
        every = [module for model in models for module in model.modules()]
        # compiled to TorchScript they keep it elsewhere, and then nobody else can change it there
        self._modules = [module for module in every if _KEY in vars(module)]
        # asking the modules themselves would take four times as long
        self._fields = [vars(module) for module in self._modules]
        self._noted = None

    def noted(self, *, closing: bool) -> bytes | None:
        """
        What they were when the last step was complete, for `put_back`: `closing` says that one is now.
        None where there are no modules.
        """
        if closing or self._noted is None:
            found = list(map(_TRAINING, self._fields))
            if (
                found != self._found or self._noted is None
            ):  # a list is made and compared sooner than bytes
                self._found, self._noted = found, bytes(found) or None
            self._counts = False
        return self._noted

    def present(self) -> bytes:
        """
        What they are now, a byte for each module.
        """
        return bytes(map(_TRAINING, self._fields))

    def set(self, modes: bytes) -> None:
        """
        Make them what `present` has returned.
        """
        for module, training in zip(self._modules, modes, strict=True):
            if module.training != bool(training):
                module.training = bool(training)

    def give(self) -> tuple[Buffer, ...]:
        """
        What they were when the last step ended, for a rank that was lost, or left, before it ended that step, and does
        not know of what the others have changed then.
        """
        noted = self.noted(closing=False)
        return () if noted is None else (Buffer(name=MODES, view=memoryview(noted)),)

    def take(self) -> tuple[Buffer, ...]:
        """
        Room for those of another rank, whose models are as these are.
        """
        self._given, self._counts = bytearray(len(self._modules)), False
        return (Buffer(name=MODES, view=memoryview(self._given)),) if self._given else ()

    def taken(self) -> None:
        """
        They have come, and count until the next step has ended here.
        """
        self._counts = bool(self._given)

    def forget(self) -> None:
        """
        What has come from another rank does not count any more.
        """
        self._given, self._counts = None, False

    def put_back(self, noted: object) -> None:
        """
        What they were. Nothing is done where it is not known, or was noted of another number of modules.
        """
        if self._counts and self._given is not None:
            noted = bytes(self._given)
        if noted is None:
            return
        if not isinstance(noted, bytes):
            raise MalformedMessage("private state with modes of modules that cannot be read")
        if len(noted) != len(self._modules):
            return  # a script that was changed before it was resumed says itself what they are
        self.set(noted)
        self._noted, self._found = noted, []
