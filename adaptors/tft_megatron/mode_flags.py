"""
Restores, after a fault, the modes that a script may have switched for some time. The modes are the
training mode of modules (`train()` or `eval()`), and Megatron's overlapped gathering of parameters.

If a fault comes before the script switches back, a surviving rank still has the switched modes,
but a replacement process has the modes with which the objects were built. All ranks must train with
the same modes, so every rank returns to the modes of the beginning.
"""

from typing import Any

from tft_megatron.training import Training


class Switches:
    """
    The modes that the model had when the script called `tft_megatron.enable`.
    """

    def __init__(self, training: Training) -> None:
        self._chunks = training.chunks
        self._modes = [
            (module, module.training) for chunk in training.chunks for module in chunk.modules()
        ]
        self._gathers = [_gathers(chunk) for chunk in training.chunks]
        self._gathered_by = [chunk.config.param_sync_func for chunk in training.chunks]

    def put_back(self) -> None:
        """
        Give the modules of the model the modes that they had at the call of `tft_megatron.enable`.
        """
        for module, mode in self._modes:
            module.training = mode
        for chunk, gathers, by in zip(self._chunks, self._gathers, self._gathered_by, strict=True):
            chunk.config.param_sync_func = by
            _put_hooks(chunk, wanted=gathers)


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
