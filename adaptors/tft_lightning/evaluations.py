"""
The loaders of the validations within `trainer.fit`. A validation that is repeated, or that another
process makes, must read and draw as the first one would have.
"""

from typing import Any

from tft_pytorch.generators import generators, restore
from torch.utils.data import DataLoader

from tft_lightning.owners import Owners, Watched

_OWNERS = "_tft_owners"
"""The attribute of a loader of validations that has its `Owners`."""

Trainer = Any  # Lightning's own types are not visible to mypy here


def watch(loader: object, watched: Watched) -> None:
    """
    Watch the objects behind `loader`, a loader of validations, before the sanity check reads it.
    """
    if isinstance(loader, DataLoader) and _OWNERS not in vars(loader):
        vars(loader)[_OWNERS] = Owners(loader, watched, lenient=True)


def set_up(trainer: Trainer) -> None:
    """
    Make the loaders of the validations, as the sanity check does that a replacement process leaves
    out. Later, the ranks would wait there for each other.
    """
    if trainer.enable_validation:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True


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
                _restore(loader, state)


def _noted(loader: Any) -> dict[str, Any] | None:
    owners: Owners | None = getattr(loader, "__dict__", {}).get(_OWNERS)
    if owners is None:
        return None
    return {"made": loader._iterator is not None, "states": owners.states()}


def _restore(loader: Any, noted: dict[str, Any]) -> None:
    owners: Owners = vars(loader)[_OWNERS]
    owners.put_back(noted["states"])
    if not noted["made"]:
        loader._iterator = None
    elif loader._iterator is None:
        # an iterator with workers that stay draws numbers once, when it is made
        drawn = generators()
        loader._iterator = loader._get_iterator()
        restore(drawn)
        owners.put_back(noted["states"])
