"""
Restores, after a fault, the modes that a script or Megatron may have switched for some time. The
modes are the training mode of modules (`train()` or `eval()`), Megatron's overlapped gathering of
parameters, and the functions with which Megatron's schedules begin to gather parameters and to
reduce gradients.

If a fault comes before the modes are switched back, a surviving rank still has the switched modes,
but a replacement process has the modes with which the objects were built. All ranks must train with
the same modes, so every rank returns to the modes of the beginning.
"""

from typing import Any

from tft_megatron.training import Training

_SYNCHRONIZING = ("param_sync_func", "grad_sync_func")
"""The fields of a model's configuration that Megatron's interleaved schedule sets to None while it
runs forward passes only. megatron-core 0.16 switches no other field of it for some time."""


class Switches:
    """
    The modes that the model had when the first groups of this process were formed.
    """

    def __init__(self, training: Training) -> None:
        self._chunks = training.chunks
        self._noted = False
        self._note()

    def begin(self) -> None:
        """
        Note the modes when groups are formed, if these are the first groups of this process. Until
        then the script may change the modes. Later the modes may be switched for some time.
        """
        if not self._noted:
            self._note()
            self._noted = True

    def put_back(self) -> None:
        """
        Restore the noted modes.
        """
        for module, mode in self._modes:
            module.training = mode
        for chunk, gathers in zip(self._chunks, self._gathers, strict=True):
            _put_hooks(chunk, wanted=gathers)
        for config, name, function in self._functions:
            setattr(config, name, function)

    def _note(self) -> None:
        self._modes = [
            (module, module.training) for chunk in self._chunks for module in chunk.modules()
        ]
        self._gathers = [_gathers(chunk) for chunk in self._chunks]
        self._functions = [
            (chunk.config, name, getattr(chunk.config, name))
            for chunk in self._chunks
            for name in _SYNCHRONIZING
        ]


def _gathers(chunk: Any) -> bool:  # Any: Megatron's DDP gives mypy no types
    return bool(chunk.remove_forward_pre_hook_handles)


def _put_hooks(chunk: Any, *, wanted: bool) -> None:  # Any: Megatron's DDP gives mypy no types
    """
    Add Megatron's forward hook, which gathers parameters, to each module of the chunk if `wanted`
    is True. Otherwise remove all these hooks.

    Megatron's own function to remove the hooks fails if some hooks are missing. Hooks can be
    missing if a fault has interrupted the removal.
    """
    if not chunk.use_forward_hook:
        return
    present = chunk.remove_forward_pre_hook_handles
    if wanted and len(present) == len(list(chunk.module.modules())):
        return
    for handle in present.values():
        handle.remove()
    present.clear()
    if wanted:
        chunk.enable_forward_pre_hook()
