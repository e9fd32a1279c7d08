"""
The copies of a rank's state in host memory: which copies there are, and what can be restored.
"""

import threading
from collections.abc import Callable, Iterable

import pytest
import tft_pytorch.backups
import torch
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.backups import Backups, ShardInUse
from tft_pytorch.device import Devices, copy_to_host
from tft_pytorch.state_store import StateStore
from torch import Tensor, nn

from tft.errors import OrderRefused

HERE = Devices()
EVERYTHING = 10**9
"""No copy is later than this step."""


class Held:
    """
    Lets the copying thread stand still at its first copy.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(tft_pytorch.backups, "copy_to_host", self.copy)

    def copy(self, copies: Iterable[tuple[Tensor, Tensor]], devices: Devices) -> None:
        """
        Copy, on the copying thread only when `go_on` is set.
        """
        if threading.current_thread() is not threading.main_thread():
            self.begun.set()
            assert self.go_on.wait(20.0)
        copy_to_host(copies, devices)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def shards(*tensors: Tensor, lasting: bool = True) -> Callable[[], dict[str, ShardInUse]]:
    """
    Return a function that returns one shard with these tensors.
    """
    named = {str(number): tensor for number, tensor in enumerate(tensors)}
    shard = ShardInUse(meta=b"meta", tensors=named, lasting=set(named) if lasting else ())
    return lambda: {"dense": shard}


def kept(
    backups: Backups, step: int, *tensors: Tensor, sound: int = EVERYTHING, copies: int = 2
) -> None:
    """
    Keep a copy of `step`, and wait until it is complete.
    """
    sound = min(sound, step)
    wait = backups.keep(step, shards(*tensors), HERE, sound=sound, copies=copies)
    if wait is not None:
        wait()


def content(backups: Backups, step: int) -> list[float]:
    """
    Return the numbers in the copy of `step`.
    """
    views = [memoryview(each.view).cast("f") for each in backups.give("dense", step).buffers]
    return [number for view in views for number in view]


# ---------------------------------------------------------------- one copy


def test_copy_keeps_the_content_of_its_step() -> None:
    """When the state changes after a copy is complete, then the copy still has the content of its
    step, in the order of the tensors."""
    backups, state = Backups(), torch.ones(3)
    kept(backups, 1, state, torch.zeros(1))
    state += 1
    assert (backups.steps(), content(backups, 1)) == ((1,), [1.0, 1.0, 1.0, 0.0])


def test_copy_that_is_not_complete_is_not_known(held: Held) -> None:
    """When a copy is under way, then its step is not among the steps of the copies, and nobody can
    get it. It is known when it is complete."""
    backups = Backups()
    wait = backups.keep(1, shards(torch.ones(2)), HERE, sound=1, copies=2)
    assert held.begun.wait(20.0)
    assert backups.steps() == ()
    with pytest.raises(OrderRefused, match="no backup in host memory of step 1"):
        backups.give("dense", 1)
    held.go_on.set()
    assert wait is not None
    wait()
    assert backups.steps() == (1,)


def test_what_does_not_last_is_copied_at_once(held: Held) -> None:
    """When a tensor may change before the next window opens, then `keep` has copied it when it
    returns."""
    backups, moving = Backups(), torch.ones(2)
    wait = backups.keep(1, shards(moving, lasting=False), HERE, sound=1, copies=2)
    moving += 1
    held.go_on.set()
    assert wait is not None
    wait()
    assert content(backups, 1) == [1.0, 1.0]


def test_copy_of_a_state_that_changed_meanwhile_is_not_kept(held: Held) -> None:
    """When the script changes a parameter in place while it is copied, outside of an update window,
    then there is no copy of this step."""
    backups, state = Backups(), torch.ones(2)
    backups.keep(1, shards(state), HERE, sound=1, copies=2)
    state += 1
    held.go_on.set()
    backups.wait()
    assert backups.steps() == ()


def test_copy_that_fails_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the copying thread fails, then there is no copy of this step, and the next copy is
    made."""

    def fail(copies: object, devices: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError

    backups = Backups()
    with monkeypatch.context() as patch:
        patch.setattr(tft_pytorch.backups, "copy_to_host", fail)
        kept(backups, 1, torch.ones(2))
    assert backups.steps() == ()
    kept(backups, 2, torch.ones(2))
    assert backups.steps() == (2,)


def test_state_that_cannot_be_read_is_not_kept() -> None:
    """When the state cannot be read, then `keep` does not fail, there is no such copy, and the
    older copy stays."""

    def unreadable() -> dict[str, ShardInUse]:
        raise RuntimeError("the device is gone")

    backups = Backups()
    kept(backups, 1, torch.ones(2))
    assert backups.keep(2, unreadable, HERE, sound=2, copies=2) is None
    assert backups.steps() == (1,)


def test_copy_is_made_without_a_thread_if_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the system has no room for another thread, then the training thread copies itself."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    backups = Backups()
    assert backups.keep(1, shards(torch.ones(2)), HERE, sound=1, copies=2) is None
    assert content(backups, 1) == [1.0, 1.0]


# ---------------------------------------------------------------- two copies


def test_two_copies_are_kept() -> None:
    """When copies of three steps are made, then the newest two are left, each with its content."""
    backups, state = Backups(), torch.zeros(1)
    for step in (2, 4, 6):
        state.fill_(step)
        kept(backups, step, state)
    assert backups.steps() == (4, 6)
    assert [content(backups, step) for step in (4, 6)] == [[4.0], [6.0]]


def test_memory_of_the_oldest_copy_is_used_again() -> None:
    """When a third copy is made, then it has the memory of the first one."""
    backups, state = Backups(), torch.zeros(1000)
    addresses = []
    for step in (2, 4, 6):
        kept(backups, step, state)
        [buffer] = backups.give("dense", step).buffers
        addresses.append(torch.frombuffer(buffer.view, dtype=torch.uint8).data_ptr())
    assert addresses[0] == addresses[2] != addresses[1]


def test_newest_complete_copy_stays_while_the_next_one_is_made(held: Held) -> None:
    """When a copy is under way, then the newest copy before it can still be taken."""
    held.go_on.set()
    backups, state = Backups(), torch.zeros(1)
    for step in (2, 4):
        state.fill_(step)
        kept(backups, step, state)
    held.begun.clear()
    held.go_on.clear()
    backups.keep(6, shards(state), HERE, sound=6, copies=2)
    assert held.begun.wait(20.0)
    assert (backups.steps(), content(backups, 4)) == ((4,), [4.0])
    held.go_on.set()


@pytest.mark.parametrize(
    ("copies", "sound", "left"),
    [
        (2, (2, 2, 2, 2), (2, 4)),
        (2, (2, 4, 4, 4), (4, 6)),
        (2, (0, 0, 0, 0), (2, 4)),
        (2, (2, 2, 2, 6), (4, 8)),
        (2, (2, 2, 6, 6), (6, 8)),
        (3, (0, 0, 0, 2), (2, 4, 6)),
        (3, (0, 0, 2, 4), (4, 6, 8)),
        (3, (2, 4, 6, 8), (4, 6, 8)),
    ],
)
def test_no_copy_is_overwritten_before_a_newer_one_is_known_to_be_sound(
    copies: int, sound: tuple[int, ...], left: tuple[int, ...]
) -> None:
    """When one copy more is to be made and only the oldest of all copies is known to be sound, then
    all of them stay and there is no further one. Otherwise the oldest one is overwritten."""
    backups = Backups()
    for step, known in zip((2, 4, 6, 8), sound, strict=True):
        kept(backups, step, torch.zeros(1), sound=known, copies=copies)
    assert backups.steps() == left


def test_later_copies_are_dropped_at_a_rollback() -> None:
    """When all ranks go back to a step, then copies of later steps are dropped. A copy of the same
    step number that is made anew has the new content."""
    backups, state = Backups(), torch.zeros(1)
    for step in (2, 4):
        kept(backups, step, state)
    backups.drop_after(3)
    assert backups.steps() == (2,)
    kept(backups, 4, torch.ones(1))
    assert (backups.steps(), content(backups, 4)) == ((2, 4), [1.0])


# ---------------------------------------------------------------- the user's objects


def store(width: int = 4) -> tuple[StateStore, nn.Sequential, torch.optim.Optimizer]:
    """
    Return a training state with a model that has moving buffers, and an optimizer with state.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = adopt({"model": model, "optimizer": optimizer, "scheduler": scheduler}, None)
    return state, model, optimizer


def step(state: StateStore, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """
    Train one step, with the calls of the worker.
    """
    width = next(model.parameters()).shape[1]
    model(torch.randn(3, width)).sum().backward()
    state.capture(closing=False)
    optimizer.step()
    state._maker.made.scheduler.step()  # type: ignore[union-attr]  # it was adopted
    optimizer.zero_grad()
    state.capture(closing=True)
    state.end_step(tail=True)


def keep(state: StateStore, number: int) -> None:
    """
    Keep a copy of the present state.
    """
    state.backups.keep(number, state.in_use, state.devices, sound=number, copies=2)
    state.backups.wait()


def everything(state: StateStore) -> dict[str, object]:
    """
    Return the digests of everything but the generators, and of the buffers.
    """
    [shard] = state.shards(0, 1)
    buffers = [(each.name, bytes(each.view)) for each in state.give(shard.shard).buffers]
    return {**state.digests(), "rng": "", "buffers": buffers}


def test_restored_state_is_that_of_its_step() -> None:
    """When a copy is restored after further steps, then parameters, optimizer, scheduler and buffers
    are those of its step, in the objects that the script has. The copy can be restored again."""
    state, model, optimizer = store()
    step(state, model, optimizer)
    expected, weight = everything(state), model[0].weight
    keep(state, 1)
    for _ in range(2):
        step(state, model, optimizer)
        assert everything(state) != expected
        state.clear()
        state.restore(1)
        assert everything(state) == expected
        assert model[0].weight is weight
    assert state.backups.steps() == (1,)


def test_optimizer_state_that_did_not_exist_is_gone_after_a_restore() -> None:
    """When the copy was made before the optimizer had any state, then it has none after the
    restore."""
    state, model, optimizer = store()
    keep(state, 0)
    step(state, model, optimizer)
    assert optimizer.state
    state.clear()
    state.restore(0)
    assert not optimizer.state


def test_optimizer_state_that_was_dropped_is_there_after_a_restore() -> None:
    """When the optimizer has lost its state since the copy, then it has it after the restore."""
    state, model, optimizer = store()
    step(state, model, optimizer)
    keep(state, 1)
    expected = everything(state)
    optimizer.state.clear()
    state.restore(1)
    assert everything(state) == expected


def test_copy_of_another_layout_is_refused_before_anything_changes() -> None:
    """When the shapes of the model have changed since the copy, then the restore is refused, and
    the state stays as it is."""
    state, model, optimizer = store()
    step(state, model, optimizer)
    keep(state, 1)
    model[0].weight.data = torch.ones(4, 9)
    optimizer.state.clear()
    present = everything(state)
    with pytest.raises(OrderRefused, match="another model"):
        state.restore(1)
    assert everything(state) == present


def test_state_is_not_overwritten_while_it_is_copied(held: Held) -> None:
    """When a shard is about to be received while a copy is under way, then the copy is completed
    first, with the old content."""
    state, model, optimizer = store()
    step(state, model, optimizer)
    meta = state.give("dense").meta
    expected = [bytes(each.view) for each in state.give("dense").buffers]
    state.backups.keep(1, state.in_use, state.devices, sound=1, copies=2)
    assert held.begun.wait(20.0)

    def overwrite() -> None:
        for each in state.take("dense", meta):
            each.view[:] = bytes(len(each.view))

    over = threading.Thread(target=overwrite)
    over.start()
    assert state.backups.steps() == ()
    held.go_on.set()
    over.join(20.0)
    assert [bytes(each.view) for each in state.backups.give("dense", 1).buffers] == expected
