"""
Jobs on the test device, whose collectives return before they are complete: the state at the end is
that of the undisturbed job on every rank, and only killed processes have ended.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.jobs import ROOT, Outcome, identical, run

SCRIPT = ROOT / "tests" / "device" / "train.py"
PHASES = ("forward", "backward", "collective", "update", "between", "tail", "evaluation")

Calm = Callable[..., Outcome]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """
    Return a function that gives the undisturbed job with these arguments. Each job runs once.
    """
    known: dict[tuple[str, ...], Outcome] = {}

    def undisturbed(*arguments: str) -> Outcome:
        if arguments not in known:
            where = tmp_path_factory.mktemp("calm") / "run"
            known[arguments] = run(where, script=SCRIPT, arguments=arguments)
            assert known[arguments].code == 0, known[arguments].output
            assert known[arguments].incidents == []
        return known[arguments]

    return undisturbed


def disturbed(where: Path, *specs: str, arguments: tuple[str, ...] = ()) -> Outcome:
    """
    Run a job of four ranks with these faults, check that its exit code is 0, and return it.
    """
    options = [word for spec in specs for word in ("--chaos", spec)]
    outcome = run(where / "run", *options, script=SCRIPT, arguments=arguments)
    assert outcome.code == 0, outcome.output
    return outcome


def recorded(outcome: Outcome, rank: int) -> list[dict[str, float]]:
    """
    Return the rows that the script of a rank has recorded.
    """
    lines = (outcome.run_dir / f"records-rank{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="DDP", marks=pytest.mark.soak),
        pytest.param(("--groups",), id="several groups"),
    ],
)
def test_a_rank_killed_in_each_phase_leaves_the_state_identical(
    tmp_path: Path, calm: Calm, arguments: tuple[str, ...]
) -> None:
    """When a rank is killed in each phase in turn, then the job ends with the losses and the state
    of the undisturbed job on every rank, and each incident starts one process and keeps the others.
    """
    specs = [
        f"kill:rank={turn % 4},step={3 * (turn + 1)},phase={phase}"
        for turn, phase in enumerate(PHASES)
    ]
    outcome = disturbed(tmp_path, *specs, arguments=arguments)
    identical(outcome, calm(*arguments))
    assert [(i["strategy"], i["steps_lost"]) for i in outcome.incidents] == [("recover", 0)] * 7
    assert all(i["processes_started"] == 1 and i["pids_kept"] for i in outcome.incidents)


@pytest.mark.soak
@pytest.mark.parametrize("arguments", [(), ("--groups",)], ids=["DDP", "several groups"])
def test_reported_faults_are_retried_without_a_new_process(
    tmp_path: Path, calm: Calm, arguments: tuple[str, ...]
) -> None:
    """When a rank reports lost memory in its update or before it, or a broken connection while its
    own all-reduces are pending, then all processes are kept, and the state is that of the
    undisturbed job."""
    outcome = disturbed(
        tmp_path,
        "raise:rank=1,step=6,phase=update,kind=memory",
        "raise:rank=0,step=12,phase=forward,kind=memory",
        "raise:rank=2,step=18,phase=backward,kind=network",
        arguments=arguments,
    )
    identical(outcome, calm(*arguments))
    assert [(i["strategy"], i["steps_lost"]) for i in outcome.incidents] == [("retry", 0)] * 3
    assert all(i["processes_started"] == 0 and i["pids_kept"] for i in outcome.incidents)


@pytest.mark.soak
def test_a_rank_that_left_its_loop_with_pending_collectives_is_kept(
    tmp_path: Path, calm: Calm
) -> None:
    """When two ranks report faults in the same step, one of them while its all-reduces wait for the
    other one, then the all-reduces are aborted and not finalized: all processes are kept."""
    options = ("--chaos", "raise:rank=3,step=9,phase=forward,kind=memory")
    outcome = run(tmp_path / "run", *options, script=SCRIPT, arguments=("--fails", "2,9"))
    assert outcome.code == 0, outcome.output
    identical(outcome, calm())
    assert [(i["strategy"], i["processes_started"]) for i in outcome.incidents] == [("retry", 0)]


@pytest.mark.soak
@pytest.mark.parametrize("arguments", [(), ("--groups",)], ids=["DDP", "several groups"])
def test_two_ranks_killed_at_once_are_replaced_in_one_incident(
    tmp_path: Path, calm: Calm, arguments: tuple[str, ...]
) -> None:
    """When two ranks are killed in the same step, then one incident replaces both, and the state is
    that of the undisturbed job."""
    outcome = disturbed(tmp_path, "kill:ranks=1+2,step=9,phase=backward", arguments=arguments)
    identical(outcome, calm(*arguments))
    (incident,) = outcome.incidents
    assert {fault["rank"] for fault in incident["faults"]} == {1, 2}
    assert (incident["strategy"], incident["processes_started"]) == ("recover", 2)


@pytest.mark.soak
@pytest.mark.parametrize("arguments", [(), ("--groups",)], ids=["DDP", "several groups"])
@pytest.mark.parametrize(("rank", "order"), [(2, "stop"), (2, "regroup"), (1, "fetch")])
def test_a_rank_killed_while_an_incident_is_handled_is_replaced(
    tmp_path: Path, calm: Calm, rank: int, order: str, arguments: tuple[str, ...]
) -> None:
    """When a rank is killed, and then another rank or the replacement at one of its orders, such as
    while groups are formed, then the state is that of the undisturbed job."""
    second = f"kill:rank={rank},phase=repair,order={order}"
    outcome = disturbed(tmp_path, "kill:rank=1,step=5,phase=forward", second, arguments=arguments)
    identical(outcome, calm(*arguments))
    assert {i["steps_lost"] for i in outcome.incidents} == {0}
    assert sum(i["processes_started"] for i in outcome.incidents) == 2


@pytest.mark.soak
@pytest.mark.parametrize("arguments", [(), ("--groups",)], ids=["DDP", "several groups"])
def test_a_bug_of_the_script_ends_the_job_with_a_checkpoint_that_can_be_resumed(
    tmp_path: Path, calm: Calm, arguments: tuple[str, ...]
) -> None:
    """When the script of a rank raises an exception, then the ranks save a last checkpoint, and a
    resumed job has the state of the undisturbed one."""
    options = ("--raises", "2,9")
    first = run(tmp_path / "run", script=SCRIPT, arguments=(*arguments, *options))
    assert first.code == 3, first.output
    again = run(tmp_path / "run", "--resume", script=SCRIPT, arguments=arguments)
    assert again.code == 0, again.output
    identical(again, calm(*arguments))


@pytest.mark.soak
def test_a_rank_killed_when_its_host_is_ahead_of_its_device_is_replaced(
    tmp_path: Path, calm: Calm
) -> None:
    """When the host of a rank has entered its update window and the rank is killed, then its device
    has done its part of the all-reduces: the others complete the step, and no state is lost."""
    outcome = run(tmp_path / "run", script=SCRIPT, arguments=("--dies", "1,9,window"))
    assert outcome.code == 0, outcome.output
    identical(outcome, calm())
    assert [(i["strategy"], i["steps_lost"]) for i in outcome.incidents] == [("recover", 0)]


@pytest.mark.soak
def test_a_step_counts_as_completed_when_the_device_has_completed_it(
    tmp_path: Path, calm: Calm
) -> None:
    """When a rank is killed in its update window, and the devices of the others are slow in their
    optimizer steps, then its replacement gets the state of the completed step from them, though
    their loops are left as soon as the window closes."""
    arguments = ("--plain", "--slow", "9", "--dies", "1,9,window")
    outcome = run(tmp_path / "run", script=SCRIPT, arguments=arguments)
    assert outcome.code == 0, outcome.output
    identical(outcome, calm())


@pytest.mark.soak
@pytest.mark.parametrize("metric", [(), ("--messages",)], ids=["all-reduce", "messages"])
def test_an_aborted_collective_of_the_tail_is_not_taken_for_a_success(
    tmp_path: Path, calm: Calm, metric: tuple[str, ...]
) -> None:
    """When a rank is killed before it contributes to a metric of the tail, by which all ranks set
    their learning rate, then no rank completes its tail with a part of the metric: the incident is
    reported as inexact, or the step is computed again."""
    arguments = ("--plateau", *metric, "--dies", "1,9,tail")
    outcome = run(tmp_path / "run", script=SCRIPT, arguments=arguments)
    assert outcome.code == 0, outcome.output
    finals = outcome.finals()
    for name in ("parameters", "optimizer", "scheduler"):
        assert len({final[name] for final in finals.values()}) == 1, finals
    assert all(i["inexact"] or i["steps_lost"] for i in outcome.incidents), outcome.incidents
    if not any(incident["inexact"] for incident in outcome.incidents):
        identical(outcome, calm("--plateau", *metric))
    ranks = [recorded(outcome, rank) for rank in range(4)]
    metrics = {row["metric"] for rows in ranks for row in rows if "metric" in row}
    for rows in ranks:
        bests = [row["best"] for row in rows if "metric" in row]
        assert set(bests[1:]) <= metrics, "the scheduler has used a metric that no row has"
        assert len(bests) >= 23
    undisturbed = [recorded(calm("--plateau", *metric), rank) for rank in range(4)]
    for rows, those in zip(ranks, undisturbed, strict=True):
        assert all(row in those for row in rows if row["step"] <= 9), "a row has a part of a metric"


@pytest.mark.soak
def test_a_group_that_aborts_itself_lets_no_rank_update(
    tmp_path: Path, calm: Calm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a rank is killed before it contributes its gradients, and the user has set torch to abort
    groups on errors, then the all-reduces of the others end like complete ones before tft has
    stopped anything. The barrier before the update fails, and no rank applies the partial gradients."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    outcome = disturbed(tmp_path, "kill:rank=1,step=9,phase=backward")
    identical(outcome, calm())
    assert [(i["strategy"], i["steps_lost"]) for i in outcome.incidents] == [("recover", 0)]
    assert all(i["faults"][0]["kind"] != "corruption" for i in outcome.incidents)


@pytest.mark.soak
def test_an_aborted_evaluation_is_called_again(tmp_path: Path, calm: Calm) -> None:
    """When a rank is killed before it contributes to the loss of an evaluation, then no
    function that is called after it gets a part of the loss: the evaluation is called again."""
    outcome = run(tmp_path / "run", script=SCRIPT, arguments=("--dies", "1,14,evaluation"))
    assert outcome.code == 0, outcome.output
    identical(outcome, calm())
    noted, undisturbed = (
        [set((job.run_dir / f"noted-{rank}").read_text().splitlines()) for rank in range(4)]
        for job in (outcome, calm())
    )
    assert noted == undisturbed


def test_an_exception_because_of_an_aborted_collective_is_no_bug_of_the_script(
    tmp_path: Path, calm: Calm
) -> None:
    """When a rank is killed, and the scripts of the others raise exceptions because the results of
    aborted collectives are wrong, then the job goes on as if nothing had happened."""
    arguments = ("--groups", "--guard")
    outcome = disturbed(tmp_path, "kill:rank=1,step=9,phase=backward", arguments=arguments)
    identical(outcome, calm("--groups"))  # the guard changes no state
    assert [(i["strategy"], i["steps_lost"]) for i in outcome.incidents] == [("recover", 0)]


@pytest.mark.soak
def test_a_rank_that_left_its_loop_does_not_wait_for_its_device(tmp_path: Path, calm: Calm) -> None:
    """When a rank has left its loop by an exception while its device waits for a killed rank, then
    it gets free before it puts back its running statistics, and all other processes are kept."""
    outcome = disturbed(
        tmp_path, "kill:rank=1,step=9,phase=forward", arguments=("--norm", "--fails", "0,9")
    )
    identical(outcome, calm("--norm"))
    assert all(incident["processes_started"] == 1 for incident in outcome.incidents)
