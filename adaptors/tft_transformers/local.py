"""
What belongs to one rank alone: its position in the data, the random generators of its loader, and the
attributes that a class of the user gives its Trainer.
"""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from tft_pytorch.attributes import Attributes, set_by
from tft_pytorch.plain_values import placed
from tft_pytorch.unkept import Unkept
from transformers import Trainer

from tft import Session
from tft_transformers.batches import Source

_Plain = dict[str, Any]  # Any: plain values


class Local:
    """
    The object `data` of `session.adopt`.

    It is captured when the update window closes. State from another process is put in place by
    `settle`, not when it is loaded: an operation that is repeated first puts back what it has noted
    itself.
    """

    def __init__(self, source: Source, trainer: Any) -> None:
        """
        `trainer` is a `transformers.Trainer`, which has no types.
        """
        self._source = source
        self._device = trainer.args.device
        self._attributes = Attributes(trainer, attributes_of_trainers())
        self._unkept = Unkept(trainer.model)
        self._unkept.watch(trainer, self._attributes.keeps, attributes_of_trainers())
        self._received: _Plain | None = None
        self._place = source.position
        """The position that came with `_received`. When the source has another one, the training has
        gone on without `settle`."""

    def state_dict(self) -> _Plain:
        """
        Return the state of this rank.
        """
        here = self._received if self._source.position is self._place else None
        return {"position": self._source.state_dict(), **(here or self.noted())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: a result of `state_dict`
        """
        Go to the position in `state`. Keep the rest of it for `settle`.
        """
        self._received = {name: part for name, part in state.items() if name != "position"}
        self._source.load_state_dict(state["position"])
        self._place = self._source.position

    def settle(self) -> None:
        """
        Put what was loaded last in place.
        """
        if self._received is not None:
            self.put_back(self._received)

    def noted(self) -> _Plain:
        """
        Return a copy of the present state, without the position.
        """
        return {
            "generators": self._source.owned.states(),
            "attributes": deepcopy(self._attributes.noted()),
        }

    def put_back(self, noted: _Plain) -> None:
        """
        Restore a result of `noted`.
        """
        self._received = None
        self._source.owned.restore(noted["generators"])
        self._attributes.put_back(placed(deepcopy(noted["attributes"]), self._device))

    def report(self, session: Session) -> None:
        """
        Report attributes that change and are not kept, if this step is audited.
        """
        if session.audited:
            for what, told in self._unkept.sentences():
                session.unkept(what, told)


@cache
def attributes_of_trainers() -> frozenset[str]:
    """
    Return the names of the attributes that each Trainer has, because a method of the class sets them.
    """
    return set_by(Trainer) | {"_batches", "_computed"}
