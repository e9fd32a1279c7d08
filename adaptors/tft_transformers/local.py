"""
Keeps state that differs between ranks: the position in the data, the random generators and
attributes of the objects that the loader uses, and attributes that a user's subclass of `Trainer`
adds.
"""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from tft_pytorch.attributes import Attributes, set_by
from tft_pytorch.plain_values import placed
from tft_pytorch.unkept import Unkept, sentence
from transformers import Trainer

from tft import Session
from tft_transformers.batches import Source

_Plain = dict[str, Any]  # Any: plain values


class Local:
    """
    The object that `session.adopt` gets as `data`. Its `state_dict` becomes a part of the
    rank-local state.

    `load_state_dict` restores the data position at once, but only stores the rest of the state
    until `settle` restores it. If the rest were restored at once, a repeated operation would undo
    that, because it first restores the state that it noted when it began.
    """

    tft_position_of_loop = True
    """See `tft.spi.is_position_of_loop`."""

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
        """The data position that was loaded together with `_received`. If the source is at another
        position now, training has continued and `_received` is out of date."""

    def state_dict(self) -> _Plain:
        """
        Return the state of this rank.
        """
        here = self._received if self._source.position is self._place else None
        return {"position": self._source.state_dict(), **(here or self.noted())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: a result of `state_dict`
        """
        Move to the data position in `state`. Store the generators and attributes in `state` until
        `settle` restores them.
        """
        self._received = {name: part for name, part in state.items() if name != "position"}
        self._source.load_state_dict(state["position"])
        self._place = self._source.position

    def settle(self) -> None:
        """
        Restore the generators and attributes that `load_state_dict` has received last.
        """
        if self._received is not None:
            self.put_back(self._received)

    def noted(self) -> _Plain:
        """
        Return a copy of the present state, without the position.
        """
        return {
            **self._source.owners.states(),
            "attributes": deepcopy(self._attributes.noted()),
        }

    def put_back(self, noted: _Plain) -> None:
        """
        Restore a result of `noted`.
        """
        self._received = None
        self._source.owners.put_back(noted)
        self._attributes.put_back(placed(deepcopy(noted["attributes"]), self._device))

    def report(self, session: Session) -> None:
        """
        Report to the session attributes that are not kept: those of the loader's objects that have
        become too large, and, if the session audits this step, those of the Trainer that change but
        cannot be kept.
        """
        for owner, name in self._source.owners.grown():
            session.unkept(f"{owner}.{name}", sentence(owner, name))
        if session.audited:
            for what, told in self._unkept.sentences():
                session.unkept(what, told)


@cache
def attributes_of_trainers() -> frozenset[str]:
    """
    Return the names of the attributes that the methods of `Trainer` itself set. Attributes with
    other names were added by a subclass of the user.
    """
    return set_by(Trainer) | {"_batches", "_computed"}
