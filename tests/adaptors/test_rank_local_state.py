"""
The rank-local state: it takes little time to capture, and random draws repeat after it is restored.
"""

import copy
import random
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.extra import ExtraStates
from tft_pytorch.forward_buffers import INLINE
from tft_pytorch.state_store import StateStore
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchdata.stateful_dataloader import (  # type: ignore[import-untyped]  # it has no types
    StatefulDataLoader,
)

from tests.adaptors.ranks import Batches
from tft.errors import MalformedMessage, OrderRefused, StateChanged, UsageError
from tft.protocol.codec import pack, unpack


def adopted(model: nn.Module | None = None, **parts: Any) -> StateStore:
    """
    Return the adopted state of a model with SGD and these additional parts.
    """
    model = model or nn.Linear(4, 4)
    return adopt(
        {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **parts}, None
    )


def test_generators_and_data_repeat_after_a_rollback() -> None:
    """When a captured state is restored, then the generators draw the same numbers again, and the
    data continues at its earlier position."""
    data = Batches(0)
    state = adopted(data=data, rng=("torch", "python", "numpy"))

    def draw() -> list[object]:
        return [
            torch.rand(3).tolist(),
            random.random(),
            random.gauss(0.0, 1.0),
            numpy.random.rand(),
            numpy.random.standard_normal(),
            data.next().tolist(),
        ]

    draw()
    local_state = state.capture()
    drawn = draw()
    state.rollback(local_state)

    assert draw() == drawn


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_data_loader_reads_the_lost_batches_again(workers: int) -> None:
    """When the data is a StatefulDataLoader, which has tensors in its position, then a new iterator
    gives exactly the lost batches after a rollback. This holds in the same process and in another
    one."""

    def loader(seed: int) -> StatefulDataLoader[int]:
        shuffling = torch.Generator()
        shuffling.manual_seed(seed)
        return StatefulDataLoader(
            range(100),
            batch_size=4, shuffle=True, generator=shuffling, num_workers=workers,
        )  # fmt: skip

    data = loader(1)
    state = adopted(data=data)
    batches = iter(data)
    for _ in range(3):
        next(batches)
    local_state = state.capture()
    lost = [next(batches).tolist() for _ in range(3)]
    state.rollback(local_state)
    end_workers(batches)
    batches = iter(data)
    assert [next(batches).tolist() for _ in range(3)] == lost

    other = loader(2)
    adopted(data=other).rollback(local_state)
    again = iter(other)
    assert [next(again).tolist() for _ in range(3)] == lost
    end_workers(batches, again)


def end_workers(*iterators: Any) -> None:  # Any: torchdata has no types
    """
    End the worker processes of these data loader iterators.

    Otherwise the garbage collector waits ten seconds for them, during another test.
    """
    for iterator in iterators:
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


class Remaining:
    """
    Data whose position is a tensor of the remaining indices.
    """

    left = torch.arange(2)

    def state_dict(self) -> dict[str, Tensor]:
        """
        Return the remaining indices. The tensor is empty at the end of the data.
        """
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """
        Set the remaining indices to those in `state`.
        """
        self.left = state["left"]


class LivePosition:
    """
    Data whose `state_dict` returns the live object, which the data goes on changing.
    """

    def __init__(self, position: dict[str, object]) -> None:
        self.position = position

    def state_dict(self) -> dict[str, object]:
        """
        Return the position itself, not a copy.
        """
        return self.position

    def load_state_dict(self, state: dict[str, object]) -> None:
        """
        Do nothing: no test calls this method.
        """


@pytest.mark.parametrize(
    ("before", "after"),
    [({"n": 1}, {"n": 2}), ({"n": 1}, {"n": True}), ({"n": [1]}, {"n": [2]}), ({"n": 0.0}, {"n": -0.0})],
    ids=["number", "bool", "nested", "sign"],
)  # fmt: skip
@pytest.mark.parametrize("own", [False, True], ids=["another object", "the same object"])
def test_capture_contains_the_current_data_position(
    before: dict[str, object], after: dict[str, object], own: bool
) -> None:
    """When only the data position has changed since the last capture, by a new object or in place,
    then the next capture has the new position."""
    data = LivePosition(copy.deepcopy(before))
    state = adopted(data=data)
    state.capture()
    state.capture()
    if not own:
        data.position = copy.deepcopy(after)
    elif isinstance(data.position["n"], list):
        data.position["n"][0] = 2
    else:
        data.position["n"] = after["n"]

    found = unpack(state.capture())["data"]

    assert repr(found) == repr(after)


def test_capture_contains_the_current_generator_and_module_modes() -> None:
    """When only torch's generator changes, or only the mode of a module when the update window
    closes, then the next capture differs from the last one."""
    model = nn.Linear(4, 4)
    state = adopted(model, data=Batches(0))
    captures = [state.capture(closing=True), state.capture(closing=True)]
    torch.rand(1)
    captures.append(state.capture(closing=True))
    model.eval()
    captures.append(state.capture(closing=True))
    model.train()
    captures.append(state.capture(closing=True))

    assert captures[0] == captures[1]
    assert len({captures[1], captures[2], captures[3]}) == 3
    assert captures[4] == captures[2]


def test_data_position_with_an_empty_tensor_is_restored() -> None:
    """When a tensor in the data position has no elements, then the position is captured and
    restored like any other."""
    data = Remaining()
    state = adopted(data=data)
    data.left = data.left[2:]
    local_state = state.capture()
    data.left = torch.ones(3, dtype=torch.int64)
    state.rollback(local_state)
    assert (data.left.shape, data.left.dtype) == ((0,), torch.int64)


class Skipping(Batches):
    """
    Data with a method that skips batches.
    """

    def skip(self, batches: int) -> None:
        """
        Draw the next `batches` batches and drop them.
        """
        for _ in range(batches):
            self.next()


def test_batches_are_skipped_by_the_skip_method_of_the_data() -> None:
    """When batches are to be skipped, then the data's own method `skip` does it, and a rollback
    undoes it. Data without this method is refused with a message."""
    data = Skipping(0)
    state = adopted(data=data)
    local_state = state.capture()
    drawn = [data.next().tolist() for _ in range(3)]
    state.rollback(local_state)
    state.skip(2)
    assert data.next().tolist() == drawn[2]
    state.rollback(local_state)
    assert data.next().tolist() == drawn[0]

    with pytest.raises(
        OrderRefused, match=r"data is a Batches, which has no method skip\(batches\)"
    ):
        adopted(data=Batches(0)).skip(1)


def test_generators_that_are_not_named_are_not_rolled_back() -> None:
    """When only torch's generator is part of the rank-local state, which is the default, then a
    rollback does not change Python's generator."""
    state = adopted()
    local_state = state.capture()
    drawn = random.random()
    state.rollback(local_state)

    assert random.random() != drawn


def test_a_rollback_drops_the_gradients() -> None:
    """When a rank-local state is restored, then no gradient of the abandoned step is left."""
    model = nn.Linear(4, 4)
    state = adopted(model)
    model(torch.ones(1, 4)).sum().backward()

    state.rollback(state.capture())

    assert [parameter.grad for parameter in model.parameters()] == [None, None]


def test_module_modes_are_rolled_back_to_the_last_complete_step() -> None:
    """When modules change to evaluation mode in an abandoned step, then a rollback gives each
    module its mode of the last complete step. The successor of a dead rank gets the same modes."""
    model, fresh = (nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4)) for _ in range(2))
    model.append(nn.Linear(4, 4))
    fresh.append(nn.Linear(4, 4))
    state = adopted(model)
    model[1].eval()
    state.capture(closing=True)
    model.eval()
    local_state = state.capture()
    state.rollback(local_state)
    adopted(fresh).rollback(local_state)
    for each in (model, fresh):
        assert [module.training for module in each.modules()] == [True, True, False, True]


class Telling(nn.Linear):
    """
    A layer whose extra state is an object that the test chooses.
    """

    def __init__(self, state: object) -> None:
        super().__init__(4, 4)
        self.state = state

    def get_extra_state(self) -> object:
        """
        Return the object.
        """
        return self.state

    def set_extra_state(self, state: object) -> None:
        """
        Replace the object by `state`.
        """
        self.state = state


class TellingOnly(nn.Linear):
    """
    A layer that returns an extra state but has no method to restore it.
    """

    def get_extra_state(self) -> object:
        """
        Return a number.
        """
        return 1


def test_extra_states_are_rolled_back() -> None:
    """When a module's extra state changes in an abandoned step, then a rollback restores it, in
    this process and in a successor. The extra state is part of the digest of the parameters."""
    told = {
        "scale": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "steps": (3, "x"),
    }
    module = Telling(told)
    model, fresh = nn.Sequential(module), nn.Sequential(Telling(0))
    fresh.load_state_dict({**model.state_dict(), "0._extra_state": 0})
    state, other = adopted(model), adopted(fresh)
    local_state = state.capture(closing=True)
    assert state.digests()["parameters"] != other.digests()["parameters"]
    module.state = 5
    state.capture()
    state.rollback(local_state)
    other.rollback(local_state)
    for each in (model, fresh):
        found: Any = each[0].state
        assert torch.equal(found["scale"], told["scale"]), each  # type: ignore[arg-type]  # it is a tensor
        assert (found["empty"].shape, found["steps"]) == ((0,), (3, "x"))
    assert state.digests()["parameters"] == other.digests()["parameters"]


@pytest.mark.parametrize(
    ("present", "weights", "found"),
    [("cuda:1", "cpu", "cuda:1"), ("cpu", "cuda:2", "cuda:2"), ("cpu", "cpu", "cuda:0")],
)
def test_a_tensor_of_an_extra_state_comes_to_the_device_of_this_rank(
    present: str, weights: str, found: str
) -> None:
    """When the sender of an extra state had another number of its device, then a tensor comes to the
    device of the present tensor, or to that of the model. A tensor on the CPU stays there."""
    told: dict[str, Any] = {"scale": torch.ones(3), "host": torch.ones(2)}
    module: Any = Telling(told)
    extra = ExtraStates()
    with FakeTensorMode(allow_non_fake_inputs=True):  # has devices that this machine has not
        parameter = nn.Parameter(torch.empty(4, device=weights))
        scale = torch.empty(3, device=present)
    module.register_parameter("other", parameter)
    extra.watch(nn.Sequential(module))
    noted, _ = extra.noted()
    assert noted is not None
    (name,) = (name for name in noted["0"]["tensors"] if "scale" in name)
    noted["0"]["tensors"][name][2] = "cuda:0"  # the device of the sender
    module.state = {"scale": scale, "host": torch.ones(2)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        extra.put_back(noted)
    assert str(module.state["scale"].device) == found
    assert str(module.state["host"].device) == "cpu"


def test_saved_extra_state_is_that_of_the_last_complete_step(tmp_path: Path) -> None:
    """When a step is abandoned, then the files for plain torch contain the extra state of the end
    of the step before."""
    module = Telling(7)
    model = nn.Sequential(module)
    state = adopted(model)
    state.capture(closing=True)
    module.state = 8
    state.clear()
    state.save(tmp_path, "dense")
    asked = {"model": {**model.state_dict(), "0._extra_state": 0}}
    dcp.load(asked, checkpoint_id=tmp_path / "dense", no_dist=True)  # type: ignore[attr-defined]  # torch documents this name
    assert asked["model"]["0._extra_state"] == 7


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            Telling({1, 2}),
            r"\(Telling\) has a get_extra_state\(\) that cannot be kept: .* a builtins.set",
        ),
        (Telling(torch.zeros(1 << 16)), r"more than 131072 bytes, .* keep this state in buffers"),
        (TellingOnly(4, 4), r"\(TellingOnly\) has get_extra_state\(\) but no set_extra_state\(\)"),
    ],
)
def test_adopt_refuses_an_extra_state_that_cannot_be_kept(model: nn.Module, why: str) -> None:
    """When a module's extra state cannot be transferred, is too large, or could not be restored,
    then `adopt` refuses it with the reason."""
    with pytest.raises(UsageError, match=why):
        adopted(nn.Sequential(model))


def test_modes_are_not_restored_when_the_number_of_modules_differs() -> None:
    """When a rank-local state comes from a script with another number of modules, as after a
    resume, then the modes stay unchanged. A value that is not a list of modes is refused."""
    model = nn.Linear(4, 4)
    local_state = adopted(nn.Sequential(nn.Linear(4, 4))).capture()
    state = adopted(model.eval())
    state.rollback(local_state)
    assert not model.training
    with pytest.raises(MalformedMessage, match="modes of modules"):
        state.rollback(pack({**unpack(local_state), "modes": 3}))


def test_capture_takes_a_few_microseconds() -> None:
    """When torch's generator and a small position are captured, then the best average time of a
    capture, of 20 measurements, is less than 6 microseconds."""
    state = adopted(data=Batches(0))

    best = min(timeit.repeat(state.capture, number=200, repeat=20)) / 200

    assert best < 6e-6


@pytest.mark.parametrize("local_state", [b"\xc1", pack([]), pack({"data": 1})])
def test_rollback_refuses_bytes_that_capture_did_not_make(local_state: bytes) -> None:
    """When the bytes are not a result of `capture`, then the rollback refuses them as malformed."""
    with pytest.raises(MalformedMessage):
        adopted().rollback(local_state)


class Counting(nn.Module):
    """
    A model with a norm layer, whose forward pass changes one buffer in place and replaces another.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.total: Tensor
        self.last: Tensor
        self.register_buffer("total", torch.zeros(size))
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("still", torch.arange(5))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        """
        Map (batch, 4) to a tensor of the same shape, and change the two buffers.
        """
        self.total += x.sum()
        self.last = x[0].detach().clone()
        return self.norm(self.layer(x))  # type: ignore[no-any-return]  # torch has no types here


class Trainee:
    """
    A rank that trains `Counting`, with the calls that a session makes.
    """

    def __init__(self, size: int) -> None:
        self.model = Counting(size)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = adopt({"model": self.model, "optimizer": self.optimizer}, None)
        self.state.rebuild()

    def forward(self) -> None:
        """
        Run half a step: forward pass, backward pass, and the opening of the update window.
        """
        self.model(torch.randn(3, 4)).sum().backward()
        self.state.capture()

    def train(self, steps: int) -> bytes:
        """
        Run `steps` complete steps and return the rank-local state at the end of the last.
        """
        local_state = b""
        for _ in range(steps):
            self.forward()
            self.optimizer.step()
            local_state = self.state.capture(closing=True)
        return local_state

    def buffers(self) -> list[Tensor]:
        """
        Return copies of all buffers of the model.
        """
        return [buffer.clone() for buffer in self.model.buffers()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """
    Return whether the tensors of both lists are equal in pairs.
    """
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


SIZES = pytest.mark.parametrize("size", [10, INLINE])
"""The size of the buffers that the forward pass changes: small enough for the rank-local state, and
too large for it."""


@SIZES
@pytest.mark.parametrize("steps", [0, 3])
def test_buffers_changed_by_the_forward_pass_are_rolled_back(size: int, steps: int) -> None:
    """When a step is abandoned after its forward pass, then a rollback restores the changed buffers
    to the end of the step before. This holds in the first step, in later steps, and repeatedly."""
    rank = Trainee(size)
    local_state = rank.state.capture()
    if steps:
        local_state = rank.train(steps)
    expected = rank.buffers()

    for _ in range(5):
        rank.forward()
        assert not same(rank.buffers(), expected)
        rank.state.rollback(local_state)
        assert same(rank.buffers(), expected)


@SIZES
def test_clear_restores_the_buffers_of_the_last_complete_step(size: int) -> None:
    """When the loop was left in the middle of a step, then `clear` restores the buffers of the end
    of the last complete step. The rank gives and saves these buffers."""
    rank = Trainee(size)
    rank.state.rollback(rank.state.capture())
    rank.train(2)
    expected = rank.buffers()
    rank.forward()

    rank.state.clear()

    assert same(rank.buffers(), expected)


@SIZES
def test_buffers_that_a_function_after_a_step_changes_are_put_back(size: int) -> None:
    """When a function that is called after a step runs the model in training mode, then its changes
    of buffers are undone, and the next step starts from the buffers of the end of the step. An
    incident in the next step restores the same buffers."""
    rank = Trainee(size)
    rank.state.rollback(rank.state.capture())
    local_state = rank.train(2)
    rank.state.end_step()
    expected, last = rank.buffers(), rank.model.last

    put_back = rank.state.set_aside()
    rank.model(torch.ones(3, 4))
    assert not same(rank.buffers(), expected)
    put_back()

    assert same(rank.buffers(), expected)
    assert rank.model.last is last
    rank.forward()
    rank.state.rollback(local_state)
    assert same(rank.buffers(), expected)


def test_extra_states_that_a_function_after_a_step_changes_are_put_back() -> None:
    """When a function that is called after a step changes the extra state of a module, then the
    change is undone."""
    module = Telling(7)
    state = adopted(nn.Sequential(module))
    put_back = state.set_aside()
    module.state = 8
    put_back()
    assert module.state == 7


class Late(nn.Module):
    """
    A model whose forward pass changes and replaces buffers only after the test has set `now`.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.now = False
        self.total: Tensor
        self.last: Tensor | None
        self.first: Tensor | None
        self.every: Tensor
        self.register_buffer("total", torch.zeros(size))
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("first", None)
        self.register_buffer("every", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """
        Map (batch, 4) to a tensor of the same shape. If `now` is set, change the buffers.
        """
        self.every += 1
        if self.now:
            self.total += x.sum()
            self.last = x.detach().clone()
            self.first = x[0].detach().clone()
        return self.layer(x)  # type: ignore[no-any-return]  # torch has no types here


@SIZES
@pytest.mark.parametrize("steps", [1, 3])
def test_buffers_first_changed_in_an_abandoned_step_are_rolled_back(size: int, steps: int) -> None:
    """When buffers are changed or replaced for the first time in an abandoned step, then `clear`
    and each rollback restore them, repeatedly. Changes in a later complete step are kept."""
    model = Late(size)
    state = adopted(model)

    def forward(*, now: bool) -> bytes:
        model.now = now
        model(torch.randn(3, 4)).sum().backward()
        return state.capture()

    def buffers() -> dict[str, Any]:
        return {
            name: None if b is None else b.tolist()
            for name, b in [(n, getattr(model, n)) for n in ("total", "last", "first", "every")]
        }

    state.rollback(state.capture())
    for _ in range(steps):
        forward(now=False)
        local_state = state.capture(closing=True)
    expected = buffers()
    for _ in range(3):
        forward(now=True)
        assert buffers()["total"] != expected["total"]
        state.clear()
        assert buffers() == expected
        state.rollback(local_state)
        assert buffers() == expected
    forward(now=True)
    local_state = state.capture(closing=True)
    expected = buffers()
    forward(now=True)
    state.rollback(local_state)
    assert buffers() == expected


class Averaging(nn.Module):
    """
    A model with a buffer that the script changes in the tail of a step, and a layer that changes
    its own buffers in each forward pass.
    """

    mean: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(size)
        self.layer.num_batches_tracked = None  # so that torch counts no change of the buffers
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x: Any) -> Any:  # Any: as in torch
        """
        Normalize `x`.
        """
        return self.layer(x)


@SIZES
@pytest.mark.parametrize("normalizes", [False, True])
def test_buffers_changed_in_the_tail_are_those_of_the_end_of_the_step(
    size: int, normalizes: bool
) -> None:
    """When the tail of a step changes a buffer of any size, by itself or in a forward pass, then an
    abandoned step is undone to the end of that tail, and not to the close of the window."""
    model = Averaging(size)
    state = adopted(model)

    def step() -> bytes:
        model(torch.randn(2, size)).sum().backward()
        state.capture()
        closed = state.capture(closing=True)
        if normalizes:
            model(torch.randn(2, size))
        else:
            model.mean += 1
        return state.end_step() or closed

    def buffers() -> list[Any]:
        return [buffer.tolist() for buffer in model.buffers()]

    state.rollback(state.capture())
    for _ in range(3):
        local_state, expected = step(), buffers()
        model(torch.randn(2, size))
        state.capture()
        state.clear()
        assert buffers() == expected
        state.rollback(local_state)
        assert buffers() == expected
    quiet = state.capture(closing=True)
    state.end_step()
    assert state.end_step() is None, "an unchanged tail has no state of its own"
    state.rollback(quiet)
    assert buffers() == expected


def test_clear_keeps_a_shard_that_was_taken_from_another_rank() -> None:
    """When a second fault comes after a rank took a shard and before the rollback, then `clear`
    leaves the taken shard unchanged."""
    rank, other = Trainee(10), Trainee(10)
    rank.train(1)
    other.train(2)
    payload = other.state.give("dense")
    for buffer, room in zip(payload.buffers, rank.state.take("dense", payload.meta), strict=True):
        room.view[:] = buffer.view
    rank.state.taken("dense", payload.meta)

    rank.state.clear()

    assert same(rank.buffers(), other.buffers())


def test_successor_gets_the_small_buffers_of_the_dead_process() -> None:
    """When a successor gets the rank-local state of a dead process, then it has the buffers of the
    dead process, and not those of the rank from which it took the shard."""
    dead, successor = Trainee(10), Trainee(10)
    local_state = dead.train(2)
    successor.train(1)

    successor.state.rollback(local_state)

    assert same(dead.buffers(), successor.buffers())


def test_successor_keeps_the_large_buffers_that_came_with_the_shard() -> None:
    """When the rank-local state of a dead process refers to buffer copies that were lost with it,
    then the successor keeps the buffers that came with the shard. Further rollbacks restore these
    buffers. The first rollback says that the buffers of the dead process were lost."""
    dead, successor = Trainee(INLINE), Trainee(INLINE)
    local_state = dead.train(2)
    came = successor.buffers()

    for number in range(3):
        lost = successor.state.rollback(local_state)
        assert ("the buffer total and 4 more" in (lost or "")) == (number == 0)
        assert same(successor.buffers(), came)
        successor.forward()


def test_unchanged_buffers_are_left_out_of_later_captures() -> None:
    """When the buffers do not change, then only the first capture contains them."""
    model = nn.Linear(4, 4)
    model.register_buffer("still", torch.arange(1000))
    state = adopted(model)

    assert "buffers" in unpack(state.capture())
    assert "buffers" not in unpack(state.capture())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_loader_without_a_generator_draws_the_same_after_a_rollback(
    workers: int, shuffle: bool
) -> None:
    """When a StatefulDataLoader has no generator, so that its iterators draw from torch's, then
    batches and other random numbers are the same after rollbacks. This also holds across the end of
    an epoch."""

    def drawn(*lost: int) -> list[object]:
        torch.manual_seed(0)
        data: Any = StatefulDataLoader(
            range(20), batch_size=4, shuffle=shuffle, num_workers=workers
        )
        state = adopted(data=data)
        local_state = state.capture()
        state.rollback(local_state)
        found: list[object] = []
        batches = iter(data)
        left = list(lost)
        while len(found) < 8:
            batch = next(batches, None)
            if batch is None:
                end_workers(batches)
                batches = iter(data)
                continue
            number = torch.rand(1).item()
            if left and len(found) == left[0]:  # the step is abandoned and rolled back
                left.pop(0)
                state.rollback(local_state)
                end_workers(batches)
                batches = iter(data)
                continue
            found.append((batch.tolist(), number))
            local_state = state.capture()
        end_workers(batches)
        return found

    assert drawn(0, 2, 6) == drawn()


def test_gradient_scaler_can_unscale_again_after_a_rollback() -> None:
    """When a step is abandoned after its gradients were unscaled, then the scaler can unscale them
    again in the repeated step. A disabled scaler is left unchanged."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    others = {"scaler": scaler, "off": off}
    state = adopt({"model": model, "optimizer": optimizer, "others": others}, None)
    local_state = state.capture()
    for _ in range(2):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        state.rollback(local_state)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def test_wrapper_that_changes_compared_parameters_is_refused() -> None:
    """When parameters were compared with those of other ranks, and `wrap` changes them, then the
    next hook is refused, once. None is before they were compared, because DDP may make them equal."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def change() -> nn.Module:
        with torch.no_grad():
            model.weight += 1
        return model

    state = adopt({"model": model, "optimizer": optimizer}, change)
    local_state = state.capture()
    hooks: list[Callable[[], object]] = [partial(state.rollback, local_state), state.clear]
    for hook in hooks:
        state.rebuild()
        hook()
        state.compare("dense")
        state.rebuild()
        with pytest.raises(StateChanged, match="must not change them"):
            hook()
        hook()
