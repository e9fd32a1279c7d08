"""
`bitflip`: exactly the named bits of the named tensor flip, and the record says which.
"""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from tft_chaos import VARIABLE, tft_opened
from tft_chaos.actions import ChaosMissed
from tft_chaos.bit_patterns import choose, flipped, pattern_of
from tft_chaos.bitflips import TensorMemory
from tft_chaos.spec import Bitflip, parse

from tests.plugins.stage import Scene, bits_of, content
from tests.plugins.view import View

Start = Callable[[Scene], ForkServerProcess]

PATIENCE = 30.0
"""The time limit of a wait on a busy machine, in seconds."""


def action(keys: str) -> Bitflip:
    """
    Return the action of a spec with these keys.
    """
    found = parse(f"bitflip:rank=0,target=param,{keys}").action
    assert isinstance(found, Bitflip)
    return found


def flip(tensor: torch.Tensor, keys: str) -> list[tuple[int, int]]:
    """
    Flip bits of a tensor. Return the elements and the bits that differ.
    """
    before = content(tensor)
    memory = TensorMemory(tensor)
    pattern = pattern_of(action(keys), memory)
    memory.write(flipped(memory.read(), memory.itemsize, pattern))
    return bits_of(tensor.element_size(), before, content(tensor))


def play(start: Start, scene: Scene) -> dict[str, Any]:  # Any: JSON
    """
    Play a scene to its end. Return what the record says of its only flip.
    """
    process = start(scene)
    process.join(PATIENCE)
    assert process.exitcode == 0
    return recorded(scene)


def recorded(scene: Scene) -> dict[str, Any]:  # Any: JSON
    """
    Return what the record says of the only flip of this rank, in step 2.
    """
    firing: dict[str, Any] = json.loads((scene.run_dir / "chaos" / "0-1.json").read_text())
    assert (firing["rank"], firing["step"]) == (scene.rank, 2)
    return firing


# ---------------------------------------------------------------- elements and bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_highest_bit_of_the_mantissa_of_the_largest_element_flips(dtype: torch.dtype) -> None:
    """When no key says what flips, then it is the highest bit of the mantissa of the element with
    the largest absolute value, in each type of numbers."""
    tensor = torch.tensor([[1.0, 3.0], [-5.0, 4.0]], dtype=dtype)

    assert len(flip(tensor, "step=1")) == 1

    assert tensor.tolist() == [[1.0, 3.0], [-7.0, 4.0]]  # 5.0 is 1.25 x 4 and becomes 1.75 x 4


@pytest.mark.parametrize(
    ("keys", "positions"),
    [
        ("element=7,bit=30", [(7, 30)]),
        ("element=7,bits=3", [(7, 20), (7, 21), (7, 22)]),
        ("element=7,bit=2,bits=3", [(7, 0), (7, 1), (7, 2)]),
        ("element=7,period=5,bit=31", [(2, 31), (7, 31), (12, 31), (17, 31), (22, 31)]),
        ("element=7,period=40B,bit=0", [(7, 0), (17, 0)]),
        ("element=0,period=12,bit=4,bits=2", [(0, 3), (0, 4), (12, 3), (12, 4)]),
        ("period=1,bit=0", [(element, 0) for element in range(24)]),
    ],
)
@pytest.mark.parametrize("strided", [False, True])
def test_exactly_the_named_bits_of_the_named_elements_flip(
    keys: str, positions: list[tuple[int, int]], *, strided: bool
) -> None:
    """When keys name elements and bits, then exactly these bits flip in row-major order, in a
    tensor whose memory has another order, too."""
    tensor = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    tensor = tensor.t().contiguous().t() if strided else tensor

    assert flip(tensor, keys) == positions


def test_named_bit_of_whole_numbers_flips() -> None:
    """When the tensor has whole numbers or truth values, then the named bit of the largest flips."""
    numbers = torch.tensor([3, -9, 4])

    assert flip(numbers, "bit=2") == [(1, 2)]
    assert flip(torch.tensor([False, True]), "bit=0") == [(1, 0)]
    with pytest.raises(ChaosMissed, match=r"mantissa of the type int64: name the bit with bit=B"):
        flip(numbers, "step=1")


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("element=24", "the tensor has no element 24: this rank has 24 elements"),
        ("bit=32", "a float32 has no bit 32: its highest bit is 31"),
        ("bits=24", "bits=24 is more than the bits from bit 22 of a float32 down to"),
        ("period=42B", "a period of 42 bytes is not a multiple of the 4 bytes of a float32"),
        ("period=24", "a period of 24 elements meets fewer than two of the 24 elements"),
        ("element=4,period=20", "a period of 20 elements meets fewer than two of the 24 elements"),
    ],
)
def test_pattern_that_does_not_fit_the_tensor_changes_nothing(keys: str, sentence: str) -> None:
    """When the tensor has no such element, bit or period, then a sentence says so, and no bit
    flips."""
    tensor = torch.arange(24, dtype=torch.float32)

    with pytest.raises(ChaosMissed, match=sentence):
        flip(tensor, keys)
    assert tensor.tolist() == list(range(24))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("tensor=3", "there is no tensor number 3: the model has 3 tensors, counted from 0"),
        ("tensor=d", "the model has no tensor d; the model has the tensors a, b, c"),
        ("tensor=a", "this rank has no exp_avg of a; it has the exp_avg of b, c"),
        ("tensor=0", "this rank has no exp_avg of a; it has the exp_avg of b, c"),
    ],
)
def test_tensor_that_a_rank_does_not_have_is_named(keys: str, sentence: str) -> None:
    """When the model or the rank does not have the named tensor, then a sentence says which there
    are."""
    with pytest.raises(ChaosMissed, match=sentence):
        choose(action(keys), ["a", "b", "c"], {"b": 1, "c": 2}, "exp_avg")


def test_first_tensor_that_the_rank_has_is_the_default() -> None:
    """When no tensor is named, then the first of which the rank has such state is meant. A number
    counts all tensors of the model."""
    names, held = ["a", "b", "c"], {"b": 1, "c": 2}

    assert choose(action("step=1"), names, held, "exp_avg") == ("b", 1)
    assert choose(action("tensor=2"), names, held, "exp_avg") == ("c", 2)
    with pytest.raises(ChaosMissed, match="this rank has no master of any tensor"):
        choose(action("step=1"), names, {}, "master")


# ---------------------------------------------------------------- in a process that trains


@pytest.mark.parametrize(
    ("target", "tensor"),
    [
        ("param", "layers.0.weight"),
        ("exp_avg", "layers.0.weight"),
        ("exp_avg_sq", "layers.0.weight"),
        ("master", "layers.0.weight"),
        ("buffer", "seen"),
    ],
)
def test_flip_changes_exactly_the_recorded_bits_of_the_state(
    start: Start, tmp_path: Path, target: str, tensor: str
) -> None:
    """When bits of the state flip, then of all tensors of the rank only the named one differs, in
    the bits that the record names, in that step only."""
    spec = f"bitflip:rank=0,step=2,target={target},element=1,period=3,bits=2"
    scene = Scene(run_dir=tmp_path, chaos=(spec,), masters=target == "master")

    evidence = play(start, scene)["evidence"]

    number = 2 if target == "buffer" else 11
    positions = [(1 + 3 * turn, bit) for turn in range(number) for bit in (21, 22)]
    assert [scene.flips(step) for step in (1, 2, 3)] == [{}, {f"{target} {tensor}": positions}, {}]
    assert evidence == {
        "target": target,
        "tensor": tensor,
        "dtype": "float32",
        "of": 6 if target == "buffer" else 32,
        "elements": {"first": 1, "number": number, "period": 3},
        "bits": [22, 21],
    }


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("target", ["param", "exp_avg", "exp_avg_sq"])
def test_one_bit_of_the_first_parameter_flips_by_default(
    start: Start, tmp_path: Path, target: str, *, masters: bool
) -> None:
    """When a spec names only a target, then one bit flips: of the first parameter or its moments.
    With masters, the optimizer has the moments under the master."""
    scene = Scene(
        run_dir=tmp_path, chaos=(f"bitflip:rank=0,step=2,target={target}",), masters=masters
    )

    evidence = play(start, scene)["evidence"]

    bit = 6 if masters and target == "param" else 22
    element = evidence["elements"]["first"]
    assert scene.flips(2) == {f"{target} layers.0.weight": [(element, bit)]}


@pytest.mark.parametrize("tensor", ["3", "layers.2.bias"])
def test_parameter_is_named_by_number_or_name(start: Start, tmp_path: Path, tensor: str) -> None:
    """When a spec has the number or the name of a parameter, then a bit of that one flips."""
    chaos = (f"bitflip:rank=0,step=2,target=exp_avg,tensor={tensor},bit=31",)
    scene = Scene(run_dir=tmp_path, chaos=chaos)

    play(start, scene)

    assert scene.flips(2) == {"exp_avg layers.2.bias": [(0, 31)]}


def test_flipped_gradient_is_the_one_that_the_update_uses(start: Start, tmp_path: Path) -> None:
    """When bits of a gradient flip, then of all gradients of the step only this one differs from
    the undisturbed ones, in the recorded bits."""
    spec = "bitflip:rank=0,step=2,target=gradient,tensor=layers.0.bias,element=0,period=4,bits=3"
    calm = Scene(run_dir=tmp_path, chaos=(), rank=1)
    scene = Scene(run_dir=tmp_path, chaos=(spec,))
    start(calm).join(PATIENCE)

    firing = play(start, scene)

    assert firing["phase"] == "backward"
    assert scene.gradients(1) == calm.gradients(1)
    differ = {
        name: bits_of(4, found, scene.gradients(2)[name])
        for name, found in calm.gradients(2).items()
    }
    positions = [(element, bit) for element in (0, 4) for bit in (20, 21, 22)]
    assert {name: bits for name, bits in differ.items() if bits} == {"layers.0.bias": positions}
    assert firing["evidence"]["elements"] == {"first": 0, "number": 2, "period": 4}
    assert scene.flips(2) == {}


def test_flipped_gradient_reaches_all_ranks_through_the_all_reduce(
    start: Start, tmp_path: Path
) -> None:
    """When a gradient of one rank flips, then after the all-reduce all ranks have equal gradients
    and equal parameters. The flipped elements, and no others, differ from the undisturbed ones."""
    spec = "bitflip:rank=1,step=2,target=gradient,element=5,period=8,bit=30"
    ranks = {}
    for name, chaos in (("calm", ()), ("struck", (spec,))):
        where = tmp_path / name
        where.mkdir()
        ranks[name] = [Scene(run_dir=where, chaos=chaos, rank=r, world=2) for r in range(2)]
        processes = [start(scene) for scene in ranks[name]]
        for process in processes:
            process.join(PATIENCE)
        assert [process.exitcode for process in processes] == [0, 0]
    calm, struck = ranks["calm"][0], ranks["struck"]

    assert struck[0].gradients(1) == calm.gradients(1)
    assert struck[0].gradients(2) == struck[1].gradients(2)
    differ = {
        name: sorted({element for element, _ in bits_of(4, found, struck[0].gradients(2)[name])})
        for name, found in calm.gradients(2).items()
    }
    assert {name: elements for name, elements in differ.items() if elements} == {
        "layers.0.weight": [5, 13, 21, 29]
    }
    memories = [scene.file("memory").read_bytes() for scene in (*struck, calm)]
    assert memories[0] == memories[1] != memories[2]
    recorded(struck[1])


def test_gradient_flips_once_when_a_replacement_computes_the_step(
    start: Start, tmp_path: Path
) -> None:
    """When another process of the rank computes the step again in which a gradient has flipped,
    then its gradients are the undisturbed ones."""
    calm = Scene(run_dir=tmp_path, chaos=(), rank=1)
    struck = Scene(run_dir=tmp_path, chaos=("bitflip:rank=0,step=2,target=gradient",))
    replacement = replace(struck, incarnation=1)
    for each in (calm, struck, replacement):
        start(each).join(PATIENCE)

    assert struck.gradients(2) != calm.gradients(2)
    assert replacement.gradients(2) == calm.gradients(2)
    recorded(struck)


def test_gradient_that_no_backward_pass_computes_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the backward pass of the step does not compute the gradient, then a sentence says that
    no bit was flipped, and nothing is recorded."""
    monkeypatch.setenv(VARIABLE, json.dumps(["bitflip:rank=0,target=gradient,tensor=unused"]))
    view = View(rank=0, incarnation=0, world=1, run_dir=tmp_path, step=1)
    striker: Any = tft_opened(session=view)  # Any: whatever a plugin returns
    model = torch.nn.ParameterDict({"used": torch.ones(2), "unused": torch.ones(2)})
    striker.tft_on_adopted(parts={"model": model, "optimizer": None})

    model["used"].sum().backward()

    with pytest.raises(ChaosMissed, match="no backward pass of step 1 has computed this gradient"):
        striker.tft_on_window_closed(step=1)
    assert not (tmp_path / "chaos").exists()


def test_missed_flip_does_not_keep_other_faults_from_happening(
    start: Start, tmp_path: Path
) -> None:
    """When a rank has no such tensor, then a later spec of the same step still strikes the rank, and
    the missed flip is not recorded."""
    chaos = (
        "bitflip:rank=0,step=2,target=param,tensor=99",
        "bitflip:rank=0,step=2,target=gradient,tensor=no.such",
        "kill:rank=0,step=2,phase=between",
    )
    scene = Scene(run_dir=tmp_path, chaos=chaos)
    process = start(scene)
    process.join(PATIENCE)

    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "chaos").glob("*.json")] == ["2-1.json"]
