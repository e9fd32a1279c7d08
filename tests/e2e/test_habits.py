"""
Habits of scripts that leave state in a process. A rollback restores this state with the rest.

Each job loses a rank while the code of its habit runs. At the end, the whole state of every rank
equals that of the undisturbed job.
"""

import re
from pathlib import Path

import pytest

from tests.e2e.jobs import ROOT, Outcome, identical, run

SCRIPT = ROOT / "tests" / "e2e" / "habits_job.py"


def loses_nothing(where: Path, habit: str, dies: str, *more: str) -> Outcome:
    """
    Run a job of three ranks in which one dies, and check that it ends as the job without a fault.
    Return its outcome.
    """
    calm = run(where / "calm", script=SCRIPT, arguments=(habit, *more), nproc=3)
    assert calm.code == 0, calm.output
    outcome = run(where / "run", script=SCRIPT, arguments=(habit, "--die", dies, *more), nproc=3)
    assert outcome.code == 0, outcome.output
    assert [(i["strategy"], i["steps_lost"]) for i in outcome.incidents] == [("recover", 0)]
    identical(outcome, calm)
    assert len(outcome.finals()) == 3
    return outcome


@pytest.mark.soak
def test_survivors_of_an_evaluation_are_in_training_mode_again(tmp_path: Path) -> None:
    """When a rank dies in an evaluation after the window, and the other ranks are interrupted
    there, then their models are in training mode again."""
    loses_nothing(tmp_path, "evaluates", "1,7")


@pytest.mark.soak
def test_a_buffer_counted_in_the_forward_pass_counts_each_step_once(tmp_path: Path) -> None:
    """When a model that is made over groups counts in a buffer in its forward pass, and a rank dies
    after that, then each step counts once. The survivors had already counted the interrupted step,
    and the replacement continues the count."""
    loses_nothing(tmp_path, "counts", "1,6", "--make")


@pytest.mark.soak
@pytest.mark.parametrize("how", [(), ("--make",)], ids=["adopted", "made"])
def test_the_extra_state_of_a_module_counts_each_step_once(
    tmp_path: Path, how: tuple[str, ...]
) -> None:
    """When a module counts in its extra state, and a rank dies after the forward pass, then all
    ranks, the replacement and the survivors, have counted each step once."""
    loses_nothing(tmp_path, "tells", "1,6", *how)


@pytest.mark.soak
@pytest.mark.parametrize("how", [(), ("--make",)], ids=["adopted", "made"])
def test_an_optimizer_with_state_in_an_attribute_is_refused(
    tmp_path: Path, how: tuple[str, ...]
) -> None:
    """When an optimizer keeps state in an attribute, then the job ends with its first step and
    gives the reason: a replacement would train on without that state."""
    outcome = run(tmp_path, script=SCRIPT, arguments=("hides", "--die", "1,6", *how), nproc=2)
    assert outcome.code not in (0, 3), outcome.output
    assert "Momentum keeps state in its attributes" in outcome.output
    assert {step for _, step in outcome.rows()} == {1}


@pytest.mark.parametrize("how", [(), ("--make",)], ids=["adopted", "made"])
@pytest.mark.soak
def test_an_optimizer_that_keeps_dataclasses_in_its_state_is_refused(
    tmp_path: Path, how: tuple[str, ...]
) -> None:
    """When an optimizer keeps a dataclass in the state of a parameter, then the job ends with its
    first step and names the dataclass: the state could not be moved in an incident."""
    outcome = run(
        tmp_path, script=SCRIPT, arguments=("preconditions", "--die", "1,6", *how), nproc=2
    )
    assert outcome.code == 4, outcome.output
    assert "after a step of Preconditioned" in outcome.output
    assert re.search(r"optim\.state\.\S*\.factors holds a \S*Factors", outcome.output)
    assert {step for _, step in outcome.rows()} == {1}
    assert outcome.finals() == {}


@pytest.mark.soak
def test_gradients_of_a_repeated_step_are_unscaled_again(tmp_path: Path) -> None:
    """When a rank dies between `scaler.unscale_` and the update window, and the others wait there
    with unscaled gradients, then all ranks unscale the gradients of that step again."""
    loses_nothing(tmp_path, "unscales", "1,6")


@pytest.mark.soak
def test_a_loader_without_a_generator_does_not_change_dropout(tmp_path: Path) -> None:
    """When a StatefulDataLoader draws from torch's generator for each iterator, and a rank dies in
    a step with dropout, then batches and dropout are those of the undisturbed job."""
    loses_nothing(tmp_path, "loads", "1,6")


@pytest.mark.soak
def test_a_loader_with_a_distributed_sampler_keeps_its_epoch(tmp_path: Path) -> None:
    """When a StatefulDataLoader has a `DistributedSampler`, and a rank dies in the second epoch,
    then its replacement takes the rest of that epoch in its order."""
    loses_nothing(tmp_path, "shares", "1,6")


@pytest.mark.soak
@pytest.mark.parametrize("how", [(), ("--make",)], ids=["adopted", "made"])
def test_a_buffer_that_changes_for_the_first_time_is_rolled_back(
    tmp_path: Path, how: tuple[str, ...]
) -> None:
    """When a rank dies in the first step that changes a buffer, and another buffer has changed in
    each step before, then both buffers count that step once on all ranks."""
    loses_nothing(tmp_path, "wakes", "1,6", *how)


@pytest.mark.soak
@pytest.mark.parametrize("how", [(), ("--make",)], ids=["adopted", "made"])
def test_parameters_that_are_frozen_while_training_are_refused(
    tmp_path: Path, how: tuple[str, ...]
) -> None:
    """When a script freezes parameters while training, then the job ends at the next window, with a
    last checkpoint of the step before, and gives the reason: a replacement would train these
    parameters. The loss of a step is recorded before its window, so the last one is of step 4."""
    outcome = run(tmp_path, script=SCRIPT, arguments=("freezes", "--die", "1,6", *how), nproc=2)
    assert outcome.code == 3, outcome.output
    assert (tmp_path / "checkpoints" / "step-00000003").is_dir()
    assert "requires_grad of first.weight, first.bias was changed while training" in outcome.output
    assert {step for _, step in outcome.rows()} == {1, 2, 3, 4}
    assert outcome.finals() == {}


@pytest.mark.soak
@pytest.mark.parametrize("how", [(), ("--make",)], ids=["adopted", "made"])
def test_gradients_set_to_zero_are_zero_on_the_replacement_too(
    tmp_path: Path, how: tuple[str, ...]
) -> None:
    """When a script sets gradients to zero instead of None, and a rank dies in a step that does not
    use some parameters, then weight decay applies to these parameters in that step, on the
    replacement too."""
    loses_nothing(tmp_path, "zeroes", "1,6", *how)


@pytest.mark.soak
def test_a_batch_that_was_read_ahead_is_trained_on(tmp_path: Path) -> None:
    """When a script reads each batch one step ahead with a `Prefetcher`, and a rank dies when it
    has read the batch of the next step, then no batch is skipped or used twice."""
    loses_nothing(tmp_path, "prefetches", "1,6")


@pytest.mark.soak
def test_ranks_draw_different_numbers_after_make_has_seeded_torch(tmp_path: Path) -> None:
    """When `make` seeds torch with the same number on all ranks, then each rank still has its own
    random numbers, from the first step on and after an incident."""
    outcome = loses_nothing(tmp_path, "none", "1,6", "--make")
    assert len({final["generator"] for final in outcome.finals().values()}) == 3
