"""
The loaders of the validations within `trainer.fit`. A validation that is repeated, or that another
process makes, must read and draw as the first one would have.
"""

from typing import Any

from torch.utils.data import DataLoader

from tft_lightning.owners import Owners, Watched

_OWNERS = "_tft_owners"
"""The attribute of a loader of validations that has its `Owners`."""


def watch(loader: object, watched: Watched) -> None:
    """
    Watch the objects behind `loader`, a loader of validations, before the sanity check reads it.
    """
    if isinstance(loader, DataLoader) and _OWNERS not in vars(loader):
        vars(loader)[_OWNERS] = Owners(loader, watched)


def noted_evaluations(loop: Any) -> list[dict[str, Any] | None] | None:
    """
    Return the states of the loaders of `loop`, the loop of the validations. Return None if they do
    not exist yet.
    """
    if loop._combined_loader is None:
        return None
    return [_noted(each) for each in loop._combined_loader.flattened]


def restore_evaluations(loop: Any, noted: list[dict[str, Any] | None] | None) -> None:
    """
    Restore a result of `noted_evaluations` of this process or another one.
    """
    if noted is None:
        loop._combined_loader = None
    elif loop._combined_loader is not None:
        for loader, state in zip(loop._combined_loader.flattened, noted, strict=True):
            if state is not None:
                owners: Owners = vars(loader)[_OWNERS]
                owners.put_back(state)


def _noted(loader: Any) -> dict[str, Any] | None:
    owners: Owners | None = getattr(loader, "__dict__", {}).get(_OWNERS)
    return None if owners is None else owners.states()
