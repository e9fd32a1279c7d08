"""
Keeps what `training_step` returned in the last complete step, because a replacement process must
pass it to callbacks. Values that are too large are not kept.
"""

from collections.abc import Collection, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import suppress
from typing import Any

from tft_pytorch.plain_values import plain

from tft.errors import UsageError
from tft.spi.plain_values import LIMIT, NotPlain, size_of


def partly_kept(output: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[Any]]:
    """
    Return the values of `output` that the rank-local state keeps, by name, and the names of the
    other values. Both consist of plain values (which can be packed as bytes). A value whose name is
    not plain is in neither.
    """
    kept, left_out = {}, []
    for name, value in output.items():
        with suppress(NotPlain):
            key = plain(name)
            noted = _small(value) if isinstance(key, bool | int | float | str | bytes) else None
            if noted is None:
                left_out.append(key)
            else:
                kept[key] = noted[0]
    return kept, left_out


def _small(value: Any) -> tuple[Any] | None:
    """
    Return `value` as a plain value in a tuple. Return None if it is large or is not plain: only
    numbers, texts, tensors, arrays, and containers of them are plain.
    """
    with suppress(NotPlain):
        noted = plain(value)
        if size_of(noted) <= LIMIT:
            return (noted,)
    return None


class PartialOutput(dict[Any, Any]):
    """
    A part of the dict that `training_step` has returned. Access to a value that was left out raises
    `UsageError`, also with `get` and `in`. So no callback takes such a value for missing.
    """

    def __init__(self, kept: Mapping[Any, Any], left_out: Collection[Any]) -> None:
        super().__init__(kept)
        self._left_out = left_out

    def _check(self, name: Any) -> None:
        if name in self._left_out:
            raise UsageError(
                f"outputs[{name!r}] of the last complete step is not there in a process that has taken "
                f"the place of another one, because it has more than {LIMIT // 1024} KiB or is no plain "
                "value: compute in training_step what the callback needs of it, and return that"
            )

    def __missing__(self, name: Any) -> Any:
        self._check(name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        self._check(name)
        return super().__contains__(name)

    def get(self, name: Any, default: Any = None) -> Any:
        """
        Return the value `name`, or `default` if `training_step` has returned no such value.
        """
        self._check(name)
        return super().get(name, default)

    def pop(self, name: Any, *default: Any) -> Any:
        """
        Remove the value `name`, and return it.
        """
        self._check(name)
        return super().pop(name, *default)

    def __len__(self) -> int:
        return super().__len__() + len(self._left_out)

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        yield from self._left_out

    def keys(self) -> Any:  # Any: not the type that a dict has
        """
        Return the names of all values, also of those that were left out.
        """
        return KeysView(self)

    def values(self) -> Any:  # Any: not the type that a dict has
        """
        Return all values. Iterating to a value that was left out raises `UsageError`.
        """
        return ValuesView(self)

    def items(self) -> Any:  # Any: not the type that a dict has
        """
        Return all names with their values. Iterating to a value that was left out raises
        `UsageError`.
        """
        return ItemsView(self)

    def copy(self) -> dict[Any, Any]:
        """
        Return an ordinary dict with all values. Raises `UsageError` if a value was left out.
        """
        return dict(self.items())
