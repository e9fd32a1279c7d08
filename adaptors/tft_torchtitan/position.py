"""
The position of this rank in the training data: the state of TorchTitan's data loader, and how many
tokens the rank has seen.
"""

import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from tft_pytorch.generators import generators, restore

_LARGE = 16384
"""A value in the state of a loader is compressed if it has more bytes than this, because a position
must not be larger than 256 KiB. TorchTitan's text loaders have large values: the tokens of the last
document that no batch has used yet."""


class Position:
    """
    The object that `session.adopt` gets as `data`. It lives as long as the process. The trainer
    whose loader it reads is made again after each incident, and is passed to `attach`.
    """

    tft_position_of_loop = True
    """See `tft.spi.is_position_of_loop`."""

    def __init__(self) -> None:
        self._loader: Any = None  # Any: what the loader's `state_dict` returns
        """The state of the loader. None means that the loader is as the trainer's constructor has
        made it, and that no batch was taken."""
        self._tokens = 0
        self._trainer: Callable[[], Any] = _nobody  # Any: TorchTitan has no types
        """A function that returns the trainer whose loader is read, or None if there is none. It is
        a weak reference, because a strong one would keep the trainer's model and process groups."""
        self._taken = False
        """True if a batch was taken since the loader was asked for its state."""

    def attach(self, trainer: Any) -> None:  # Any: TorchTitan has no types
        """
        Bring the loader of a new trainer to this position, and read the position from this loader
        from now on. Does nothing if this was done for this trainer before.
        """
        if self._trainer() is trainer:
            return
        loader, drawn = trainer.dataloader, generators()
        if self._loader is not None:
            loader.load_state_dict(_unpacked(self._loader))
            trainer.ntokens_seen = self._tokens
        # A loader makes its iterator when its state is first read, and then draws a seed from
        # torch's generator. Items of a dataset without a position are read again, and may draw from
        # any generator. Make the iterator now and restore the generators, so that a loader that is
        # made again after an incident does not change the random numbers of training.
        loader.state_dict()
        restore(drawn)
        self._trainer = weakref.ref(trainer)

    def detach(self) -> None:
        """
        Read the position from the loader for the last time, and drop the reference to the trainer.
        """
        self.state_dict()
        self._trainer = _nobody

    def taken(self) -> None:
        """
        Note that a batch was taken from the loader.
        """
        self._taken = True

    def state_dict(self) -> dict[str, Any]:
        """
        Return the position of the next batch.
        """
        trainer = self._trainer()
        if trainer is not None:
            if self._taken:
                self._loader, self._taken = _packed(trainer.dataloader.state_dict()), False
            if self._loader is not None:
                self._tokens = trainer.ntokens_seen
        return {"loader": self._loader, "tokens": self._tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Store the position `state`. The next call of `attach` brings the loader of its trainer to
        this position.
        """
        self._loader, self._tokens, self._taken = state["loader"], state["tokens"], False


def _packed(state: dict[str, Any]) -> dict[str, Any]:
    """
    Return the state of a loader, in which values that are bytes and larger than `_LARGE` are
    compressed.
    """
    return {
        name: {"compressed": zlib.compress(value, 1)}
        if isinstance(value, bytes) and len(value) > _LARGE
        else value
        for name, value in state.items()
    }


def _unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the state of a loader from which `_packed` has made `state`.
    """
    return {
        name: zlib.decompress(value["compressed"])
        if isinstance(value, dict) and value.keys() == {"compressed"}
        else value
        for name, value in state.items()
    }


def _nobody() -> None:
    return None
