"""
Tests of `Model.train` of real MindSpore with the adaptor's callback.

MindSpore's own loop handles the incidents, and MindSpore's own code saves the last checkpoints.
Each job is compared bit for bit with a job without faults.
"""

from pathlib import Path

import mindspore
import pytest
from tft_mindspore import TrainFaultTolerance

from tests.e2e.jobs import Outcome
from tests.mindspore.model import ALL, LAST, Fault, files, layout, same, told, train
from tft.errors import UsageError

UCE = "UCEError occurs in a test, error_code=507053"
HCCE = "HCCEError occurs in a test"


@pytest.fixture(scope="module")
def calm_pair(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of three epochs of four batches on two ranks, without a fault.
    """
    outcome = train(tmp_path_factory.mktemp("calm") / "run")
    assert outcome.code == 0, outcome.output
    return outcome


@pytest.fixture(scope="module")
def calm_four(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of three epochs of four batches on four ranks, without a fault.
    """
    outcome = train(tmp_path_factory.mktemp("calm") / "run", nproc=4)
    assert outcome.code == 0, outcome.output
    return outcome


def test_the_loop_of_mindspore_survives_lost_memory_links_and_processes(
    tmp_path: Path, calm_pair: Outcome
) -> None:
    """When ranks lose memory in a forward pass and in the middle of an update, a link fails, and
    both ranks are killed in different epochs, the second one after the other rank has finished,
    then the loop is entered again at the agreed step, with the data in the order of its epoch, and
    losses and final parameters are those of the undisturbed job. A callback that begins anew in
    `on_train_begin` has seen all epochs."""
    faults: list[Fault] = [
        [1, 3, "forward", UCE], [0, 6, "update", UCE], [1, 8, "forward", HCCE],
        [1, 9, "forward", "kill"], [0, 12, "end", "kill"],
    ]  # fmt: skip
    outcome = train(tmp_path / "run", faults=faults)
    same(outcome, calm_pair, without=[(0, 6)])
    assert told(outcome) == [
        ("retry", [("memory", 1)], 0),
        ("retry", [("memory", 0)], 0),
        ("retry", [("network", 1)], 0),
        ("recover", [("process", 1)], 1),
        ("recover", [("process", 0)], 1),
    ]
    assert all(incident["steps_lost"] == 0 for incident in outcome.incidents)
    assert (tmp_path / "run" / "epochs-rank1.json").read_text() == "[1, 2, 3]"


@pytest.mark.soak
def test_four_ranks_survive_lost_memory_and_kills(tmp_path: Path, calm_four: Outcome) -> None:
    """When two of four ranks lose their memory at once, later rank 0 is killed, and then two others
    at once, then losses and final parameters are those of the undisturbed job."""
    faults: list[Fault] = [
        [1, 2, "forward", UCE], [2, 2, "forward", UCE], [0, 6, "forward", "kill"],
        [1, 10, "end", "kill"], [3, 10, "forward", "kill"],
    ]  # fmt: skip
    outcome = train(tmp_path / "run", faults=faults, nproc=4)
    same(outcome, calm_four)
    assert [strategy for strategy, *_ in told(outcome)] == ["retry", "recover", "recover"]


@pytest.mark.soak
def test_a_last_checkpoint_has_the_name_of_mindspore_transformers_and_resumes(
    tmp_path: Path, calm_pair: Outcome
) -> None:
    """When only last checkpoints are enabled and rank 0 is killed, then the file of the other rank
    is named by epoch and step, no other rank has a fault, and the same command with --resume ends
    as the undisturbed job."""
    run_dir, there = tmp_path / "run", tmp_path / "checkpoint"
    faults: list[Fault] = [[0, 7, "forward", "kill"]]
    outcome = train(run_dir, faults=faults, enable=LAST, callback=layout(there))
    assert outcome.code == 3, outcome.output
    assert told(outcome)[0][:2] == ("dump", [("process", 0)])
    assert files(there) == ["rank_1/llama2_13b_rank_1-2_2.ckpt"]
    assert "rank:1, report group list: [0, 1]" in outcome.output

    resumed = train(run_dir, "--resume", enable=LAST, resume=True, callback=layout(there))
    assert resumed.code == 0, resumed.output
    assert resumed.finals() == calm_pair.finals()
    rows, expected = resumed.rows(), calm_pair.rows()
    assert rows == expected


@pytest.mark.soak
def test_without_a_prefix_mindspore_writes_and_names_the_last_checkpoint(tmp_path: Path) -> None:
    """When a rank raises an unknown error, then MindSpore's own function writes and names the
    checkpoint, and the exit code is 3."""
    faults: list[Fault] = [[1, 5, "forward", "a bug in a test"]]
    outcome = train(tmp_path / "run", faults=faults)
    assert outcome.code == 3, outcome.output
    assert told(outcome)[0][:2] == ("dump", [("software", 1)])
    last = tmp_path / "run" / "last"
    assert files(last) == ["ttp_saved_checkpoints-step_4/rank_0/ttp_rank_0-1_4.ckpt"]
    found = mindspore.load_checkpoint(str(last / files(last)[0]))
    assert int(found["step_num"].asnumpy()) == int(found["global_step"].asnumpy()[0]) == 4


@pytest.mark.parametrize(
    ("enable", "mode", "said"),
    [
        ("", mindspore.PYNATIVE_MODE, "enables none of TTP, UCE, HCCE, ARF"),
        ("{TSP:1}", mindspore.PYNATIVE_MODE, "enables none of"),
        ("{TRE:1,HCCE:1}", mindspore.PYNATIVE_MODE, "belong together"),
        ("{TRE:2,HCCE:1}", mindspore.PYNATIVE_MODE, "has TRE:2"),
        (ALL, mindspore.GRAPH_MODE, "cannot be interrupted and repeated"),
    ],
)
def test_unsupported_settings_are_refused_by_the_callback(
    enable: str, mode: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """When no strategy is enabled, or a mode is set in which a step cannot be interrupted, then the
    callback raises an error."""
    monkeypatch.setenv("MS_ENABLE_TFT", enable)
    before = mindspore.get_context("mode")
    mindspore.set_context(mode=mode)
    try:
        with pytest.raises(UsageError, match=said):
            TrainFaultTolerance(str(tmp_path))
    finally:
        mindspore.set_context(mode=before)


NORMS = {"monitor_config": {"check_for_global_norm": True, "global_norm_spike_threshold": 100.0}}


def test_norm_above_the_threshold_is_recovered_without_leaving_the_job(
    tmp_path: Path, calm_pair: Outcome
) -> None:
    """When TRE is enabled with a threshold and the gradients of one rank are once too large, then
    no rank updates, all processes are kept, the step is computed again, and the job ends as the
    undisturbed one. The report names the rank."""
    outcome = train(
        tmp_path / "run", enable="{TTP:1,UCE:1,TRE:1}", callback=NORMS,
        wrong=[1, 6, 1e4, False],
    )  # fmt: skip
    same(outcome, calm_pair)
    assert told(outcome) == [("retry", [("numeric", 1)], 0)]
    (found,) = outcome.incidents[0]["refused"]
    assert (found["step"], found["times"], found["cause"]) == (6, 1, "device")
    assert "--numerics-limit is 100" in found["why"][0]


@pytest.mark.soak
@pytest.mark.parametrize("factor", [1e4, float("inf"), float("nan")])
def test_norm_that_stays_above_the_threshold_ends_the_job_with_a_last_checkpoint(
    tmp_path: Path, factor: float
) -> None:
    """When the gradients are too large or not finite each time, then the job ends with a last
    checkpoint of the step before."""
    outcome = train(
        tmp_path / "run", enable="{TTP:1,UCE:1,TRE:1}", callback=NORMS, wrong=[0, 6, factor, True]
    )
    assert outcome.code == 3, outcome.output
    assert outcome.report["steps"] == 5
    assert "the update of step 6 was refused twice" in outcome.output


@pytest.mark.soak
def test_an_optimizer_without_the_wrapper_is_refused(tmp_path: Path) -> None:
    """When the optimizer is not one of `get_optimizer_wrapper`, then the job ends before a step is
    trained, and the message gives the code to write."""
    outcome = train(tmp_path / "run", plain=True)
    assert outcome.code != 0
    assert "get_optimizer_wrapper(Adam)" in outcome.output
    assert outcome.rows() == {}


# --------------------------------------------------- all ranks and points of a step, in `make soak`


@pytest.mark.soak
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("where", ["forward", "update", "end"])
@pytest.mark.parametrize("text", [UCE, HCCE, "kill"])
def test_every_rank_at_every_point_of_a_step(
    text: str, where: str, rank: int, tmp_path: Path, calm_four: Outcome
) -> None:
    """When any rank is lost or disturbed at any point of a step of the second epoch, then losses
    and final parameters are those of the undisturbed job."""
    outcome = train(tmp_path / "run", faults=[[rank, 7, where, text]], nproc=4)
    same(outcome, calm_four, without=[(rank, 7)] if where == "update" else [])
    [(strategy, faults, started)] = told(outcome)
    assert (strategy, started) == (("recover", 1) if text == "kill" else ("retry", 0))
    assert [who for _, who in faults] == [rank]
