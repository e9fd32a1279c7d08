"""
Digests of plain values and tensors, and of the parts of a shard. Ranks use them to compare their
copies of a shard, and the audit of a training loop uses them.
"""

from collections.abc import Mapping
from itertools import count

import xxhash
from torch import Tensor

from tft.spi import UNSLICED, ShardPayload, SliceContent, digest_parts, pack, unpack
from tft_pytorch.memory import offered, readable
from tft_pytorch.tensor_metadata import dtype_name
from tft_pytorch.trees import Plain, expect

_SETTINGS = "optim.param_groups."
"""The prefix of the names of those tensors that are settings of parameter groups, such as a
learning rate."""
_COPIES = count(1)
"""Numbers that are the address of no tensor: each is given to one copy."""


def shard_parts(payload: ShardPayload, own: Mapping[str, bool]) -> dict[str, str]:
    """
    Return the digests of a shard by part (XXH3-128, hexadecimal). `payload` is in the form of
    `tft_give`.

    The parts are `model`, `master`, `optim`, `settings` (of the parameter groups), the scheduler
    and the others by their names. The part `description` has the rest. Each module buffer that is
    named in `own` is a separate part, whose name begins with `UNSLICED`. If its value in `own` is
    True, its digest is an empty text, because its content differs between ranks.
    """
    heads = plain_parts(payload.meta)

    def part(name: str) -> str:
        if name.startswith(_SETTINGS):
            return "settings"
        return f"{UNSLICED}{name}" if name in own else name.partition(".")[0]

    found = digest_parts(
        heads, ((part(each.name), each.name, each.view) for each in payload.buffers)
    )
    differ = {f"{UNSLICED}{name}" for name, differs in own.items() if differs}
    return {part: "" if part in differ else digest for part, digest in found.items()}


def plain_parts(meta: bytes) -> dict[str, bytes]:
    """
    Return the plain values of a shard by part, packed. `meta` is the description of the shard.
    """
    told = expect(unpack(meta), dict, "the description of a shard")
    optimizer, others = dict(told.pop("optimizer")["dict"]), told.pop("others")
    settings = optimizer.pop("param_groups")
    # Do not compare the bucket layouts. A rebuild gives all ranks the layouts of one rank, but a
    # rebuild that failed may have changed the layouts of some ranks only.
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
    Return what ranks compare of a shard in slices. `meta` is its description. Tensors in `own` are
    left out: whether such a buffer belongs to one rank alone is not known on all ranks alike.
    """
    kept = {name: tensor for name, tensor in tensors.items() if name not in own}
    return SliceContent(
        head=pack(plain_parts(meta)),
        buffers=tuple(offered(name, tensor) for name, tensor in kept.items()),
        identity=tuple(_place(tensor) for tensor in kept.values()),
    )


def _place(tensor: Tensor) -> int:
    """
    Return a number that changes if the content of the tensor is offered from other memory.
    """
    # what is not contiguous is offered as a copy, a new one each time
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
