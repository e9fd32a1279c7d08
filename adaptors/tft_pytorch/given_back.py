"""
Checks, after state was put into the user's objects, that the objects return the same state.

After `load_state_dict`, an object may not have the state that its `state_dict` returned before. If
all ranks load the same checkpoint, they all get the same wrong state, and a comparison of the ranks
finds no difference. So each rank compares its state with the content that it has loaded.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import xxhash
from torch import Tensor

from tft.errors import OrderRefused
from tft.spi import pack, unpack
from tft_pytorch.memory import readable
from tft_pytorch.shard_content import ShardContent
from tft_pytorch.trees import MAPS, Plain, expect


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """
    The content of a shard that is about to be put into the user's objects.
    """

    meta: bytes
    """The packed description of the shard."""
    tensors: Mapping[str, Tensor]
    sums: Mapping[str, int]
    """Digests of those tensors that an object may change while it loads them, by name."""
    loading: frozenset[str]
    """The names of the objects whose own `load_state_dict` is called."""


def given(meta: bytes, tensors: Mapping[str, Tensor], loading: Collection[str]) -> Given:
    """
    Note the content of a shard before it is put into the user's objects.

    `loading` are the names of the objects whose own `load_state_dict` is called. Only tensors of
    these objects are digested. The content may have the tensors that such an object uses already,
    and its `load_state_dict` may change them in place.
    """
    read = {name: each for name, each in tensors.items() if name.partition(".")[0] in loading}
    return Given(
        meta=meta,
        tensors=tensors,
        sums={name: _sum(name, each) for name, each in read.items()},
        loading=frozenset(loading),
    )


def refuse_changed(content: Given, now: ShardContent, *, new_keys: bool) -> None:
    """
    Raise `OrderRefused` if `now`, the present content of a shard, is not the `content` that was put
    into the user's objects. Parameters and buffers are not compared.

    A present tensor that still uses the memory of the given tensor counts as equal, and is not
    read. This does not hold for a tensor of which `content` has a digest.

    Pass `new_keys=True` if another version of an object's class may have saved `content`. Then
    dicts in `now` may have further keys. The present state of an object in `content.loading` may
    also lack keys that `content` has.
    """
    told = expect(unpack(content.meta), dict, "the description of a shard")
    comparison = _Comparison(content, now.tensors, new_keys=new_keys)
    where = comparison.difference(told["optimizer"], now.optimizer, "optim")
    if where is not None:
        raise OrderRefused(
            f"the optimizer does not have the state that was put into it: {where} differs"
        )
    for name, tree in told["others"].items():
        present = now.others.get(name)
        if new_keys and name in content.loading:
            tree = _without(tree, present)
        where = comparison.difference(tree, present, name)
        if where is not None:
            raise OrderRefused(
                f"the object {name} does not have the state that was put into it: {where} "
                f"differs. The method load_state_dict of {name} must give back exactly what its "
                "state_dict gave, with the same types of values and tensors"
            )


class _Comparison:
    """
    Compares trees (nested containers) in their plain form, and the tensors in them.
    """

    def __init__(self, content: Given, now: Mapping[str, Tensor], *, new_keys: bool) -> None:
        self._content = content
        self._now = now
        self._new_keys = new_keys
        self._names: dict[str, str] = {}
        self._back: dict[str, str] = {}

    def difference(self, there: Plain, here: Plain, name: str) -> str | None:
        """
        Return the name of the first place at which two trees differ, or None if they are equal.
        `there` is the tree that was put into an object, `here` the present one, and `name` the name
        of both. The order of the keys of dicts does not matter, nor does the type of a dict, a list
        or a number.
        """
        own, other = _entries(there), _entries(here)
        if own is not None and other is not None:
            new = other.keys() - own.keys()
            if own.keys() - other.keys() or (new and not (self._new_keys and _is_map(here))):
                return name
            found = (
                self.difference(value, other[key][1], f"{name}.{called!s}")
                for key, (called, value) in own.items()
            )
            return next((each for each in found if each is not None), None)
        tensors = _tensor(there), _tensor(here)
        if tensors[0] is not None and tensors[1] is not None:
            return None if self._same(tensors[0], tensors[1]) else name
        if type(there) is type(here):
            return None if pack(there) == pack(here) else name
        numbers = isinstance(there, int | float) and isinstance(here, int | float)
        return None if numbers and there == here else name

    def _same(self, there: str, here: str) -> bool:
        # Names must map one to one: two tensors must not have become the same tensor, and one
        # tensor must not have become two.
        if (
            self._names.setdefault(there, here) != here
            or self._back.setdefault(here, there) != there
        ):
            return False
        one, other = self._content.tensors[there], self._now[here]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        known = self._content.sums.get(there)
        if known is not None:
            return known == _sum(here, other)
        place = (one.device, one.data_ptr(), one.stride())
        return place == (other.device, other.data_ptr(), other.stride()) or _sum(
            there, one
        ) == _sum(here, other)


def _sum(name: str, tensor: Tensor) -> int:
    return xxhash.xxh3_128_intdigest(readable(name, tensor).view)


def _tensor(plain: Plain) -> str | None:
    found = plain.get("tensor") if isinstance(plain, dict) else None
    return found if isinstance(found, str) else None


def _without(there: Plain, here: Plain) -> Plain:
    """
    Return the dict `there` without the keys that the dict `here` does not have. Return `there`
    unchanged if one of the two is not a dict.
    """
    own, other = _entries(there), _entries(here)
    if not (_is_map(there) and _is_map(here)) or own is None or other is None:
        return there
    return {"dict": [[*pair] for key, pair in own.items() if key in other]}


def _is_map(plain: Plain) -> bool:
    return isinstance(plain, dict) and not plain.keys().isdisjoint(MAPS)


def _entries(plain: Plain) -> dict[bytes, tuple[Plain, Plain]] | None:
    """
    Return the entries of a dict, list or tuple, each as a key and a value, by the packed key. The
    keys of a list are its indices. Return None if `plain` is another value.
    """
    content = plain
    if isinstance(plain, dict):
        [(kind, content)] = plain.items()
        if kind in MAPS and isinstance(content, list):
            pairs = [expect(pair, list, "an entry of a dict") for pair in content]
            return {pack(key): (key, value) for key, value in pairs}
        if kind != "tuple":
            return None
    if not isinstance(content, list):
        return None
    return {pack(at): (at, value) for at, value in enumerate(content)}
