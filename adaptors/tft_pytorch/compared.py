"""
Digests of a shard by its parts, for ranks that compare what they hold, and for the audit of a loop.
"""

from collections.abc import Mapping

from tft.digests import digest_parts
from tft.hooks import ShardPayload
from tft.protocol.codec import pack, unpack
from tft_pytorch.trees import expect

_SETTINGS = "optim.param_groups."
"""Before the names of tensors in the settings of parameter groups, such as a learning rate."""


def shard_parts(payload: ShardPayload, own: Mapping[str, bool]) -> dict[str, str]:
    """
    Digests (XXH3-128, hexadecimal) of a shard that `tft_give` would give: `model`, `master`, `optim`, the `settings` of
    the parameter groups, the scheduler and the others by their names, and `description`, which is the rest. Buffers
    in `own` stand alone; where that is True the digest is empty: this rank's content is its own.
    """
    told = expect(unpack(payload.meta), dict, "the description of a shard")
    optimizer, others = dict(told.pop("optimizer")["dict"]), told.pop("others")
    settings = optimizer.pop("param_groups")
    # a rebuild brings the wrappers of all ranks to those of one; one that failed has done so on some
    told.pop("layouts", None)
    heads = {
        "description": pack(told),
        "optim": pack(list(optimizer.items())),
        "settings": pack(settings),
        **{name: pack(tree) for name, tree in others.items()},
    }

    def part(name: str) -> str:
        if name.startswith(_SETTINGS):
            return "settings"
        return name if name in own else name.partition(".")[0]

    found = digest_parts(
        heads, ((part(each.name), each.name, each.view) for each in payload.buffers)
    )
    return {part: "" if own.get(part) else digest for part, digest in found.items()}
