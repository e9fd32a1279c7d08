"""
Tests of programs on torch.distributed, whose survivors and replacements form new process groups.

The groups have the same names on all ranks, and their store survives the loss of a rank. Source:
`_process_group_name` of `ttp_decorator.py`, lines 532 to 556 at mind-cluster 22bb3d98.
"""

import json
from pathlib import Path

import pytest

from tests.mindio.jobs import Outcome, job

PROGRAM = Path(__file__).parent / "torch_program.py"
EARLY = PROGRAM.with_name("torch_early.py")
STEPS = 8


def run(directory: Path, *kills: list[int], run_options: str = "") -> Outcome:
    """
    Run a job of four ranks; each entry of `kills` is a rank and the step in which it is killed.
    """
    with job(
        directory, steps=STEPS, program=PROGRAM, kills=list(kills), run_options=run_options
    ) as running:
        return running.end()


def names(outcome: Outcome, rank: int) -> list[list[str]]:
    """
    Return the names of a rank's groups, one list for each time that the rank formed them.

    The groups are: all ranks, the rank's half, and the half again, formed without the other half.
    """
    text = (outcome.directory / f"names-{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.soak
@pytest.mark.parametrize(
    "kills",
    [
        [[0, 3], [3, 6]],
        pytest.param([[2, 3]], marks=pytest.mark.soak),
        pytest.param([[1, 3], [1, 5], [2, 7]], marks=pytest.mark.soak),
    ],
    ids=["rank 0, then rank 3", "rank 2", "three in turn"],
)
def test_groups_have_equal_names_after_a_repair(kills: list[list[int]], tmp_path: Path) -> None:
    """
    When ranks are killed, one after the other, then each new group has the same name on all its
    ranks, a name that no earlier group had, and training ends with the state of an undisturbed run.
    """
    undisturbed = run(tmp_path / "undisturbed")
    assert undisturbed.codes == [0], undisturbed.output
    outcome = run(tmp_path / "killed", *kills)
    assert outcome.codes == [0], outcome.output
    assert outcome.finals() == undisturbed.finals()
    assert len(outcome.finals()) == 1
    told = {rank: names(outcome, rank) for rank in range(4)}
    formed = 1 + len(kills)
    for rank in range(4):
        assert len(told[rank]) == formed
        assert told[rank] == told[(rank + 2) % 4]
        assert [each[0] for each in told[rank]] == [each[0] for each in told[0]]
        assert len({name for each in told[rank] for name in each}) == 3 * formed


@pytest.mark.soak
def test_groups_are_rebuilt_in_a_restarted_store(tmp_path: Path) -> None:
    """When the process of the store is killed, and a rank after that, then the groups of the repair
    are formed in the new store."""
    outcome = run(tmp_path, [2, 5], run_options="--chaos kill:store,step=2")
    assert outcome.codes == [0], outcome.output
    assert len(outcome.finals()) == 1
    assert all(names(outcome, rank)[-1] == names(outcome, (rank + 2) % 4)[-1] for rank in range(4))


@pytest.mark.soak
@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("late", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_groups_formed_before_training_use_one_store(
    late: bool, launched: bool, tmp_path: Path
) -> None:
    """When a program forms its groups before its training function is called, then all ranks use
    one store. This holds also if torch is imported late, and if each rank is started by hand with
    its own agent."""
    with job(tmp_path / "job", world=3, program=EARLY, late=late, launched=launched) as running:
        outcome = running.end()
    assert not any(outcome.codes), outcome.output
    assert [(outcome.directory / f"sum-{rank}").read_text() for rank in range(3)] == ["6"] * 3
