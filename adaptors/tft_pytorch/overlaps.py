"""
Finds tensors of an optimizer's state that share memory with other tensors.

Each tensor is sent by itself. Another process gets separate tensors, and a change of one of them
would no longer change the other.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tft.errors import UsageError
from tft_pytorch.memory import readable

_PLAIN = (Tensor, nn.Parameter)
Pair = tuple[str, str]
"""The names of two tensors, in the order of the alphabet."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """
    The common memory of two tensors, as it was when the tensors were looked at.
    """

    storages: tuple[StorageWeakRef, StorageWeakRef]
    """Weak references to the memory of each tensor. New memory may have the address of memory that
    was freed, but never has an equal reference."""
    digest: int


class Overlaps:
    """
    Refuses overlaps (pairs of tensors that share memory) that began after the script had made its
    objects. Overlaps that exist from the beginning do no harm: another process makes them too, and
    its tensors are filled in place.
    """

    def __init__(self) -> None:
        self._known: frozenset[Pair] = frozenset()
        self._seen: dict[Pair, _Seen] = {}
        """The overlaps that the last call of `refuse_new` has found, without those in `_known` and
        those of a whole parameter. The next call finds out whether their memory has changed."""
        self._unsure: list[Pair] = []
        """The new overlaps of the last call of `refuse_new` that may do harm, but are not refused.
        Some were found for the first time, so nobody knows yet whether their memory changes.

        Others are of a whole parameter. They arise if an optimizer asks for a 32-bit copy of a
        parameter that has 32 bits already, and gets the parameter itself. They often do no harm,
        because most optimizers copy the values back in each step."""

    def known(self, tensors: Mapping[str, Tensor], optimizers: Collection[str]) -> None:
        """
        Note the overlaps among `tensors`, the state as the script has handed it over, by name.
        """
        self._known = frozenset(overlapping(tensors, optimizers))

    def refuse_new(self, tensors: Mapping[str, Tensor], optimizers: Collection[str]) -> None:
        """
        Raise `UsageError` if a tensor of an optimizer has come to share memory with another tensor,
        and the common memory has changed since the last call.

        Overlaps whose memory nobody changes, and overlaps of tensors that each step makes again,
        are not refused: a replacement process, where the tensors are separate, computes the same
        results. Overlaps of a whole parameter are not refused either (see `_unsure`).
        """
        before, self._seen, self._unsure = self._seen, {}, []
        for pair in sorted(set(overlapping(tensors, optimizers)) - self._known):
            one, other = pair
            if _is_alias(tensors, pair):
                self._unsure.append(pair)
                continue
            self._seen[pair] = now = _look(tensors, pair)
            last = before.get(pair)
            if last is None:
                self._unsure.append(pair)
            elif last.storages == now.storages and last.digest != now.digest:
                raise UsageError(
                    f"the tensors {one} and {other} share memory, and another process would get two "
                    "separate tensors: keep one of the two only, or make both when the optimizer is "
                    "made"
                )

    def reservation(self) -> str | None:
        """
        Return a sentence if a replacement process, in which the tensors of an overlap are separate,
        may compute other results than this process. Return None if there is no such overlap.
        """
        if not self._unsure:
            return None
        one, other = self._unsure[0]
        more = f" (further pairs: {len(self._unsure) - 1})" if len(self._unsure) > 1 else ""
        return (
            f"the tensors {one} and {other} share memory{more}, and a replacement process has two "
            "separate tensors: it trains on like the others only if no step needs the common memory"
        )


def _is_alias(tensors: Mapping[str, Tensor], pair: Pair) -> bool:
    one, other = (tensors[name] for name in pair)
    return any(name.startswith("model.") for name in pair) and (
        (one.data_ptr(), one.shape, one.stride(), one.dtype)
        == (other.data_ptr(), other.shape, other.stride(), other.dtype)
    )


def _look(tensors: Mapping[str, Tensor], pair: Pair) -> _Seen:
    # the memory that both tensors share is part of the smaller tensor, so digest only that tensor
    smaller = min(pair, key=lambda name: tensors[name].numel())
    first, second = (_storage(tensors[name]) for name in pair)
    digest = xxhash.xxh3_128_intdigest(readable(smaller, tensors[smaller]).view)
    return _Seen((first, second), digest)


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's own


def overlapping(tensors: Mapping[str, Tensor], optimizers: Collection[str]) -> Iterator[Pair]:
    """
    Yield the names of each pair of tensors that have elements in the same memory, if one of the two
    belongs to an optimizer. The names of an optimizer's tensors begin with a word in `optimizers`.
    """
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), name)
        for name, tensor in tensors.items()
        if type(tensor) in _PLAIN and tensor.layout == torch.strided and tensor.numel()
        if not tensor.is_meta
    )
    chunks: list[dict[str, Tensor]] = []
    device, reach = "", 0
    for place, start, end, name in spans:
        if place != device or start >= reach:
            chunks.append({})
            device, reach = place, 0
        chunks[-1][name] = tensors[name]
        reach = max(reach, end)

    def belongs(name: str) -> bool:
        return name.partition(".")[0] in optimizers

    for chunk in chunks:
        if len(chunk) > 1 and any(map(belongs, chunk)):
            yield from (
                (min(pair), max(pair)) for pair in _touching(chunk) if any(map(belongs, pair))
            )


def _touching(tensors: Mapping[str, Tensor]) -> Iterator[Pair]:
    """
    Yield the pairs of `tensors` that overlap, which means that they have a byte in common. Two
    columns of a matrix do not overlap: their elements alternate in memory, but each byte belongs to
    one column only.
    """
    first = min(tensor.data_ptr() for tensor in tensors.values())
    dense = all(map(_dense, tensors.values()))
    size = max(tensor.data_ptr() + _extent(tensor) for tensor in tensors.values()) - first
    taken = torch.zeros(0 if dense else size, dtype=torch.bool)
    seen: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = None if dense else _bytes(taken, tensor, first)
        if place is None or place.any():
            yield from ((other, name) for other, known in seen.items() if _touch(known, tensor))
        if place is not None:
            place.fill_(True)
        seen[name] = tensor


def _touch(one: Tensor, other: Tensor) -> bool:
    first = min(one.data_ptr(), other.data_ptr())
    ends = [tensor.data_ptr() + _extent(tensor) for tensor in (one, other)]
    if min(ends) <= max(one.data_ptr(), other.data_ptr()):
        return False
    if _dense(one) and _dense(other):
        return True
    taken = torch.zeros(max(ends) - first, dtype=torch.bool)
    _bytes(taken, one, first).fill_(True)
    return bool(_bytes(taken, other, first).any())


def _dense(tensor: Tensor) -> bool:
    return _extent(tensor) == tensor.numel() * tensor.element_size()


def _bytes(memory: Tensor, tensor: Tensor, first: int) -> Tensor:
    """
    Return a view of `memory`, which has one element for each byte from the address `first`. The view
    has the elements for the bytes of `tensor`.
    """
    size = tensor.element_size()
    strides = [each * size for each in tensor.stride()]
    return memory.as_strided((*tensor.shape, size), (*strides, 1), tensor.data_ptr() - first)


def _extent(tensor: Tensor) -> int:
    """
    Return the number of bytes from the first to the last element of the tensor.
    """
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
