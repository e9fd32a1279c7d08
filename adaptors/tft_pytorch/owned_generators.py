"""
Reads and restores random generators that a data loader's sampler, collate function or dataset has
as attributes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tft.errors import UsageError
from tft.spi import generators
from tft_pytorch.tensor_metadata import byte_tensor

_State = Sequence[Any]  # Any: the kind of a generator, and its state as text or bytes

SAMPLERS = ("batch_sampler", "sampler")
READERS = ("dataset", "collate_fn", "data_collator", "__self__", "func")
"""Names of attributes. `SAMPLERS` has those in which samplers refer to other samplers. `READERS`
has those in which datasets and collate functions refer to other objects that read items."""


class Owned:
    """
    Reads and restores the random generators that the objects of one loader have as attributes. The
    attributes are searched at each call, because a collate function may make its generator only
    when it reads the first batch.
    """

    # Any: any torch.utils.data.DataLoader
    def __init__(
        self,
        loader: Any,
        but: tuple[type, ...] = (),
        wrapped: object = None,
        *,
        lenient: bool = False,
    ) -> None:
        """
        Leave out generators of objects whose class is in `but`. `wrapped` is a sampler that is
        wrapped in a sampler of the loader, and cannot be found through attributes with the names
        in `SAMPLERS`.

        Raises `UsageError` if the state of a generator cannot be read. With `lenient=True`, such a
        generator is neither read nor restored, and the method `unread` returns its owner and name.
        """
        self._but = but
        self._lenient = lenient
        self._unread: list[tuple[object, str, object]] = []
        """The generators that cannot be read, each with its owner and its name."""
        self.samplers = _owners(loader, "loader", SAMPLERS)
        """The objects that decide which items are in a batch, such as samplers, and the loader
        itself. The keys are their places: the path from the loader, such as `loader.sampler`."""
        if wrapped is not None:
            self.samplers |= _owners(wrapped, "wrapped", SAMPLERS)
        readers = {name: getattr(loader, name) for name in ("dataset", "collate_fn")}
        self.readers = {
            place: owner
            for name, start in readers.items()
            for place, owner in _owners(start, name, READERS).items()
        }
        """The objects that read items, such as the dataset and the collate function. The keys are
        their places, such as `dataset.dataset`."""
        self.states()

    def states(self) -> dict[str, _State]:
        """
        Return the states of the generators. The keys are made of the place of the owner and the
        name of the attribute.
        """
        states = {}
        owners = {**self.samplers, **self.readers}
        for place, name, each in self._found(owners):
            try:
                states[f"{place}.{name}"] = read(place, each)
            except UsageError:
                if not self._lenient:
                    raise
                self._unread.append((owners[place], name, each))
        return states

    def unread(self) -> list[tuple[object, str]]:
        """
        Return the owners and names of the generators whose state cannot be read, and which are not
        restored.
        """
        return [(owner, name) for owner, name, _ in self._unread]

    def restore(self, states: Mapping[str, _State], *, samplers: bool = True) -> None:
        """
        Restore the generators to `states`. Leave out generators of samplers if `samplers` is False.
        """
        owners = {**self.samplers, **self.readers} if samplers else self.readers
        present = {(place, name): each for place, name, each in self._found(owners)}
        for place, name in present:
            if f"{place}.{name}" not in states:  # the generator did not exist yet
                setattr(owners[place], name, None)
        for path, (kind, state) in states.items():
            place, _, name = path.rpartition(".")
            if place in owners:
                generator = present.get((place, name))
                if generator is None or kind_of(generator) != kind:
                    setattr(owners[place], name, made(kind, state))
                else:
                    put_back_into(generator, state)

    def _found(self, owners: Mapping[str, object]) -> Iterator[tuple[str, str, Any]]:
        """
        Yield each generator once: the place of its owner, its name, and the generator.
        """
        known: list[object] = [each for _, _, each in self._unread]
        for place, owner in owners.items():
            if isinstance(owner, self._but):
                continue
            for name, each in list(getattr(owner, "__dict__", {}).items()):
                if kind_of(each) and not any(each is other for other in known):
                    known.append(each)
                    yield place, name, each


def _owners(start: object, place: str, names: Sequence[str]) -> dict[str, object]:
    """
    Return the object `start`, whose place is `place`, and all objects that can be reached from it
    through attributes called `names`. The keys are the places of the objects.
    """
    found = {place: start}
    waiting = [(place, start)]
    while waiting:
        place, owner = waiting.pop()
        for name in names:
            inner = getattr(owner, name, None)
            if inner is not None and not any(inner is each for each in found.values()):
                found[f"{place}.{name}"] = inner
                waiting.append((f"{place}.{name}", inner))
    return found


def kind_of(value: object) -> str:
    """
    Return the kind of a random generator, and an empty text for any other object.
    """
    if isinstance(value, torch.Generator):
        return str(value.device)
    return generators.kind_of(value)


def read(place: str, generator: Any) -> _State:
    """
    Return the kind of a generator and its state. Raises `UsageError` if the state cannot be read;
    `place` names the owner in the message.
    """
    if isinstance(generator, torch.Generator):
        return [kind_of(generator), generator.get_state().numpy().tobytes()]
    try:
        return generators.read(generator)
    except NotImplementedError:
        raise UsageError(
            f"the {place} of the train dataloader has a {type(generator).__name__}, whose state "
            "cannot be kept for a replacement process: use a random.Random"
        ) from None


def put_back_into(generator: Any, state: Any) -> None:
    """
    Restore a generator to `state`, the second part of a result of `read`.
    """
    if isinstance(generator, torch.Generator):
        generator.set_state(byte_tensor(state))
    else:
        generators.put_back(generator, state)


def made(kind: str, state: Any) -> Any:
    """
    Return a new generator in the state `state`. `kind` and `state` are the two parts of a result of
    `read`.
    """
    if isinstance(state, str):  # the state of a generator of torch is bytes
        return generators.made(kind, state)
    generator = torch.Generator(kind)
    put_back_into(generator, state)
    return generator
