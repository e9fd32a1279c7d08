"""
The ranks that train while other ranks are lost.
"""

from typing import Any

from mindspeed_llm.core.high_availability import groups

_world: Any = None
_ranks: list[int] | None = None


def zit_scale_in_running_state() -> bool:
    """
    Return whether fewer ranks train at the moment.
    """
    return _ranks is not None


def scale_in(ranks: list[int] | None, world: Any) -> None:
    """
    Set the training ranks and their group. None means that all ranks train.
    """
    global _ranks, _world
    _ranks, _world = ranks, world


def world() -> Any:
    """
    Return the group of the training ranks, or None if all ranks train in the default group.
    """
    return _world


def holders(kind: groups.Kind) -> list[int] | None:
    """
    Return, for each part of the state, the first training rank that holds it; None if all ranks
    train.
    """
    if _ranks is None:
        return None
    there = _ranks
    return [
        next(rank for rank in same if rank in there)
        for same in zip(*groups.halves(kind.ranks), strict=True)
    ]
