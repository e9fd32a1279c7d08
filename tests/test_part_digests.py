"""
Digests of the parts of a shard, which ranks compare.
"""

import random

import pytest

from tft.hooks import Buffer, ShardPayload
from tft.state_hooks import part_digests

LARGE = 300_000


def payload(*sizes: int, flip: int | None = None) -> ShardPayload:
    """
    Buffers of these sizes with content of their own, in two parts by turns; one bit of one of them flipped.
    """
    contents = [bytearray(random.Random(i).randbytes(size)) for i, size in enumerate(sizes)]
    if flip is not None:
        contents[flip][-1] ^= 1
    buffers = [
        Buffer(name=f"{('model', 'optim')[i % 2]}.{i}", view=memoryview(content))
        for i, content in enumerate(contents)
    ]
    return ShardPayload(meta=b"described", buffers=tuple(buffers))


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("flip", range(6))
def test_a_flipped_bit_is_in_the_digest_of_its_part_alone(size: int, flip: int) -> None:
    """
    When one bit of one buffer is another, then the digest of its part is, and no other.
    """
    sizes = (size,) * 6
    before, after = part_digests(payload(*sizes)), part_digests(payload(*sizes, flip=flip))
    changed = {part for part in before if before[part] != after[part]}
    assert changed == {("model", "optim")[flip % 2]}
    assert before.keys() == {"description", "model", "optim"}
