"""
An optimizer whose state is cut into shards, where several ranks hold each shard.
"""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
import torch
from tft_pytorch import ReplicaOptimizer, adaptor
from tft_pytorch.hooks import TorchHooks
from tft_pytorch.interruptible import CalledOff
from torch import Tensor, nn

from tests.adaptors.conftest import NewJob
from tests.adaptors.living import live_bytes
from tests.adaptors.ranks import Actor, Failure, Recipe, sound
from tft.errors import OrderRefused, UsageError
from tft.placement.memory_cost import Gradients, cost
from tft.spi import StateHooks
from tft.spi.adaptor import AdaptorSpecs
from tft.worker.saving import Own, Saving

WORLD = 4
LAST = 6
RECIPES = {
    "two copies": Recipe(copies=2),
    "a copy on every rank": Recipe(copies=4),
    "bfloat16": Recipe(copies=2, dtype=torch.bfloat16),
    "scaled and averaged": Recipe(copies=2, scaled=True),
    "steps of their own": Recipe(copies=2, own_steps=True),
    "gradients of 32 bits": Recipe(copies=2, dtype=torch.bfloat16, gradients=torch.float32),
}

Undisturbed = Callable[[str], tuple[list[object], list[object]]]


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """
    Make a model with parameters of several sizes.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(dtype)


def gradients(model: nn.Module, step: int) -> None:
    """
    Set gradients that depend only on the step, so they are equal on all ranks, as after DDP's
    all-reduce.
    """
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.grad_dtype or parameter.dtype)


class Fleet:
    """
    All ranks of a job in one process.

    The class copies between models what the ranks of a replica group would send each other.
    """

    def __init__(self, world: int, copies: int, dtype: torch.dtype, **given: Any) -> None:
        self.models = [net(dtype) for _ in range(world)]
        for rank in range(world):
            for parameter in self.weights(rank):
                parameter.grad_dtype = given.get("gradients", dtype)
        self.optimizers = [
            ReplicaOptimizer(
                model.parameters(),
                given.get("optimizer", torch.optim.AdamW),
                rank=rank,
                world=world,
                copies=copies,
                lr=0.01,
            )
            for rank, model in enumerate(self.models)
        ]

    def step(self, number: int) -> None:
        """
        Run one step on each rank, then copy the updated parameters to all ranks.
        """
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            gradients(model, number)
            optimizer.step()
        self.share_out()

    def share_out(self) -> None:
        """
        Copy each parameter from its owner in the first replica group to all ranks.
        """
        with torch.no_grad():
            for index, _ in enumerate(self.weights(0)):
                owner = next(
                    rank
                    for rank, optimizer in enumerate(self.optimizers)
                    if any(self.weights(rank)[index] is p for p in optimizer.owned)
                )
                for rank in range(len(self.models)):
                    self.weights(rank)[index].copy_(self.weights(owner)[index])

    def weights(self, rank: int) -> list[Tensor]:
        """
        Return the parameters of one rank's model.
        """
        return list(self.models[rank].parameters())


# ---------------------------------------------------------- optimizers of one process without a job


OPTIMIZERS = (
    torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.Adadelta,
    torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
)  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.__name__)
@pytest.mark.parametrize(("world", "copies"), [(4, 2), (6, 2), (6, 3), (2, 2)])
def test_sharded_updates_equal_those_of_one_optimizer(
    optimizer: Callable[..., torch.optim.Optimizer], world: int, copies: int
) -> None:
    """When several ranks each update their share of the parameters, then the parameters equal those
    of one optimizer over all parameters, bit for bit."""
    fleet = Fleet(world, copies, torch.float32, optimizer=optimizer)
    model = net()
    whole = optimizer(model.parameters(), lr=0.01)
    for step in range(5):
        fleet.step(step)
        gradients(model, step)
        whole.step()
    for rank in range(world):
        for ours, theirs in zip(fleet.weights(rank), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("single", [False, True])
def test_16_bit_parameters_are_rounded_from_32_bit_masters(
    dtype: torch.dtype, single: bool
) -> None:
    """When parameters have 16 bits, then they are the rounded values of an optimizer with 32-bit
    parameters. Their gradients, which may have 32 bits, are used unchanged."""
    fleet = Fleet(4, 2, dtype, gradients=torch.float32 if single else dtype)
    model = net(dtype).float()
    whole = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(20):
        fleet.step(step)
        gradients(fleet.models[0], step)
        for master, parameter in zip(model.parameters(), fleet.weights(0), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        whole.step()
    for ours, theirs in zip(fleet.weights(3), model.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(dtype))


def test_each_parameter_is_owned_by_as_many_ranks_as_copies() -> None:
    """When shares are assigned, then `copies` ranks, a stride apart, own each parameter, and the
    optimizer names them as holders. The loads of two ranks differ by at most the largest parameter.
    """
    fleet = Fleet(6, 2, torch.float32)
    for index, largest in enumerate(fleet.weights(0)):
        owners = [
            rank
            for rank, optimizer in enumerate(fleet.optimizers)
            if any(fleet.weights(rank)[index] is p for p in optimizer.owned)
        ]
        assert tuple(owners) == fleet.optimizers[owners[0]].holders()
        assert owners[1] - owners[0] == 3, largest.shape
    sizes = [sum(p.numel() for p in optimizer.owned) for optimizer in fleet.optimizers]
    assert max(sizes) - min(sizes) <= max(p.numel() for p in fleet.weights(0))


def test_scheduler_changes_the_learning_rate_of_every_share() -> None:
    """When a scheduler lowers the learning rate, then every share is updated with the new rate."""
    fleet = Fleet(4, 2, torch.float32)
    model = net()
    whole = torch.optim.AdamW(model.parameters(), lr=0.01)
    rates = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for optimizer in (*fleet.optimizers, whole)
    ]
    for step in range(4):
        fleet.step(step)
        gradients(model, step)
        whole.step()
        for rate in rates:
            rate.step()
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(fleet.weights(1), model.parameters(), strict=True)
    )


def test_parameter_without_a_gradient_is_unchanged() -> None:
    """When a parameter has no gradient in a step, then the parameter and its optimizer state are
    unchanged."""
    fleet = Fleet(2, 2, torch.bfloat16)
    fleet.step(0)
    model, optimizer = fleet.models[0], fleet.optimizers[0]
    before = [p.clone() for p in model.parameters()]
    state = deepcopy([optimizer.state[optimizer.kept_for(p)] for p in optimizer.owned])
    for parameter in model.parameters():
        parameter.grad = None
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for parameter, kept in zip(optimizer.owned, state, strict=True):
        now = optimizer.state[optimizer.kept_for(parameter)]
        assert all(torch.equal(now[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize(
    ("world", "copies", "why"),
    [
        (6, 4, "6 ranks cannot be cut into 4 replica groups of equal size"),
        (4, 1, "only one rank holds each share of the optimizer state"),
        (2, 3, "2 ranks cannot be cut into 3 replica groups of equal size"),
    ],
)
def test_invalid_number_of_copies_is_refused(world: int, copies: int, why: str) -> None:
    """When the ranks cannot hold the wanted number of copies, or only one copy is wanted, then it
    is refused, and the parameters of the model stay at their places in memory."""
    model = net()
    places = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(UsageError, match=why):
        ReplicaOptimizer(model.parameters(), torch.optim.AdamW, rank=0, world=world, copies=copies)
    assert [p.data_ptr() for p in model.parameters()] == places


def test_adding_parameters_after_sharding_is_refused() -> None:
    """When parameters are added after the shares were assigned, then this is refused."""
    optimizer = ReplicaOptimizer(net().parameters(), torch.optim.SGD, rank=0, world=2, lr=0.1)
    with pytest.raises(UsageError, match="cannot take more parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


# ---------------------------------------------------------------- in a job of several ranks


@pytest.fixture(scope="module")
def known() -> dict[str, tuple[list[object], list[object]]]:
    """
    Return the cache of the records of undisturbed jobs, by recipe.
    """
    return {}


@pytest.fixture
def undisturbed(job: NewJob, known: dict[str, tuple[list[object], list[object]]]) -> Undisturbed:
    """
    Return a function that gives the record of a recipe's undisturbed job.

    The record holds the losses and gradient digests of every step, and the final digests.
    """

    def undisturbed(recipe: str) -> tuple[list[object], list[object]]:
        if recipe not in known:
            whole = job(WORLD, RECIPES[recipe])
            known[recipe] = whole.all("train", LAST), whole.all("digests")
        return known[recipe]

    return undisturbed


@pytest.mark.soak
def test_job_with_shares_trains_as_a_job_without_shares(job: NewJob) -> None:
    """When the optimizer's state is cut into shares, then losses and reduced gradients equal those
    of an ordinary optimizer, bit for bit."""
    ordinary = job(WORLD, Recipe())
    assert job(WORLD, Recipe(copies=2)).all("train", LAST) == ordinary.all("train", LAST)


@pytest.mark.parametrize("recipe", ["two copies", "bfloat16", "scaled and averaged"])
def test_copies_of_a_share_are_equal_after_every_step(job: NewJob, recipe: str) -> None:
    """When a step is complete, then a shard has the same bits on all of its holders."""
    running = job(WORLD, RECIPES[recipe])
    for step in range(1, LAST + 1):
        running.all("train", step)
        seen: dict[str, str] = {}
        for told in running.all("share", WORLD):
            assert isinstance(told, dict)
            for shard, digest in told.items():
                assert seen.setdefault(shard, digest) == digest, (step, shard)
        assert sorted(seen) == ["dense", "optimizer.0", "optimizer.1"]


def alive(actor: Actor) -> float:
    """
    Return the bytes of all live tensors after an update window, divided by the number of trained
    parameters.
    """
    actor.train(2)
    actor.half_step()
    actor.optimizer.step()
    adaptor.tft_updated()
    trained: int = sum(p.numel() for group in actor.optimizer.param_groups for p in group["params"])
    return live_bytes() / trained


@pytest.mark.parametrize("gradients", Gradients)
@pytest.mark.parametrize(
    ("world", "copies"),
    [(4, 2), *(pytest.param(*w, marks=pytest.mark.soak) for w in ((4, 4), (8, 2)))],
)
def test_memory_of_a_rank_agrees_with_tft_replicas(
    job: NewJob, gradients: Gradients, world: int, copies: int
) -> None:
    """When 16-bit parameters are trained, then each rank uses as many bytes for each parameter as
    the formulas of `tft replicas` say, within 2 %. With two copies on eight ranks, a rank needs as
    much as with one copy on four ranks."""
    recipe = Recipe(
        copies=copies,
        dtype=torch.bfloat16,
        gradients=torch.float32 if gradients is Gradients.SINGLE else None,
        wrapper={"gradient_as_bucket_view": True},
    )
    expected = cost(gradients, world, copies).total
    assert expected == cost(gradients, world // copies, 1).total
    for told in job(world, recipe).all("call", alive):
        assert isinstance(told, float)
        assert told == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("recipe", "completed", "victims"),
    [("two copies", 2, (1, 2)), ("bfloat16", 2, (0, 3))]
    + [
        pytest.param(recipe, completed, victims, marks=pytest.mark.soak)
        for recipe, completed, victims in (
            *(("two copies", completed, (completed % WORLD,)) for completed in range(4)),
            ("gradients of 32 bits", 3, (1,)),
            ("scaled and averaged", 3, (2,)),
            ("two copies", 3, (0, 1)),
            ("a copy on every rank", 2, (3,)),
            ("bfloat16", 0, (1,)),
            ("bfloat16", 3, (2,)),
            ("steps of their own", 4, (1, 2)),
        )
    ],
)
def test_loss_of_ranks_changes_no_bit_of_the_training(
    job: NewJob,
    undisturbed: Undisturbed,
    recipe: str,
    completed: int,
    victims: tuple[int, ...],
) -> None:
    """When ranks are killed and each shard keeps a holder, then every later loss, every all-reduced
    gradient and the final digest equal those of the undisturbed run."""
    disturbed = job(WORLD, RECIPES[recipe])
    before = disturbed.all("train", completed)
    disturbed.lose(victims, completed)
    after = disturbed.all("train", LAST)
    steps, final = undisturbed(recipe)
    assert steps == [b + a for b, a in zip(before, after, strict=True)]  # type: ignore[operator]  # both are lists
    assert disturbed.all("digests") == final


def spoil(actor: Actor) -> None:
    """
    Set all parameters to zero that this rank does not own.

    If the optimizer has master copies, set the rank's own parameters to zero as well.
    """
    optimizer: ReplicaOptimizer = actor.optimizer
    with torch.no_grad():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if (
                not any(parameter is own for own in optimizer.owned)
                or optimizer.master(parameter) is not None
            ):
                parameter.zero_()


@pytest.mark.parametrize("recipe", ["two copies", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_parameters_are_restored_from_the_holders_of_their_shares(
    job: NewJob, undisturbed: Undisturbed, recipe: str
) -> None:
    """When only the holders of each share still have its parameters, or only the 32-bit master
    copies of 16-bit parameters, then a repair restores all parameters on all ranks, bit for bit."""
    disturbed = job(WORLD, RECIPES[recipe])
    before = disturbed.all("train", 3)
    digests = disturbed.all("digests")
    disturbed.all("interrupt")
    disturbed.all("call", spoil)
    disturbed.all("clear")
    disturbed.form()
    disturbed.all("build")
    disturbed.all("roll_back", 3, None)
    assert disturbed.all("digests") == digests
    after = disturbed.all("train", LAST)
    steps, final = undisturbed(recipe)
    assert steps == [b + a for b, a in zip(before, after, strict=True)]  # type: ignore[operator]  # both are lists
    assert disturbed.all("digests") == final


@pytest.mark.parametrize("recipe", ["two copies", "bfloat16"])
def test_unshared_updates_are_exchanged_when_groups_are_formed_again(
    job: NewJob, undisturbed: Undisturbed, recipe: str
) -> None:
    """When a rank is killed after the updates of a step and before the ranks exchange the updated
    parameters, then the other ranks have completed this step. All losses and digests equal those of
    the undisturbed run."""
    disturbed = job(WORLD, RECIPES[recipe])
    before = disturbed.all("train", 2)
    told = disturbed.all("train_without_sharing", 3)
    local_state = disturbed.ranks[1].ask("local_state", 3)
    disturbed.replace(1)
    disturbed.all("clear")
    disturbed.repair(1)
    disturbed.form()
    disturbed.all("build")
    for number, rank in enumerate(disturbed.ranks):
        rank.ask("roll_back", 3, local_state if number == 1 else None)
    after = disturbed.all("train", LAST)
    steps, final = undisturbed(recipe)
    assert steps == [
        b + t + a  # type: ignore[operator]  # both are lists
        for b, t, a in zip(before, told, after, strict=True)
    ]
    assert disturbed.all("digests") == final


def save_by_script(actor: Actor, directory: Path) -> list[Tensor] | str:
    """
    Save the shard `dense` with a function that a script has handed over.

    Return the parameters that the function sees, or the message if the adaptor refuses the save.
    """
    plugins = pluggy.PluginManager("tft")
    plugins.add_hookspecs(AdaptorSpecs)
    plugins.register(adaptor)
    found: list[Tensor] = []

    def save(place: Path, step: int, shard: str) -> None:
        found.extend(p.detach().clone() for p in actor.net.parameters())
        (place / "written").touch()

    saving = Saving(plugins.hook)
    saving.give(Own(save=save, load=print))
    try:
        saving.save(directory, "dense", actor.step)
    except OrderRefused as error:
        assert not found
        return str(error)
    return found


def exchange(actor: Actor) -> None:
    """
    Send and receive parameters in the replica group, as at the end of an update window.
    """
    adaptor.tft_updated()


@pytest.mark.parametrize("rebuilds", [False, True])
def test_an_exchange_that_was_aborted_on_a_device_does_not_count(
    monkeypatch: pytest.MonkeyPatch, *, rebuilds: bool
) -> None:
    """When the collectives of an exchange look complete on a device, but were aborted, then the rank
    knows that its parameters are not all from the same step."""
    optimizer = Fleet(4, 2, torch.float32).optimizers[0]
    optimizer.whole = False

    def begin() -> Callable[[], None]:
        optimizer.exchanging = True
        return optimizer.exchanged

    state: Any = SimpleNamespace(
        updated=begin, rebuild=begin, exchange=begin, devices=SimpleNamespace(asynchronous=True)
    )
    groups: Any = SimpleNamespace(synchronize=raise_called_off)
    hooks = StateHooks[Any]()
    hooks.adopted = state
    monkeypatch.setattr(adaptor, "_hooks", hooks)
    monkeypatch.setattr(adaptor, "_torch", TorchHooks(hooks, groups))
    exchanges = adaptor.tft_rebuild if rebuilds else adaptor._torch.tft_updated
    with pytest.raises(CalledOff):
        exchanges()
    assert not optimizer.whole
    groups.synchronize = lambda *, closing: None
    exchanges()
    assert optimizer.whole


def raise_called_off(*, closing: bool) -> None:
    """
    Do what a device does whose collectives were aborted.
    """
    raise CalledOff


def test_rank_with_an_interrupted_exchange_does_not_save_parameters(
    job: NewJob, tmp_path: Path
) -> None:
    """When a killed rank interrupts the exchange of parameters in its replica group, then neither
    its replacement nor the other ranks of that group save. The ranks of other groups save. After
    groups are formed again, all ranks save."""
    running = job(WORLD, RECIPES["two copies"])
    running.all("train_without_sharing", 3)
    for number in (0, 2, 3):
        running.ranks[number].tell("call", exchange)
    running.ranks[1].kill()
    assert isinstance(running.ranks[0].hear(), Failure)
    for number in (2, 3):
        sound(running.ranks[number].hear())
    running.replace(1)
    running.all("clear")
    running.repair(1)
    told = [rank.ask("call", save_by_script, tmp_path) for rank in running.ranks]
    for broken in (0, 1):
        assert "exchange of the updated parameters was interrupted" in told[broken]
    assert all(torch.equal(a, b) for a, b in zip(told[2], told[3], strict=True))
    running.form()
    running.all("build")
    for rank in running.ranks:
        found = rank.ask("call", save_by_script, tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(found, told[2], strict=True))


@pytest.mark.parametrize(
    ("recipe", "own"),
    [("bfloat16", "_own")]
    + [
        pytest.param(*row, marks=pytest.mark.soak)
        for row in (("two copies", ""), ("bfloat16", ""), ("two copies", "_own"))
    ],
)
def test_checkpoint_of_shares_is_resumed_bit_for_bit(
    job: NewJob, undisturbed: Undisturbed, tmp_path: Path, recipe: str, own: str
) -> None:
    """When one holder of each shard writes it, by the adaptor or by a script, then a job that loads
    the shards continues bit for bit."""
    saved = job(WORLD, RECIPES[recipe])
    before = saved.all("train", 3)
    for rank, shard in ((1, "dense"), (2, "optimizer.0"), (1, "optimizer.1")):
        saved.ranks[rank].ask(f"save{own}", tmp_path, shard)
    for rank in () if own else (3, 0):  # rank 0 repeats the request of rank 3
        assert saved.ranks[rank].ask("join", tmp_path) == [".metadata"]
    local_state = [rank.ask("local_state", 3) for rank in saved.ranks]

    resumed = job(WORLD, RECIPES[recipe])
    resumed.all(f"load{own}", tmp_path, WORLD)
    resumed.form()
    resumed.all("build")
    for each, state in zip(resumed.ranks, local_state, strict=True):
        each.ask("roll_back", 3, state)
    after = resumed.all("train", LAST)
    steps, final = undisturbed(recipe)
    assert steps == [b + a for b, a in zip(before, after, strict=True)]  # type: ignore[operator]  # both are lists
    assert resumed.all("digests") == final
