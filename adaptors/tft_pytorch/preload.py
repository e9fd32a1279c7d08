"""
What torch imports late, imported early: a replacement starts while the other ranks wait, and must
not import anything once it has joined them.

Found by looking at `sys.modules` over a first step, a first move of the shard, a first checkpoint;
`tests/adaptors/test_preload.py` looks again.
"""

import os

import numpy.random
import torch


def preload() -> None:
    """
    Import it: 0.7 to 1 s beyond `import torch`, most of it for `torch._dynamo`. Starts no thread,
    and touches no device, so that the process can be forked.
    """
    import torch._dynamo  # noqa: F401 (the first `optimizer.step` asks it whether it is compiling)

    import tft_pytorch.checkpoints  # noqa: F401 (for its imports, 0.1 s once dynamo is there)

    _keep_generators_apart()


def _keep_generators_apart() -> None:
    """
    A process that is forked after this draws its own numbers from numpy's and torch's global
    generators, as one that had imported them itself: all ranks would draw the same otherwise, and
    drop the same out. Python seeds its own anew.

    Not where a generator has been seeded or used meanwhile: then the script wants it inherited.
    """
    imported, started = _numpy_state(), torch.get_rng_state()

    def seed() -> None:
        if _numpy_state() == imported:
            numpy.random.seed()
        if torch.equal(torch.get_rng_state(), started):
            torch.seed()

    os.register_at_fork(after_in_child=seed)


def _numpy_state() -> tuple[bytes, int]:
    _, words, position, *_ = numpy.random.get_state(legacy=True)
    return numpy.asarray(words).tobytes(), int(position)
