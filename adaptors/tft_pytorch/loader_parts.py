"""
Finds the objects that a data loader uses: samplers, which decide which items are in a batch, and
readers, which read the items, such as the dataset and the collate function.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from tft_pytorch.owned_generators import READERS, SAMPLERS

_FEW = 64
"""How many elements of a list, tuple or dict are searched. A longer one has items or indices."""


def samplers_of(loader: "DataLoader[Any]") -> list[Any]:  # Any: samplers may have any type
    """
    Return the sampler and the batch sampler of `loader`, in this order, and then the samplers
    within them. Datasets that are made of samplers are included.
    """
    starts = (loader.sampler, loader.batch_sampler)
    return _found(starts, SAMPLERS, (Sampler, Dataset), readers_of(loader))


def readers_of(loader: "DataLoader[Any]") -> list[Any]:  # Any: readers may have any type
    """
    Return the dataset and the collate function of `loader`, and the objects within them that read
    items, such as the dataset of a `Subset`.
    """
    return _found((loader.dataset, loader.collate_fn), READERS, (Dataset,), ())


def _found(
    starts: Sequence[Any], names: Sequence[str], kinds: tuple[type, ...], but: Sequence[Any]
) -> list[Any]:
    """
    Return the objects `starts`, and those within them that are an attribute with one of `names` or
    have one of the classes `kinds`. Leave out the objects `but`.
    """
    found: list[Any] = []
    waiting = list(starts)
    while waiting:
        owner = waiting.pop(0)
        # a class, as of a classmethod that collates, holds nothing of its own
        if (
            owner is None
            or isinstance(owner, type)
            or any(owner is each for each in (*found, *but))
        ):
            continue
        found.append(owner)
        waiting += [getattr(owner, name, None) for name in names]
        waiting += [each for _, each in members(owner) if isinstance(each, kinds)]
    return found


def members(owner: object) -> Iterator[tuple[str, Any]]:  # Any: attributes may have any type
    """
    Yield the names and values of the attributes of `owner`, and the elements of those that are
    lists, tuples or dicts. The arguments of a `functools.partial` count as attributes. Modules and
    classes have none.
    """
    if isinstance(owner, ModuleType | type):
        return
    attributes = dict(getattr(owner, "__dict__", {}))
    if isinstance(owner, partial):
        attributes |= {**owner.keywords, "args": owner.args}
    for name, value in attributes.items():
        yield name, value
        elements = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list | tuple):
            yield from ((name, each) for each in islice(elements, _FEW))
