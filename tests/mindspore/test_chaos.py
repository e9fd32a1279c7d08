"""
Tests of injected faults in MindSpore's Cells and optimizers that the job tests do not cover.
"""

import json
from pathlib import Path

import numpy
import pytest
from mindspore import Tensor, nn
from tft_chaos import mindspore_hooks as cells
from tft_chaos.actions import ChaosMissed
from tft_mindspore.memory import content

from tests.mindspore.conftest import train


@pytest.mark.soak
def test_a_flipped_bit_and_a_slow_rank_are_not_reported_as_faults(tmp_path: Path) -> None:
    """When a bit flips in one rank's state, and another rank is slow, then no fault is reported,
    and from then on the ranks differ."""
    outcome = train(
        tmp_path / "run",
        "--chaos", "slow:rank=0,step=2,factor=3",
        "--chaos", "bitflip:rank=1,step=4,target=exp_avg",
        nproc=2, arguments=("--steps", "8"),
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    assert outcome.incidents == []
    slow, flipped = outcome.chaos()
    assert slow["evidence"] == {"factor": 3.0}
    assert flipped["evidence"]["part"] == "exp_avg", json.dumps(flipped)
    finals = outcome.finals()
    assert finals[0]["parameters"] != finals[1]["parameters"]


def test_the_highest_bit_of_the_mantissa_flips() -> None:
    """When a bit of an element flips, then it is the highest bit of the mantissa, and no other
    element changes."""
    array = numpy.array([[1.0, 3.0], [5.0, 7.0]], numpy.float32)
    cells.flip(array, 2)
    assert array.tolist() == [[1.0, 3.0], [7.0, 7.0]]  # 5.0 is 1.25 x 4 and becomes 1.75 x 4


def test_half_of_a_whole_update_is_undone_before_the_fault() -> None:
    """When an optimizer has changed all parameters in one call, then half of the change is undone
    before the fault strikes. The moments stay as the whole update left them."""
    network = nn.SequentialCell(nn.Dense(3, 2), nn.Dense(2, 2))
    optimizer = nn.Adam(network.trainable_params(), 0.1)
    before = [content(p).copy() for p in optimizer.parameters]
    seen: list[tuple[int, int]] = []
    cells.watch_halfway(optimizer, lambda: not seen, lambda *found: seen.append(found))
    optimizer(tuple(Tensor(numpy.ones(p.shape, numpy.float32)) for p in optimizer.parameters))

    same = [
        numpy.array_equal(content(p), b) for p, b in zip(optimizer.parameters, before, strict=True)
    ]
    assert same == [False, False, True, True]
    assert seen == [(2, 4)]
    momentum = nn.Momentum(nn.Dense(2, 2).trainable_params(), 0.1, 0.9)
    with pytest.raises(ChaosMissed, match=r"no exp_avg_sq"):
        cells.array_of(momentum, "exp_avg_sq")
