"""
Computes digests of plain values and tensors, and of the parts of a shard. Ranks use the digests to
compare their copies of a shard. The audit uses them too: it looks for actions of a training loop
that an incident cannot repair.
"""

from collections.abc import Collection, Mapping
from itertools import count

import xxhash
from torch import Tensor

from tft.spi import UNSLICED, ShardPayload, SliceContent, digest_parts, pack, unpack
from tft_pytorch.memory import offered, readable
from tft_pytorch.tensor_metadata import dtype_name
from tft_pytorch.trees import Plain, expect

_MODEL = "model"
_SETTINGS = "optim.param_groups."
"""The prefix of the names of tensors that are settings of parameter groups. An example is a
learning rate that is a tensor."""
_COPIES = count(1)
"""Yields a new number for each temporary copy of a tensor. `_place` returns this number instead of
a memory address. The numbers are so small that no tensor has such an address."""


def shard_parts(payload: ShardPayload, own: Mapping[str, bool]) -> dict[str, str]:
    """
    Return a digest of each part of a shard (XXH3-128, hexadecimal), by the name of the part.
    `payload` is the content of the shard, as the hook `tft_give` returns it.

    The parts are `model`, `master`, `optim`, `settings` (of the parameter groups), and one part for
    the scheduler and for each of the user's other objects, under its name. The part `description`
    has all other plain values. Each module buffer whose name is a key of `own` is a separate part,
    whose name begins with `UNSLICED`. If the value in `own` is True, the content of the buffer
    differs between ranks, so the digest of the buffer is an empty text.
    """
    heads = plain_parts(payload.meta)
    found = digest_parts(heads, ((_part(each.name, own), each) for each in payload.buffers))
    differ = {f"{UNSLICED}{name}" for name, differs in own.items() if differs}
    return {part: "" if part in differ else digest for part, digest in found.items()}


def model_part(tensors: Mapping[str, Tensor], own: Collection[str]) -> str:
    """
    Return the digest of the part `model` of a shard with these tensors, as `shard_parts` computes it.
    `own` has the names of module buffers, which are parts of their own. Return an empty text if the
    shard has no part `model`.
    """
    model = [each for each in tensors.items() if _part(each[0], own) == _MODEL]
    return digest_parts({}, ((_MODEL, offered(*each)) for each in model)).get(_MODEL, "")


def _part(name: str, own: Collection[str]) -> str:
    """
    Return the name of the part to which the tensor `name` belongs. `own` has the names of module
    buffers, each of which is a part of its own.
    """
    if name.startswith(_SETTINGS):
        return "settings"
    return f"{UNSLICED}{name}" if name in own else name.partition(".")[0]


def plain_parts(meta: bytes) -> dict[str, bytes]:
    """
    Return the plain values (not tensors) of each part of a shard, packed, by the name of the part.
    `meta` is the packed description of the shard, which has these values.
    """
    told = expect(unpack(meta), dict, "the description of a shard")
    optimizer, others = dict(told.pop("optimizer")["dict"]), told.pop("others")
    settings = optimizer.pop("param_groups")
    # Leave out DDP's bucket layouts, which may differ between ranks. A rebuild gives all ranks the
    # layouts of one rank, but a rebuild that failed may have changed the layouts of some ranks
    # only.
    told.pop("layouts", None)
    return {
        "description": pack(told),
        "optim": pack(list(optimizer.items())),
        "settings": pack(settings),
        **{name: pack(tree) for name, tree in others.items()},
    }


def slice_content(
    meta: bytes, tensors: Mapping[str, Tensor], own: Mapping[str, bool]
) -> SliceContent:
    """
    Return the content of a shard that its holders compare with each other, slice by slice.

    `meta` is the packed description of the shard, without the bucket layouts of DDP, which may
    differ between ranks (see `plain_parts`). `tensors` are the shard's tensors by name. The keys of
    `own` are the names of module buffers. These buffers are left out. Some of the buffers differ
    between ranks, and the ranks do not agree on which buffers differ: each rank knows only the
    buffers that it has seen change. Settings of parameter groups, such as a learning rate that
    is a tensor, are left out too: a script may set them at the head of its next step.
    """
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in own and not name.startswith(_SETTINGS)
    }
    return SliceContent(
        head=meta,
        buffers=tuple(offered(name, tensor) for name, tensor in kept.items()),
        identity=tuple(_place(tensor) for tensor in kept.values()),
    )


def _place(tensor: Tensor) -> int:
    """
    Return a number that identifies the memory from which the content of the tensor is read. If a
    later call returns a different number, the content is then read from different memory.
    """
    # if the tensor is not contiguous, its content is read from a temporary copy. Each copy is in
    # different memory, so it gets a new number
    return tensor.data_ptr() if tensor.is_contiguous() else next(_COPIES)


def digest(tree: Plain, tensors: Mapping[str, Tensor]) -> str:
    """
    Return the digest of plain values and tensors, with the tensors' names, types and shapes
    (XXH3-128, hexadecimal).
    """
    sum_ = xxhash.xxh3_128(pack(tree))
    for name, tensor in tensors.items():
        sum_.update(pack([name, dtype_name(tensor.dtype), list(tensor.shape)]))
        sum_.update(readable(name, tensor).view)
    return sum_.hexdigest()
