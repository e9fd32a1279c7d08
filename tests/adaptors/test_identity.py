"""
A job that loses a rank gives bit for bit the same results as a job that loses no rank.
"""

from collections.abc import Callable

import pytest

from tests.adaptors.conftest import Job, NewJob
from tests.adaptors.ranks import Recipe

WORLD = 3
"""Three ranks, because with two ranks a sum has only one order, and an error in the order would not
be seen."""

LAST = 7

RECIPES = {
    "adamw": Recipe(),
    "sgd": Recipe(optimizer="sgd", wrapper={"gradient_as_bucket_view": True}),
    "tensor lr": Recipe(optimizer="tensor_lr"),
    "batch norm": Recipe(norm="batch"),
    "unused parameters looked for": Recipe(wrapper={"find_unused_parameters": True}),
    "two sums a step": Recipe(backwards=2),
    "compiled": Recipe(compiled=True),
    "steps of their own": Recipe(own_steps=True),
    "a stage": Recipe(staged=True),
    "scaled and averaged": Recipe(scaled=True),
    "scaled, with batch norm": Recipe(scaled=True, norm="batch"),
}

Record = tuple[list[object], list[object]]
Undisturbed = Callable[[str], Record]


@pytest.fixture(scope="module")
def known() -> dict[str, Record]:
    """
    Return the cache of the records of undisturbed jobs, by recipe.
    """
    return {}


@pytest.fixture
def undisturbed(job: NewJob, known: dict[str, Record]) -> Undisturbed:
    """
    Return a function that gives the record of a recipe's undisturbed job.

    The record holds the losses and gradient digests of every step, and the final digests.
    """

    def undisturbed(recipe: str) -> Record:
        if recipe not in known:
            whole = job(WORLD, RECIPES[recipe])
            known[recipe] = whole.all("train", LAST), whole.all("digests")
        return known[recipe]

    return undisturbed


def lose_a_rank(job: Job, victim: int, completed: int, *, process: bool = True) -> None:
    """
    Make `victim` fail in the middle of the step after `completed` steps, and recover the job.

    The victim's process is killed, or, with `process=False`, its memory is damaged. The victim
    copies its state from a surviving rank.
    """
    local_state = job.ranks[victim].ask("local_state", completed)
    job.all("interrupt")
    if process:
        job.replace(victim)
    else:
        job.ranks[victim].ask("damage")
    job.all("clear")
    job.repair(victim)
    job.form()
    job.all("build")
    for rank in job.ranks:
        rank.ask("roll_back", completed, local_state if rank is job.ranks[victim] else None)


@pytest.mark.parametrize(
    ("recipe", "completed", "victim"),
    [("adamw", 0, 0), ("tensor lr", 2, 1), ("scaled, with batch norm", 4, 1)]
    + [
        pytest.param(recipe, completed, completed % WORLD, marks=pytest.mark.soak)
        for recipe, at in (
            ("adamw", (1, 2, 5)),
            ("sgd", (1, 3)),
            ("batch norm", (0, 3)),
            ("unused parameters looked for", (2,)),
            ("two sums a step", (0, 1)),
            ("scaled and averaged", (0, 2, 4, 5)),
            ("compiled", (3,)),
            ("steps of their own", (1, 4)),
            ("a stage", (0, 1, 2, 5)),
        )
        for completed in at
    ],
)
def test_job_is_bitwise_equal_after_the_loss_of_a_rank(
    job: NewJob, undisturbed: Undisturbed, recipe: str, completed: int, victim: int
) -> None:
    """When a rank is killed in the step after `completed` steps, then every later loss, every
    all-reduced gradient and the final digest are equal to those of the undisturbed run."""
    disturbed = job(WORLD, RECIPES[recipe])
    before = disturbed.all("train", completed)

    lose_a_rank(disturbed, victim, completed)

    after = disturbed.all("train", LAST)
    steps, final = undisturbed(recipe)
    assert steps == [b + a for b, a in zip(before, after, strict=True)]  # type: ignore[operator]  # both are lists
    assert disturbed.all("digests") == final


def test_job_is_bitwise_equal_after_the_repair_of_a_live_rank(
    job: NewJob, undisturbed: Undisturbed
) -> None:
    """When a rank keeps its process and gets its state from another rank, then all later losses and
    the final digest are equal to those of the undisturbed run."""
    disturbed = job(WORLD, RECIPES["adamw"])
    disturbed.all("train", 3)

    lose_a_rank(disturbed, 1, 3, process=False)

    steps, final = undisturbed("adamw")
    assert disturbed.all("train", LAST) == [told[3:] for told in steps]  # type: ignore[index]  # both are lists
    assert disturbed.all("digests") == final


@pytest.mark.soak
def test_job_is_bitwise_equal_after_repeated_losses_of_ranks(
    job: NewJob, undisturbed: Undisturbed
) -> None:
    """When ranks are lost repeatedly, and a replacement gives its state to the next replacement,
    then the final digest is equal to that of the undisturbed run."""
    disturbed = job(WORLD, RECIPES["batch norm"])

    for victim, completed in ((0, 0), (2, 0), (1, 1), (0, 1), (2, 4)):
        disturbed.all("train", completed)
        lose_a_rank(disturbed, victim, completed)

    disturbed.all("train", LAST)
    assert disturbed.all("digests") == undisturbed("batch norm")[1]
