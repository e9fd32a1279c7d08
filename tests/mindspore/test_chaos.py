"""
Tests of injected faults in MindSpore's Cells and optimizers that the job tests do not cover.
"""

import json
from pathlib import Path
from typing import Any

import mindspore
import numpy
import pytest
from mindspore import Parameter, Tensor, nn
from tft_chaos import VARIABLE, tft_opened
from tft_chaos import mindspore_hooks as cells
from tft_chaos.actions import ChaosMissed
from tft_chaos.bit_patterns import flipped, pattern_of
from tft_chaos.spec import Bitflip, parse
from tft_mindspore.memory import content

from tests.mindspore.conftest import train
from tests.plugins.view import View


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
    assert flipped["evidence"]["target"] == "exp_avg", json.dumps(flipped)
    finals = outcome.finals()
    assert finals[0]["parameters"] != finals[1]["parameters"]


def flip(tensor: Parameter, keys: str) -> None:
    """Flip bits of a tensor, as a spec with these keys does."""
    action = parse(f"bitflip:rank=0,target=param,{keys}").action
    assert isinstance(action, Bitflip)
    memory = cells.ArrayMemory(tensor.asnumpy())
    memory.write(flipped(memory.read(), memory.itemsize, pattern_of(action, memory)))


def test_the_highest_bit_of_the_mantissa_flips() -> None:
    """When a bit of an element flips, then it is the highest bit of the mantissa, and no other
    element changes."""
    tensor = Parameter(numpy.array([[1.0, 3.0], [5.0, 7.0]], numpy.float32))
    flip(tensor, "element=2")
    # 5.0 is 1.25 x 4 and becomes 1.75 x 4
    assert tensor.asnumpy().tolist() == [[1.0, 3.0], [7.0, 7.0]]
    flip(tensor, "element=0,period=2,bit=31")
    assert tensor.asnumpy().tolist() == [[-1.0, 3.0], [-7.0, 7.0]]


def test_parameters_moments_and_buffers_are_found_by_name() -> None:
    """When a spec names a target, then it is found under the name of its parameter. The parameters
    that are not trained are the buffers. There are no masters."""
    network = nn.SequentialCell(nn.Dense(3, 4), nn.BatchNorm1d(4))
    optimizer = nn.Adam(network.trainable_params(), 0.1)
    trained = [p.name for p in network.trainable_params()]
    kept = {p.name: p for p in optimizer.get_parameters()}
    names, held = cells.state_of("exp_avg_sq", network, optimizer)
    assert names == list(held) == trained
    assert all(held[name] is kept[f"moment2.{name}"] for name in names)
    names, held = cells.state_of("buffer", network, optimizer)
    assert list(held) == names == ["1.moving_mean", "1.moving_variance"]
    with pytest.raises(ChaosMissed, match="the optimizers of MindSpore keep no 32-bit masters"):
        cells.state_of("master", network, optimizer)


def test_a_gradient_flips_before_it_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When bits of a gradient flip, then the gradients that the script gets differ in these bits
    only, and those of the next step are right again."""
    spec = "bitflip:rank=0,step=2,target=gradient,tensor=1,element=1,bit=31"
    monkeypatch.setenv(VARIABLE, json.dumps([spec]))
    view = View(rank=0, incarnation=0, world=1, run_dir=tmp_path, step=1)
    striker: Any = tft_opened(session=view)  # Any: whatever a plugin returns
    network = nn.Dense(3, 2)
    striker.tft_on_adopted(parts={"model": network, "optimizer": None})
    function = mindspore.value_and_grad(
        lambda x: network(x).sum(), None, weights=network.trainable_params()
    )

    seen = []
    for view.step in (1, 2, 3):
        _, gradients = function(Tensor(numpy.ones((4, 3), numpy.float32)))
        seen.append([gradient.asnumpy().tolist() for gradient in gradients])
        striker.tft_on_window_closed(step=view.step)

    weight = [[4.0] * 3] * 2
    assert seen == [[weight, [4.0, 4.0]], [weight, [4.0, -4.0]], [weight, [4.0, 4.0]]]
    evidence = json.loads((tmp_path / "chaos" / "0-1.json").read_text())["evidence"]
    assert (evidence["tensor"], evidence["bits"]) == ("bias", [31])


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
    momentum = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    assert cells.state_of("exp_avg", network, momentum)[1]
    assert not cells.state_of("exp_avg_sq", network, momentum)[1]
