"""
The modes that a script switches while it trains, and switches back afterwards: evaluation instead
of training, and Megatron's overlapped gathering of parameters.

A fault in between leaves the modes as they were at that moment; a replacement rank has them as they
were built. All ranks must have the same.
"""

from typing import Any

from tft_megatron.training import Training


class Switches:
    """
    The modes at the time when the script hands over what it has built.
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
        Set all modes back.
        """
        for module, mode in self._modes:
            module.training = mode
        for chunk, gathers, by in zip(self._chunks, self._gathers, self._gathered_by, strict=True):
            chunk.config.param_sync_func = by
            _put_hooks(chunk, wanted=gathers)


def _gathers(chunk: Any) -> bool:  # Any: Megatron's DistributedDataParallel
    return bool(chunk.remove_forward_pre_hook_handles)


def _put_hooks(chunk: Any, *, wanted: bool) -> None:  # Any: as above
    """
    Give each module its hook, or remove all hooks.

    Megatron's own way to remove them expects all of them, and a fault may have come after some were
    removed.
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
