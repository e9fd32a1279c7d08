"""
The state that several ranks hold alike: the state of network and optimizer. Each part of this state
belongs to one shard.

In MindSpore nearly all of this state consists of parameters: weights, moments, the step number, the
learning rate, and the powers of Adam's betas. Two parts of the state are plain values instead:
settings in the optimizer's parameter groups that are not Tensors, and the state of objects with a
`state_dict`, such as a scheduler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tft.errors import MalformedMessage, OrderRefused, UsageError
from tft.spi import Buffer, ShardPayload, pack, unpack
from tft_mindspore.memory import (
    Array,
    Described,
    Parameter,
    content,
    describe,
    flat_bytes,
    put,
    room,
)

DENSE = "dense"
"""The name of the shard that all ranks hold. This shard has all state that the user has not
assigned to only some ranks."""

_FORM = 1
"""The version of the format in which a shard is described to the rank that receives it. A
description of another version is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """
    A part of the state that only some ranks hold. This rank is among them.
    """

    names: Sequence[str]
    """The names of the parameters in this part. MindSpore's method `get_parameters` returns the
    parameters with these names."""
    ranks: Sequence[int]
    """All ranks that hold this part. This rank is among them."""


# Any: `holder` is a Cell of MindSpore, which gives mypy no types
def named_parameters(holder: Any) -> dict[str, Parameter]:
    """
    Return the parameters of a network or an optimizer by name.

    Raises `UsageError` if two parameters have the same name.
    """
    found: dict[str, Parameter] = {}
    for parameter in holder.get_parameters():
        if found.setdefault(parameter.name, parameter) is not parameter:
            raise UsageError(
                f"two parameters have the name {parameter.name!r}: give each parameter a name of "
                "its own"
            )
    return found


def group_values(optimizer: Any) -> tuple[dict[str, Parameter], list[dict[str, Any]]]:
    """
    Return the settings in the `param_groups` of an optimizer: first the settings that are Tensors,
    by name, then the plain settings of each group.

    Both results are empty for an optimizer without `param_groups`. Only optimizers of mint.optim
    and mindspore.experimental have `param_groups`.
    """
    from mindspore import Tensor  # imported here, because only training processes need MindSpore

    parameters: dict[str, Parameter] = {}
    plain: list[dict[str, Any]] = []  # Any: the values are numbers, flags or None
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        values = {key: value for key, value in group.items() if key != "params"}
        for key, value in values.items():
            if isinstance(value, Tensor):
                parameters[f"param_groups.{number}.{key}"] = value
        plain.append({key: value for key, value in values.items() if not isinstance(value, Tensor)})
    return parameters, plain


def is_setting(name: str) -> bool:
    """
    Return whether a parameter of this name is a setting of the optimizer, such as its learning
    rate.
    """
    return name.startswith("param_groups.") or "learning_rate" in name.rpartition(".")[2]


class Shard:
    """
    One shard of this rank. Its methods read the content of the shard, and write received content
    into the parameters."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, Parameter],
        ranks: tuple[int, ...],
        *,
        optimizer: Any = None,  # Any: the user's optimizer may have any class
        others: Mapping[str, Any] | None = None,  # Any: the user's objects may have any class
    ) -> None:
        """
        `name` is the name of the shard. `parameters` are the parameters in the shard, by name.
        `ranks` are the ranks that hold the shard; empty means all ranks. `optimizer` and `others`
        are the objects whose plain values (values that are not parameters) belong to the shard.
        """
        self.name = name
        self.ranks = ranks
        self.parameters = parameters
        self._optimizer = optimizer
        self._others = others or {}
        self._awaited: tuple[bytes, dict[str, Array]] | None = None

    def meta(self) -> bytes:
        """
        Return the description of the shard as bytes. The description has the plain values of the
        shard, and the name, type, shape and size of each parameter, so that a receiver can reserve
        memory.
        """
        return pack(
            {
                "form": _FORM,
                "parameters": [each.listed() for each in self._described().values()],
                "plain": self.plain(),
            }
        )

    def plain(self) -> dict[str, Any]:  # Any: the values have various plain types
        """
        Return the values of the shard that are not parameters: the plain settings of the optimizer
        and the state of objects such as a scheduler.
        """
        groups = [] if self._optimizer is None else group_values(self._optimizer)[1]
        others = {name: other.state_dict() for name, other in self._others.items()}
        return {"groups": groups, "others": others}

    def give(self) -> ShardPayload:
        """
        Return the shard in the form in which it is sent to another rank. The buffers in the result
        are the memory of the parameters, not copies.
        """
        return ShardPayload(
            meta=self.meta(),
            buffers=tuple(
                Buffer(name=name, view=flat_bytes(content(parameter)))
                for name, parameter in self.parameters.items()
            ),
        )

    def take(self, meta: bytes) -> list[Buffer]:
        """
        Reserve memory for a shard with the description `meta`. Return the memory as writable
        buffers. Raises `OrderRefused` if the description does not fit this rank's parameters.
        """
        self._refuse_another(meta)
        rooms = {name: room(parameter) for name, parameter in self.parameters.items()}
        self._awaited = meta, rooms
        return [Buffer(name=name, view=flat_bytes(array)) for name, array in rooms.items()]

    def taken(self, meta: bytes) -> None:
        """
        Put the received shard into use. This method is called when all buffers that `take` returned
        have been filled. Raises `OrderRefused` if `take` was not called with the description
        `meta`.
        """
        if self._awaited is None or self._awaited[0] != meta:
            raise OrderRefused(
                f"the shard {self.name!r} has arrived from another rank, but its description is "
                "not the one for which this rank has reserved memory"
            )
        contents = self._awaited[1]
        self._awaited = None
        self.settle(contents, _read(meta)["plain"])

    def settle(self, contents: Mapping[str, Array], plain: Mapping[str, Any]) -> None:
        """
        Write `contents` into the parameters, and restore the plain values. Raises `OrderRefused` if
        the plain values belong to other parameter groups or other objects.
        """
        groups = [] if self._optimizer is None else group_values(self._optimizer)[1]
        if len(plain["groups"]) != len(groups) or plain["others"].keys() != self._others.keys():
            raise OrderRefused(
                f"the received shard {self.name!r} has {len(plain['groups'])} parameter groups of "
                f"the optimizer and the state of the objects {sorted(plain['others'])}; this rank "
                f"has {len(groups)} parameter groups and the objects {sorted(self._others)}"
            )
        put(contents, self.parameters)
        for number, values in enumerate(plain["groups"]):
            self._optimizer.param_groups[number].update(values)
        for name, other in self._others.items():
            other.load_state_dict(plain["others"][name])

    def _described(self) -> dict[str, Described]:
        return {name: describe(name, parameter) for name, parameter in self.parameters.items()}

    def _refuse_another(self, meta: bytes) -> None:
        told = [Described.read(each) for each in _read(meta)["parameters"]]
        theirs = {each.name: each for each in told}
        ours = self._described()
        for name in [*theirs, *ours]:
            if theirs.get(name) != ours.get(name):
                raise OrderRefused(
                    f"the received shard {self.name!r} belongs to another model or optimizer: the "
                    f"parameter {name} is {theirs.get(name, 'absent')} in the shard, and "
                    f"{ours.get(name, 'absent')} on this rank"
                )
        if [each.name for each in told] != list(ours):
            raise OrderRefused(
                f"the received shard {self.name!r} has its parameters in another order than this "
                "rank"
            )


def _read(meta: bytes) -> dict[str, Any]:  # Any: the caller checks the values
    told = unpack(meta)
    if not isinstance(told, dict) or told.get("form") != _FORM:
        raise MalformedMessage(
            "the description of the shard was not written by the adaptor mindspore"
        )
    return told
