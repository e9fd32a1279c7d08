"""
Represents the content of one shard on this rank at one moment. This module also makes the
description of the content, which is sent to another rank before the tensors.

The tensors have the names of torch's own distributed checkpoints (`model.…`, `optim.state.…`),
because a shard is saved under these names. The master (32-bit copy) of a 16-bit parameter is named
`master.…`. The master is sent instead of the parameter, and the receiving rank rounds the parameter
from the master.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from tft.spi import ShardPayload, pack, unpack
from tft_pytorch.memory import offered
from tft_pytorch.tensor_metadata import listed
from tft_pytorch.trees import Plain, expect

Span = tuple[list[int], list[int]]
"""The position of one rank's part in a tensor: first the shape of the whole tensor, then the offset
of the part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContent:
    """
    The content of one shard: the tensors in use, not copies, and plain values.
    """

    form: int
    """The version of the format of the shard's description. A description of another version is
    refused."""
    tensors: dict[str, Tensor]
    """This rank's tensors, or parts of tensors, by name, in the order in which they are sent to
    another rank."""
    optimizer: Plain
    others: dict[str, Plain]
    """The shard's part of the state of the scheduler and similar objects, as plain values by the
    name of the object."""
    layouts: Any = None  # Any: plain values from `Wrappers.layouts`
    """The bucket layouts of the DDPs whose parameters are in the shard. A bucket layout says which
    gradients a DDP reduces together."""
    groups: list[list[str]] | None = None
    """The names of the parameters in each parameter group; None if the description of the shard has
    no such list."""
    spans: dict[str, Span] | None = None
    """The positions of those tensors that are parts of larger tensors, by name. None if the
    description of the shard has no positions."""
    extra: dict[str, Any] = field(default_factory=dict)  # Any: values of any type
    """Extra states of modules (see `get_extra_state` of torch), by torch's names for these states.
    They are used for checkpoints only: after an incident a rank uses the extra states in its
    rank-local state."""

    def meta(self) -> bytes:
        """
        Return the description of the shard, packed: all values that are not tensors, and for each
        tensor the data that is needed to reserve memory for it.
        """
        told: dict[str, object] = {"form": self.form, "tensors": listed(self.tensors)}
        if self.spans is not None:
            told["spans"] = {name: list(span) for name, span in self.spans.items()}
        told |= {"optimizer": self.optimizer, "others": dict(self.others)}
        if self.groups is not None:
            told["groups"] = self.groups
        return pack({**told, "layouts": self.layouts})

    def payload(self) -> ShardPayload:
        """
        Return the content of the shard in the form in which it is sent to another rank. The buffers
        are the tensors' own memory where possible, else copies.
        """
        return ShardPayload(
            meta=self.meta(),
            buffers=tuple(offered(name, tensor) for name, tensor in self.tensors.items()),
        )

    def bare(self) -> "ShardContent":
        """
        Return a copy of this `ShardContent` whose tensors have no content: they are on torch's meta
        device.
        """
        return replace(self, tensors={name: t.to("meta") for name, t in self.tensors.items()})

    def named(self, prefix: str) -> dict[str, Tensor]:
        """
        Return the tensors whose names begin with `prefix` and a dot.
        """
        return {n: tensor for n, tensor in self.tensors.items() if n.startswith(f"{prefix}.")}


def spans_of(meta: bytes) -> dict[str, Span]:
    """
    Return the positions of those tensors of a shard that are parts of larger tensors, by name.
    `meta` is the packed description of the shard.

    A position is the shape of the whole tensor and the offset of the part. The result is empty if
    no tensor of the shard is a part of a larger tensor.
    """
    told = expect(unpack(meta), dict, "the description of a shard")
    return {name: (list(whole), list(at)) for name, (whole, at) in told.get("spans", {}).items()}
