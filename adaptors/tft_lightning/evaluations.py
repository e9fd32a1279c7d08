"""
The data loaders of the validations within `trainer.fit`. After an incident a validation may run
again, also in a replacement process. It must then read the same items, and draw the same random
numbers, as without the incident.
"""

from operator import is_
from typing import Any

from tft_pytorch.generators import generators, restore
from torch.utils.data import DataLoader

from tft_lightning.owners import Owners, Watched

_OWNERS = "_tft_owners"
"""The name of the attribute that holds the `Owners` of a validation loader."""

Trainer = Any  # Lightning's own types are not visible to mypy here


def watch(loader: object, watched: Watched) -> None:
    """
    Note the objects that `loader` uses, such as its dataset, so that changes of their attributes
    are found. `loader` is a validation loader that the sanity check has not read yet.
    """
    if isinstance(loader, DataLoader) and _OWNERS not in vars(loader):
        vars(loader)[_OWNERS] = Owners(loader, watched, lenient=True)


def set_up(trainer: Trainer) -> None:
    """
    Make the validation loaders in a replacement process, which may skip the sanity check that
    usually makes them. They are made now, before training, because making them uses collectives in
    which the other ranks would not take part later.
    """
    if trainer.enable_validation:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True


def noted_evaluations(loop: Any) -> list[dict[str, Any] | None] | None:
    """
    Return the states of the loaders of `loop`, the loop of the validations. Return None if the
    loaders do not exist yet.
    """
    if loop._combined_loader is None:
        return None
    return [_noted(each) for each in loop._combined_loader.flattened]


def restore_evaluations(loop: Any, noted: list[dict[str, Any] | None] | None) -> None:
    """
    Restore the loaders of `loop` to `noted`, a result of `noted_evaluations` of this process or
    another one.
    """
    if noted is None:
        loop._combined_loader = None
    elif loop._combined_loader is not None:
        for loader, state in zip(loop._combined_loader.flattened, noted, strict=True):
            if state is not None:
                _restore(loader, state)


class Evaluations:
    """
    Notes the states of the validation loaders for the rank-local state of each step. To save time,
    the states are read again only when they may have changed: after a validation, when an epoch
    begins, and when an attribute of an object that a loader uses has another value. All other steps
    use the noted states.
    """

    def __init__(self, loop: Any) -> None:
        """
        Replace the method `run` of `loop`, the loop of the validations, by one that calls `renew`
        after each validation.
        """
        self._loop = loop
        self._noted: tuple[list[dict[str, Any] | None] | None] | None = None
        self._seen: list[object] = []
        native = loop.run

        def run() -> Any:
            try:
                return native()
            finally:
                self.renew()

        loop.run = run

    def noted(self) -> list[dict[str, Any] | None] | None:
        """
        Return the states of the validation loaders. Return None if the loaders do not exist yet.
        """
        present = self._attributes()
        same = len(present) == len(self._seen) and all(map(is_, present, self._seen))
        if self._noted is None or not same:
            self._noted, self._seen = (noted_evaluations(self._loop),), present
        return self._noted[0]

    def renew(self) -> None:
        """
        Drop the noted states, so that the next call of `noted` reads them again.
        """
        self._noted, self._seen = None, []

    def restore(self, noted: list[dict[str, Any] | None] | None) -> None:
        """
        Restore the validation loaders to `noted`, a result of the method `noted` of this process or
        another one.
        """
        self.renew()
        restore_evaluations(self._loop, noted)

    def _attributes(self) -> list[object]:
        loaders = self._loop._combined_loader
        owners = [_owners_of(each) for each in (loaders.flattened if loaders is not None else ())]
        return [loaders, *(value for each in owners if each for value in each.attributes())]


def _owners_of(loader: Any) -> Owners | None:
    owners: Owners | None = getattr(loader, "__dict__", {}).get(_OWNERS)
    return owners


def _noted(loader: Any) -> dict[str, Any] | None:
    owners = _owners_of(loader)
    if owners is None:
        return None
    return {"made": loader._iterator is not None, "states": owners.states()}


def _restore(loader: Any, noted: dict[str, Any]) -> None:
    owners: Owners = vars(loader)[_OWNERS]
    owners.put_back(noted["states"])
    if not noted["made"]:
        loader._iterator = None
    elif loader._iterator is None:
        # When the states were noted, this loader had an iterator with persistent workers, which
        # draws random numbers only when it is made. So make the iterator now, and then undo what
        # making it has changed: the generators of the process and the states of the loader's
        # objects.
        drawn = generators()
        loader._iterator = loader._get_iterator()
        restore(drawn)
        owners.put_back(noted["states"])
