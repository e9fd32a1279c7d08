"""
The rank-local state: cheap to capture, and the same draws after it was put back.
"""

import copy
import random
import timeit
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.forward_buffers import INLINE
from tft_pytorch.state_store import StateStore
from torch import Tensor, nn
from torchdata.stateful_dataloader import (  # type: ignore[import-untyped]  # it has no types
    StatefulDataLoader,
)

from tests.adaptors.ranks import Batches
from tft.errors import MalformedMessage, OrderRefused, UsageError
from tft.protocol.codec import pack, unpack


def adopted(model: nn.Module | None = None, **parts: Any) -> StateStore:
    """
    A state with a plain optimizer.
    """
    model = model or nn.Linear(4, 4)
    return adopt(
        {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **parts}, None
    )


def test_the_same_is_drawn_again_after_a_rollback() -> None:
    """
    When a captured state is put back, then the generators draw what they drew, and the data
    continues where it was.
    """
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
    private = state.capture()
    drawn = draw()
    state.rollback(private)

    assert draw() == drawn


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torchdata_reads_the_lost_batches_again(workers: int) -> None:
    """
    When the data is a StatefulDataLoader, which has tensors in its position, then after a rollback, here
    or in another process, a new iterator gives exactly the batches that were lost.
    """

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
    private = state.capture()
    lost = [next(batches).tolist() for _ in range(3)]
    state.rollback(private)
    end_workers(batches)
    batches = iter(data)
    assert [next(batches).tolist() for _ in range(3)] == lost

    other = loader(2)
    adopted(data=other).rollback(private)
    again = iter(other)
    assert [next(again).tolist() for _ in range(3)] == lost
    end_workers(batches, again)


def end_workers(*iterators: Any) -> None:  # Any: torchdata has no types
    """
    End the worker processes of these iterators. The garbage collector would wait for them for ten
    seconds, in another test.
    """
    for iterator in iterators:
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


class Remaining:
    """
    Data whose position is what is left of it, in a tensor.
    """

    left = torch.arange(2)

    def state_dict(self) -> dict[str, Tensor]:
        """
        Empty at the end.
        """
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """
        To that position.
        """
        self.left = state["left"]


class LivePosition:
    """
    Data that tells its position by an object that it goes on using.
    """

    def __init__(self, position: dict[str, object]) -> None:
        self.position = position

    def state_dict(self) -> dict[str, object]:
        """
        Its own object, no copy.
        """
        return self.position

    def load_state_dict(self, state: dict[str, object]) -> None:
        """
        Never asked here.
        """


@pytest.mark.parametrize(
    ("before", "after"),
    [({"n": 1}, {"n": 2}), ({"n": 1}, {"n": True}), ({"n": [1]}, {"n": [2]}), ({"n": 0.0}, {"n": -0.0})],
    ids=["number", "bool", "nested", "sign"],
)  # fmt: skip
@pytest.mark.parametrize("own", [False, True], ids=["another object", "the same object"])
def test_a_capture_has_the_position_as_it_is_now(
    before: dict[str, object], after: dict[str, object], own: bool
) -> None:
    """
    When only the position has changed since the last capture, in place or not, then the next capture has the new one.
    """
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


def test_a_capture_has_the_generator_and_the_modes_as_they_are_now() -> None:
    """
    When nothing but torch's generator moves, or a module's mode as a window closes, then the next capture is another.
    """
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


def test_a_position_with_an_empty_tensor_comes_back() -> None:
    """
    When a tensor in the position has no elements, then it is captured and put back as any other.
    """
    data = Remaining()
    state = adopted(data=data)
    data.left = data.left[2:]
    private = state.capture()
    data.left = torch.ones(3, dtype=torch.int64)
    state.rollback(private)
    assert (data.left.shape, data.left.dtype) == ((0,), torch.int64)


class Skipping(Batches):
    """
    Data that can leave batches out.
    """

    def skip(self, batches: int) -> None:
        """
        Draw and drop.
        """
        for _ in range(batches):
            self.next()


def test_batches_are_left_out_by_the_users_own_data() -> None:
    """
    When batches are to be left out, then the data's own `skip` does it, and a rollback takes it
    back; data that has none is a sentence, and nothing is changed.
    """
    data = Skipping(0)
    state = adopted(data=data)
    private = state.capture()
    drawn = [data.next().tolist() for _ in range(3)]
    state.rollback(private)
    state.skip(2)
    assert data.next().tolist() == drawn[2]
    state.rollback(private)
    assert data.next().tolist() == drawn[0]

    with pytest.raises(OrderRefused, match=r"data is a Batches, which has no skip\(batches\)"):
        adopted(data=Batches(0)).skip(1)


def test_generators_that_were_not_named_are_left_alone() -> None:
    """
    When only torch's generator is kept, which is the default, then Python's goes its own way.
    """
    state = adopted()
    private = state.capture()
    drawn = random.random()
    state.rollback(private)

    assert random.random() != drawn


def test_a_rollback_drops_the_gradients() -> None:
    """
    When a state is put back, then no gradient of the step that was given up is left.
    """
    model = nn.Linear(4, 4)
    state = adopted(model)
    model(torch.ones(1, 4)).sum().backward()

    state.rollback(state.capture())

    assert [parameter.grad for parameter in model.parameters()] == [None, None]


def test_modules_are_in_the_modes_of_the_last_complete_step_again() -> None:
    """
    When modules evaluate in a step that is given up, then they train again; one that evaluated when the last
    step was complete still does, in the process that takes the place of a dead one, too.
    """
    model, fresh = (nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4)) for _ in range(2))
    model.append(nn.Linear(4, 4))
    fresh.append(nn.Linear(4, 4))
    state = adopted(model)
    model[1].eval()
    state.capture(closing=True)
    model.eval()
    private = state.capture()
    state.rollback(private)
    adopted(fresh).rollback(private)
    for each in (model, fresh):
        assert [module.training for module in each.modules()] == [True, True, False, True]


class Telling(nn.Linear):
    """
    It tells what it was given as its extra state.
    """

    def __init__(self, state: object) -> None:
        super().__init__(4, 4)
        self.state = state

    def get_extra_state(self) -> object:
        """
        What it was given.
        """
        return self.state

    def set_extra_state(self, state: object) -> None:
        """
        To this.
        """
        self.state = state


class TellingOnly(nn.Linear):
    """
    It cannot be told.
    """

    def get_extra_state(self) -> object:
        """
        Something.
        """
        return 1


def test_extra_states_are_rolled_back() -> None:
    """
    When a module's extra state changes in a step that is given up, then it is again what it was, here and in the
    process that takes the place of a dead one; and it counts in the digest of the parameters.
    """
    told = {
        "scale": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "steps": (3, "x"),
    }
    module = Telling(told)
    model, fresh = nn.Sequential(module), nn.Sequential(Telling(0))
    fresh.load_state_dict({**model.state_dict(), "0._extra_state": 0})
    state, other = adopted(model), adopted(fresh)
    private = state.capture(closing=True)
    assert state.digests()["parameters"] != other.digests()["parameters"]
    module.state = 5
    state.capture()
    state.rollback(private)
    other.rollback(private)
    for each in (model, fresh):
        found: Any = each[0].state
        assert torch.equal(found["scale"], told["scale"]), each  # type: ignore[arg-type]  # it is a tensor
        assert (found["empty"].shape, found["steps"]) == ((0,), (3, "x"))
    assert state.digests()["parameters"] == other.digests()["parameters"]


def test_a_rank_gives_away_the_extra_states_of_its_last_step(tmp_path: Path) -> None:
    """
    When a step is given up, then what is written for plain torch is the extra state at the end of the one
    before.
    """
    module = Telling(7)
    model = nn.Sequential(module)
    state = adopted(model)
    state.capture(closing=True)
    module.state = 8
    state.clear()
    state.save(tmp_path, "dense")
    asked = {"model": {**model.state_dict(), "0._extra_state": 0}}
    dcp.load(asked, checkpoint_id=tmp_path / "dense", no_dist=True)  # type: ignore[attr-defined]  # as documented
    assert asked["model"]["0._extra_state"] == 7


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            Telling({1, 2}),
            r"\(Telling\) has a get_extra_state\(\) that cannot be kept: .* a builtins.set",
        ),
        (Telling(torch.zeros(1 << 16)), r"more than 131072 bytes .* keep this state in buffers"),
        (TellingOnly(4, 4), r"\(TellingOnly\) has get_extra_state\(\) and no set_extra_state\(\)"),
    ],
)
def test_an_extra_state_that_cannot_be_kept_is_refused(model: nn.Module, why: str) -> None:
    """
    When a module tells what cannot be moved, is too much, or could not be put back, then `adopt` says so.
    """
    with pytest.raises(UsageError, match=why):
        adopted(nn.Sequential(model))


def test_modes_of_another_number_of_modules_are_left() -> None:
    """
    When a state comes from a script with other modules, as a resumed one may have, then modes stay as they are;
    what is no list of modes is refused.
    """
    model = nn.Linear(4, 4)
    private = adopted(nn.Sequential(nn.Linear(4, 4))).capture()
    state = adopted(model.eval())
    state.rollback(private)
    assert not model.training
    with pytest.raises(MalformedMessage, match="modes of modules"):
        state.rollback(pack({**unpack(private), "modes": 3}))


def test_a_capture_costs_a_few_microseconds() -> None:
    """
    When torch's generator and a small position are captured, then in the best of many rounds it
    takes far less than a window may cost.
    """
    state = adopted(data=Batches(0))

    best = min(timeit.repeat(state.capture, number=200, repeat=20)) / 200

    assert best < 6e-6


@pytest.mark.parametrize("private", [b"\xc1", pack([]), pack({"data": 1})])
def test_a_strangers_private_state_is_refused(private: bytes) -> None:
    """
    When the bytes are not what `capture` returns, then that is said.
    """
    with pytest.raises(MalformedMessage):
        adopted().rollback(private)


class Counting(nn.Module):
    """
    Its forward changes one buffer in place, puts another in place of the old, and has a norm.
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
        (batch, 4) to the same.
        """
        self.total += x.sum()
        self.last = x[0].detach().clone()
        return self.norm(self.layer(x))  # type: ignore[no-any-return]  # torch has no types here


class Trainee:
    """
    A rank that trains `Counting`, with the calls a session makes.
    """

    def __init__(self, size: int) -> None:
        self.model = Counting(size)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = adopt({"model": self.model, "optimizer": self.optimizer}, None)
        self.state.rebuild()

    def forward(self) -> None:
        """
        Half a step, up to the opening of its window.
        """
        self.model(torch.randn(3, 4)).sum().backward()
        self.state.capture()

    def train(self, steps: int) -> bytes:
        """
        Whole steps; the rank-local state at the end of the last.
        """
        private = b""
        for _ in range(steps):
            self.forward()
            self.optimizer.step()
            private = self.state.capture(closing=True)
        return private

    def buffers(self) -> list[Tensor]:
        """
        Copies of them.
        """
        return [buffer.clone() for buffer in self.model.buffers()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """
    Whether all are equal.
    """
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


SIZES = pytest.mark.parametrize("size", [10, INLINE])
"""Of what the forward changes: small enough to go with the rank-local state, and too large for it."""


@SIZES
@pytest.mark.parametrize("steps", [0, 3])
def test_what_the_forward_pass_changes_is_rolled_back(size: int, steps: int) -> None:
    """
    When a step is given up after its forward, then buffers that the forward changed are as they
    were at the end of the step before, in the first step and in any other, time after time.
    """
    rank = Trainee(size)
    private = rank.state.capture()
    if steps:
        private = rank.train(steps)
    expected = rank.buffers()

    for _ in range(5):
        rank.forward()
        assert not same(rank.buffers(), expected)
        rank.state.rollback(private)
        assert same(rank.buffers(), expected)


@SIZES
def test_a_rank_gives_its_buffers_as_they_were_after_its_last_step(size: int) -> None:
    """
    When the loop was left in the middle of a step, then clearing brings back what the shard held
    at the end of the last one: so it is given and saved.
    """
    rank = Trainee(size)
    rank.state.rollback(rank.state.capture())
    rank.train(2)
    expected = rank.buffers()
    rank.forward()

    rank.state.clear()

    assert same(rank.buffers(), expected)


class Late(nn.Module):
    """
    Its forward changes buffers, in place and by others in their place, when it is told to.
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
        (batch, 4) to the same.
        """
        self.every += 1
        if self.now:
            self.total += x.sum()
            self.last = x.detach().clone()
            self.first = x[0].detach().clone()
        return self.layer(x)  # type: ignore[no-any-return]  # torch has no types here


@SIZES
@pytest.mark.parametrize("steps", [1, 3])
def test_what_changes_for_the_first_time_in_a_step_that_is_given_up_is_rolled_back(
    size: int, steps: int
) -> None:
    """
    When buffers that no step has changed yet are changed, or others put in their place, in a step that is given up,
    then they are what they were, with what is given away, and time after time; what a later step makes of them
    stays.
    """
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
        private = state.capture(closing=True)
    expected = buffers()
    for _ in range(3):
        forward(now=True)
        assert buffers()["total"] != expected["total"]
        state.clear()
        assert buffers() == expected
        state.rollback(private)
        assert buffers() == expected
    forward(now=True)
    private = state.capture(closing=True)
    expected = buffers()
    forward(now=True)
    state.rollback(private)
    assert buffers() == expected


def test_what_was_taken_from_another_rank_is_not_wound_back() -> None:
    """
    When a second fault comes after a shard was taken and before the rollback, then clearing
    leaves what was taken.
    """
    rank, other = Trainee(10), Trainee(10)
    rank.train(1)
    other.train(2)
    payload = other.state.give("dense")
    for buffer, room in zip(payload.buffers, rank.state.take("dense", payload.meta), strict=True):
        room.view[:] = buffer.view
    rank.state.taken("dense", payload.meta)

    rank.state.clear()

    assert same(rank.buffers(), other.buffers())


def test_small_buffers_outlive_the_process() -> None:
    """
    When another process is given the rank-local state, then it has the buffers of the dead one, and
    not those of the rank whose shard it took.
    """
    dead, successor = Trainee(10), Trainee(10)
    private = dead.train(2)
    successor.train(1)

    successor.state.rollback(private)

    assert same(dead.buffers(), successor.buffers())


def test_large_buffers_of_a_dead_process_stay_as_they_came() -> None:
    """
    When the rank-local state of a dead process refers to copies that died with it, then the buffers
    stay as they came with the shard, and further rollbacks come back to that.
    """
    dead, successor = Trainee(INLINE), Trainee(INLINE)
    private = dead.train(2)
    came = successor.buffers()

    for _ in range(3):
        successor.state.rollback(private)
        assert same(successor.buffers(), came)
        successor.forward()


def test_a_model_whose_forward_changes_nothing_is_not_copied() -> None:
    """
    When buffers stay as they are, then after the first capture they are left out.
    """
    model = nn.Linear(4, 4)
    model.register_buffer("still", torch.arange(1000))
    state = adopted(model)

    assert "buffers" in unpack(state.capture())
    assert "buffers" not in unpack(state.capture())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_without_a_generator_draws_nothing_more_after_a_rollback(
    workers: int, shuffle: bool
) -> None:
    """
    When a StatefulDataLoader has no generator of its own, so that each iterator over it draws from torch's, then
    the batches and whatever else is drawn are the same after rollbacks, over the end of an epoch, too.
    """

    def drawn(*lost: int) -> list[object]:
        torch.manual_seed(0)
        data: Any = StatefulDataLoader(
            range(20), batch_size=4, shuffle=shuffle, num_workers=workers
        )
        state = adopted(data=data)
        private = state.capture()
        state.rollback(private)
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
            if left and len(found) == left[0]:  # this step is given up
                left.pop(0)
                state.rollback(private)
                end_workers(batches)
                batches = iter(data)
                continue
            found.append((batch.tolist(), number))
            private = state.capture()
        end_workers(batches)
        return found

    assert drawn(0, 2, 6) == drawn()


def test_a_scaler_begins_the_step_again() -> None:
    """
    When a step is given up after its gradients were unscaled, then they can be in its repetition; a scaler that is
    switched off is left alone.
    """
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    others = {"scaler": scaler, "off": off}
    state = adopt({"model": model, "optimizer": optimizer, "others": others}, None)
    private = state.capture()
    for _ in range(2):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        state.rollback(private)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
