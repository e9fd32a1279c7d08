"""
Models of which a rank holds several kinds of parts, each shared with different ranks.

Examples are experts, and small parameters beside sharded ones. `tests/e2e/test_experts.py` runs
whole jobs of this kind.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tft_pytorch import Made, ReplicaOptimizer, adaptor
from tft_pytorch.auxiliary_state import joined
from tft_pytorch.factory_maker import adopt_make
from tft_pytorch.sharded_state import Parts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import swa_utils
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.adaptors.conftest import NewJob
from tests.adaptors.makes import (
    averaged_experts,
    compiled_shards,
    experts,
    shared_experts,
    small_beside_shards,
)
from tests.adaptors.ranks import Actor, Recipe, local
from tft.errors import UsageError

WORLD = 4
LAST = 6
ALL = (0, 1, 2, 3)
RECIPES = {
    "experts": Recipe(make=experts),
    "averaged experts": Recipe(make=averaged_experts),
    "experts with shares": Recipe(make=shared_experts),
    "small beside shards": Recipe(make=small_beside_shards),
    "compiled shards": Recipe(make=compiled_shards),
    "steps of their own": Recipe(make=small_beside_shards, own_steps=True),
}

Undisturbed = Callable[[str], tuple[list[object], list[object]]]


@pytest.mark.parametrize(
    ("make", "rank", "shards"),
    [
        (experts, 0, {"dense": ALL, "part.0+2": (0, 2)}),
        (experts, 3, {"dense": ALL, "part.1+3": (1, 3)}),
        (small_beside_shards, 1, {"dense": ALL, "part.1+3": (1, 3)}),
        (shared_experts, 2, {"dense": ALL, "part.0+2": (0, 2), "optimizer.0": (0, 2)}),
    ],
)
def test_parameters_held_by_the_same_ranks_form_a_shard(
    make: Callable[[], Made], rank: int, shards: dict[str, tuple[int, ...]]
) -> None:
    """When parameters of a model are held by different ranks, then each set of ranks has its own
    shard, and the shard with the most ranks is first."""
    found = adopt_make({"make": make}, None).shards(rank, WORLD)
    assert [(copies.shard, copies.ranks) for copies in found] == list(shards.items())


class Kept:
    """
    A part of the training state that consists of tensors by name.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, Tensor]:
        """
        Return all tensors.
        """
        return dict(self._tensors)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """
        Replace the tensors by those in `state`.
        """
        self._tensors = dict(state)


def compiled_experts() -> Made:
    """
    Make a model with compiled experts and with another parameter of the same name outside them.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "expert"))
    whole, experts = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    plain = nn.Sequential(whole, torch.compile(experts, backend="eager"))  # type: ignore[call-overload]  # it returns a Module
    copies = mesh["replicate"].get_group()
    compiled = torch.compile(DDP(experts, process_group=copies), backend="eager")
    model = nn.Sequential(DDP(whole), compiled)  # type: ignore[call-overload]  # it returns a Module
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Made(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        others={
            "average": swa_utils.AveragedModel(plain),
            "shadow": Kept(shadow),
            "other": Kept({"0.bias": torch.zeros(3)}),
        },
    )


def test_average_of_a_compiled_module_is_in_the_shard_of_the_module() -> None:
    """When experts are compiled and the names in their moving average contain `_orig_mod`, then
    this average is in the shard of the experts. A tensor with the name of a parameter but another
    shape is not assigned to that parameter."""
    maker = adopt_make({"make": compiled_experts}, None)
    maker.shards(0, WORLD)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        maker.rebuild()
        given = {
            shard: {buffer.name for buffer in maker.give(shard).buffers}
            for shard in ("dense", "part.0+2")
        }
        maker.clear()
    finally:
        dist.destroy_process_group()
    experts = {f"1.{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")}
    assert given["part.0+2"] == {
        *(f"model.{name}" for name in experts),
        *(f"average.module.{name.replace('1.', '1._orig_mod.', 1)}" for name in experts),
        *(f"shadow.{name.replace('1.', '1._orig_mod.module.', 1)}" for name in experts),
        "other.0.bias",
    }
    assert given["dense"] == {
        *(f"model.0.{kind}" for kind in ("weight", "bias")),
        *(f"average.module.0.{kind}" for kind in ("weight", "bias")),
        *(f"shadow.0.module.{kind}" for kind in ("weight", "bias")),
        "average.n_averaged",
    }


def in_two_ways() -> Made:
    """
    Make a model with one part replicated over a row of ranks and another over a column of ranks.
    The state also has tensors that belong to neither part.
    """
    mesh = init_device_mesh("cpu", (2, 32), mesh_dim_names=("column", "row"))
    model = nn.ModuleDict(
        {
            way: DDP(nn.Linear(4, 4), process_group=mesh[way].get_group())
            for way in ("row", "column")
        }
    )
    other = nn.ParameterDict({"strange": torch.zeros(3)})
    return Made(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), others={"other": other}
    )


def in_two_ways_alone() -> Made:
    """
    Make the model of `in_two_ways` without the tensors that belong to neither part.
    """
    return replace(in_two_ways(), others={})


def test_shards_with_the_same_first_rank_have_different_names() -> None:
    """When one rank is the first holder of two shards, then the shards have different names. Each
    holder uses the same name for a shard."""
    names: dict[tuple[int, ...], set[str]] = {}
    for rank in (0, 1, 31, 32):
        for copies in adopt_make({"make": in_two_ways_alone}, None).shards(rank, 64):
            names.setdefault(copies.ranks, set()).add(copies.shard)
    assert all(len(each) == 1 for each in names.values())
    assert len({name for each in names.values() for name in each}) == len(names)
    assert names[0, 32] == {"part.0+32"}


def test_state_that_belongs_to_no_parameter_is_refused() -> None:
    """When a tensor beside the model belongs to no parameter, and no shard has the same holders as
    this tensor, then the model is refused at the start."""
    with pytest.raises(UsageError, match=r"other\.strange: this state belongs to no parameter"):
        adopt_make({"make": in_two_ways}, None).shards(0, 64)


def test_replica_optimizer_over_ranks_with_other_experts_is_refused() -> None:
    """When a `ReplicaOptimizer` gets a group in which some ranks have other experts, then it is
    refused, and the message names the ranks that have the same experts."""

    def make() -> Made:
        made = experts()
        optimizer = ReplicaOptimizer(
            made.model.parameters(), torch.optim.AdamW, group=dist.group.WORLD, copies=2, lr=0.1
        )
        return replace(made, optimizer=optimizer)

    with pytest.raises(UsageError, match=r"the same part of the model is on the ranks \[0, 2\]"):
        adopt_make({"make": make}, None).shards(0, WORLD)


def test_divided_state_is_joined_in_its_original_order() -> None:
    """When a state is divided among shards and joined again, then the keys are in their original
    order."""
    whole = {"trunk": 1, "experts": {"a": 2, "b": 3}, "scale": 4}
    parts = [{"trunk": 1, "scale": 4, "experts": {"b": 3}}, {"experts": {"a": 2}}]
    found = joined(parts, whole)
    assert found == whole
    assert list(found) == list(whole)
    assert list(found["experts"]) == ["a", "b"]


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
            running = job(WORLD, RECIPES[recipe])
            known[recipe] = running.all("train", LAST), running.all("digests")
        return known[recipe]

    return undisturbed


@pytest.mark.parametrize(
    ("recipe", "completed", "victims"),
    [
        ("experts", 0, (1,)),
        pytest.param("experts", 2, (0, 3), marks=pytest.mark.soak),
        pytest.param("averaged experts", 4, (1, 2), marks=pytest.mark.soak),
        pytest.param("experts with shares", 3, (2,), marks=pytest.mark.soak),
        pytest.param("small beside shards", 4, (0, 1), marks=pytest.mark.soak),
        pytest.param("compiled shards", 2, (0,), marks=pytest.mark.soak),  # compiling is slow
        pytest.param("steps of their own", 4, (0, 3), marks=pytest.mark.soak),
    ],
)
def test_job_with_several_shards_is_bitwise_equal_after_losses(
    job: NewJob,
    undisturbed: Undisturbed,
    recipe: str,
    completed: int,
    victims: tuple[int, ...],
) -> None:
    """When ranks are killed and each shard still has a holder, then every later loss, every
    all-reduced gradient and the final digest are equal to those of the undisturbed run."""
    disturbed = job(WORLD, RECIPES[recipe])
    before = disturbed.all("train", completed)
    disturbed.lose(victims, completed)
    after = disturbed.all("train", LAST)
    steps, final = undisturbed(recipe)
    assert steps == [b + a for b, a in zip(before, after, strict=True)]  # type: ignore[operator]  # both are lists
    assert disturbed.all("digests") == final


def test_all_holders_of_a_shard_have_equal_bits(job: NewJob) -> None:
    """When steps are complete, then a shard has the same digest on each of its holders."""
    running = job(WORLD, RECIPES["averaged experts"])
    for step in (1, 3):
        running.all("train", step)
        seen: dict[str, str] = {}
        for told in running.all("share", WORLD):
            assert isinstance(told, dict)
            for shard, digest in told.items():
                assert seen.setdefault(shard, digest) == digest, (step, shard)
        assert sorted(seen) == ["dense", "part.0+2", "part.1+3"]


def counts(actor: Actor) -> set[float]:
    """
    Return the set of step counts in the optimizer's state of its parameters.
    """
    return {float(local(state["step"])) for state in actor.optimizer.state.values()}


def test_optimizer_counts_steps_for_each_parameter(job: NewJob) -> None:
    """When parameters have no gradient in some steps, then the optimizer counts different numbers
    of steps for different parameters. This is what the tests of repairs rely on."""
    running = job(WORLD, RECIPES["steps of their own"])
    running.all("train", LAST - 1)
    assert running.ranks[0].ask("call", counts) == {3.0, 4.0}


def whole(actor: Actor) -> dict[str, Tensor]:
    """
    Return the complete tensors of the model and of its moving average.

    All ranks must call this function at the same time, because it gathers distributed tensors.
    """
    model = {f"model.{name}": tensor for name, tensor in Parts(actor.made).parameters.items()}
    average = actor.others["average"].state_dict()
    named = model | {f"average.{name}": tensor for name, tensor in average.items()}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        for name, tensor in named.items()
    }


@pytest.mark.parametrize(
    "recipe",
    [pytest.param("averaged experts", marks=pytest.mark.soak), "small beside shards"],
)
def test_checkpoint_has_each_shard_once_and_plain_torch_reads_it(
    job: NewJob, undisturbed: Undisturbed, tmp_path: Path, recipe: str
) -> None:
    """When one holder of each shard saves it, then plain torch reads the whole model and its
    average. A job that loads the checkpoint continues bitwise equal."""
    saved = job(WORLD, RECIPES[recipe])
    before = saved.all("train", 3)
    for rank, shard in ((2, "dense"), (0, "part.0+2"), (3, "part.1+3")):
        saved.ranks[rank].ask("save", tmp_path, shard)
    assert saved.ranks[3].ask("join", tmp_path) == [".metadata"]
    expected: dict[str, Tensor] = {}
    for told in saved.all("call", whole):
        assert isinstance(told, dict)
        expected |= told
    read = {name: torch.full_like(tensor, -1) for name, tensor in expected.items()}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)  # type: ignore[attr-defined]  # torch documents this name
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor), name
    local_state = [rank.ask("local_state", 3) for rank in saved.ranks]

    resumed = job(WORLD, RECIPES[recipe])
    resumed.all("load", tmp_path, WORLD)
    resumed.all("clear")
    resumed.form()
    resumed.all("build")
    for each, state in zip(resumed.ranks, local_state, strict=True):
        each.ask("roll_back", 3, state)
    after = resumed.all("train", LAST)
    steps, final = undisturbed(recipe)
    assert steps == [b + a for b, a in zip(before, after, strict=True)]  # type: ignore[operator]  # both are lists
    assert resumed.all("digests") == final


def test_moving_average_is_in_the_shards_of_its_parameters(job: NewJob) -> None:
    """When a moving average of a model is kept, then the average of the experts is only in the
    shard of the experts. The average's counter of updates is in the dense shard."""
    [rank, *_] = job(WORLD, RECIPES["averaged experts"]).ranks
    found = {shard: rank.ask("call", names_in, shard) for shard in ("dense", "part.0+2")}
    own = {f"{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")}
    trunk = {f"{m}.{kind}" for m in ("first", "router") for kind in ("weight", "bias")}
    assert {n for n in found["dense"] if n.startswith("average.")} == {
        "average.n_averaged", *(f"average.module.trunk.{name}" for name in trunk),
    }  # fmt: skip
    assert {n for n in found["part.0+2"] if n.startswith("average.")} == {
        f"average.module.experts.{name}" for name in own
    }


def names_in(actor: Actor, shard: str) -> list[str]:
    """
    Return the names of the tensors that the adaptor gives to other ranks for a shard.
    """
    return [buffer.name for buffer in adaptor.tft_give(shard, 0, kept=False).buffers]
