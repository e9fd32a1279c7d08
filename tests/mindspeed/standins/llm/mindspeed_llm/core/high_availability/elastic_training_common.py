"""
Which ranks train while some are lost.
"""

from typing import Any

from mindspeed_llm.core.high_availability import groups

_world: Any = None
_ranks: list[int] | None = None


def zit_scale_in_running_state() -> bool:
    """
    Fewer train now.
    """
    return _ranks is not None


def scale_in(ranks: list[int] | None, world: Any) -> None:
    """
    These train, in this group; None: all do.
    """
    global _ranks, _world
    _ranks, _world = ranks, world


def world() -> Any:
    """
    The group of those who train; None: the default one.
    """
    return _world


def holders(kind: groups.Kind) -> list[int] | None:
    """
    While some are lost: by part of the state, the first who has it.
    """
    if _ranks is None:
        return None
    there = _ranks
    return [
        next(rank for rank in same if rank in there)
        for same in zip(*groups.halves(kind.ranks), strict=True)
    ]
