"""
Tests of the mistakes that a program for MindIO can make.

Where MindIO reports the mistake, so does tft. MindIO sometimes ends the process, waits for ever, or
continues with unrepaired state; tft then raises an error that names the mistake. Each test states
what MindIO does.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mindio_ttp import checks, replicas

from tests.mindio.jobs import ROOT, Outcome, job

CALLS = Path(__file__).parent / "calls.py"
Calls = list[list[Any]]
"""Calls, each as [function, arguments, keyword arguments]. Any: JSON."""


def run(directory: Path, *faults: list[Any], world: int = 2, **options: Any) -> Outcome:
    """
    Run a job with these faults and return its outcome.
    """
    with job(directory / "job", world=world, faults=list(faults), **options) as running:
        return running.end()


def came_of(outcome: Outcome) -> str:
    """
    Return why the job ended: the reason, the faults of its last incident, and each rejected
    strategy.
    """
    [*_, incident] = outcome.report["incidents"]
    found = [fault["evidence"] for fault in incident["faults"]]
    return " ".join([str(outcome.report["why"]), *found, *map(str, incident["tried"])])


# ---------------------------------------------------------------- calls in a process that has joined

INIT = ["tft_init_processor", [0, 1, False], {"enable_tls": False, "enable_arf": True}]
START = ["tft_start_processor", ["127.0.0.1", "$port"]]
ONE = {"rank_list": [0], "replica_cnt": 1, "replica_shift": 0}

LIFE: list[tuple[list[Any], Any]] = [
    (INIT, None),
    (INIT, "already called in this process"),  # in MindIO the second call ends the process
    (START, None),
    (START, "already called in this process"),
    (["tft_is_reboot_node"], False),
    (["tft_is_reboot_node"], False),
    (["tft_get_repair_step"], 0),
    (["tft_set_optimizer_replica", [1, [ONE]]], "rank must be a number from 0 to 0"),
    (["tft_set_optimizer_replica", [0, [ONE]]], None),
    (["tft_set_dp_group_info", [0, [0]]], None),
    (["tft_set_dp_group_info", [0, [1]]], "a rank of dp_rank_list"),
    (["tft_set_dp_group_info", [0, []]], "must be a list of ranks"),
    # a fault before the first step cannot be repaired
    (["tft_report_error", [2]], "before training began"),
    (["tft_report_error", [8]], None),
    (["tft_report_error", [9]], "0 to 8"),
    # MindIO would wait forever in the second call, because the first one keeps a lock
    (["tft_report_error", [9]], "0 to 8"),
    # MindIO would ignore this call
    (["tft_end_updating_os", [1]], "tft_start_updating_os was not called before"),
    (["tft_start_updating_os"], None),
    (["tft_start_updating_os", [-1]], None),
    (["tft_end_updating_os", [1]], None),
    (["tft_end_updating_os", [1]], "tft_start_updating_os was not called before"),
    (["tft_start_updating_os"], None),
    (["tft_end_updating_os", [3]], "the step that is trained is 2"),
    (["tft_start_updating_os"], None),
    (["tft_end_updating_os", [3]], None),
    (["tft_pause_train", [2]], None),
    (["tft_start_copy_os"], None),
    (
        ["tft_set_optimizer_replica", [0, [ONE, ONE]]],
        "training has already begun with other groups",
    ),
    (["tft_set_optimizer_replica", [0, [ONE]]], None),
    (["tft_wait_next_action"], 0),
    (["tft_wait_repair_action"], 0),
    # only a replacement reports that it is ready, and only once
    (["tft_report_error", [6]], None),
    (["tft_report_error", [6]], "was reported a second time, but this rank already trains"),
    (["tft_destroy_processor"], None),
    (["tft_destroy_processor"], None),
    (["tft_start_updating_os"], "all ranks have trained to the end"),
    (["tft_end_updating_os", [3]], "all ranks have trained to the end"),
    (["tft_set_step_args", [1]], "all ranks have trained to the end"),
    (["tft_start_copy_os"], "all ranks have trained to the end"),
    (INIT, "a process takes part in one job"),
]
"""Calls in order, each with its result or with a part of its error message."""


def test_wrong_calls_are_refused_and_the_job_completes(tmp_path: Path) -> None:
    """When a process makes wrong, late or repeated calls, then each is refused with a reason; the
    right calls count, and the job completes."""
    calls = [called for called, _ in LIFE]
    with job(tmp_path / "job", world=1, program=CALLS, calls=calls) as running:
        outcome = running.end()
    results = json.loads((outcome.directory / "results-0.json").read_text())
    assert outcome.codes == [0], outcome.output
    for place, ((called, expected), result) in enumerate(zip(LIFE, results, strict=True)):
        told = f"call {place}, {called}: {result}"
        if isinstance(expected, str):
            assert result.get("raised") == "Refused", told
            assert expected in result["says"], told
        else:
            assert result == {"returned": expected}, told


@pytest.mark.soak
def test_a_process_that_exits_without_report_has_not_finished(tmp_path: Path) -> None:
    """When a process ends without a report that its training is complete, then the job ends and
    says so. MindIO makes that report for the process at any exit."""
    calls = [INIT, START, ["train", [5]]]
    with job(tmp_path / "job", world=1, program=CALLS, calls=calls) as running:
        outcome = running.end()
    assert outcome.codes == [4]
    assert "rank 0 left with code 0 before all ranks had finished" in came_of(outcome)


CONTROLLER: list[list[tuple[list[Any], str | int | None]]] = [
    [
        (["tft_query_high_availability_switch"], False),
        (["tft_notify_controller_dump"], 1),
        (["tft_notify_controller_stop_train", [{}]], 1),
        (["tft_notify_controller_stop_train", [{"0": 1}]], 1),
        (["tft_notify_controller_stop_train", [{}, "rest"]], 1),
        (["tft_notify_controller_on_global_rank", [{}, 0]], 1),
        (["tft_notify_controller_on_global_rank", [{}, 3601]], 1),
        (["tft_notify_controller_on_global_rank", [{}, "soon"]], 1),
        (["tft_notify_controller_prepare_action", ["cold switch"]], 1),
        (["tft_notify_controller_change_strategy", ["downgrade", ""]], 1),
        (["tft_notify_controller_change_strategy", ["retry"]], 1),
        (["tft_register_mindx_callback", ["report_weather", None]], 1),
        (["tft_register_mindx_callback", ["report_result", "no function"]], 1),
        # MindIO raises SystemExit here
        (
            ["tft_start_controller", ["127.0.0.1", "$port", False]],
            "call tft_init_controller first",
        ),
        (["tft_init_controller", [-2, 2, False]], "rank must be"),
        (["tft_init_controller", [2, 2, False]], "rank must be"),
        (["tft_init_controller", [0, 100_001, False]], "world_size must be"),
        (["tft_init_controller", [0, 2, None]], "enable_local_copy"),
        (["tft_init_controller", [0, 2, False], {"enable_arf": True}], None),
        (["tft_init_controller", [0, 2, False]], "already called"),
        (
            ["tft_start_controller", ["0.0.0.0", "$port", False]],
            "which other machines cannot reach",
        ),
        (["tft_start_controller", ["127.0.0.1", 1023, False]], "port must be"),
        (["tft_start_controller", ["127.0.0.1", "$port"]], "tlsCert"),
        (["tft_destroy_controller"], None),
    ],
    [(["tft_init_controller", [-1, 2, False]], None), (["tft_destroy_controller"], None)],
]


@pytest.mark.parametrize(
    "calls",
    [pytest.param(CONTROLLER[0], marks=pytest.mark.soak), *CONTROLLER[1:]],
    ids=["rank 0", "rank -1"],
)
def test_wrong_calls_of_the_controllers_functions_are_refused(
    calls: list[tuple[list[Any], str | int | None]], tmp_path: Path
) -> None:
    """When the controller's functions are called in a wrong order or with invalid arguments, then
    an `Exception` says so; MindIO raises a `SystemExit`, which few programs expect. Functions that
    pass on information return 1, as MindIO's do."""
    words = ["8000", "0", str(tmp_path), "0", json.dumps({"calls": [each for each, _ in calls]})]
    done = subprocess.run(
        [sys.executable, str(CALLS), *words], timeout=60, check=False, capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results-0.json").read_text())
    for (called, says), result in zip(calls, results, strict=True):
        if not isinstance(says, str):
            assert result == {"returned": says}, called
        else:
            assert result.get("raised") == "Refused", (called, result)
            assert says in result["says"], called


# ---------------------------------------------------------------- replica groups

FOUR = {"rank_list": [0, 1, 2, 3], "replica_cnt": 2, "replica_shift": 0}
GROUPS: list[tuple[Any, bool, str]] = [
    ("none", False, "a list of 1 to 1000"),
    ([], False, "a list of 1 to 1000"),
    ([FOUR] * 1001, False, "a list of 1 to 1000"),
    ([[0, 1]], False, "group 0 must be a dict"),
    ([{"rank_list": [0]}], False, "has no replica_cnt, replica_shift"),
    ([{**FOUR, "rank_list": "0123"}], False, "a list of ranks"),
    ([{**FOUR, "rank_list": [0, 1, 1]}], False, "more than once"),
    ([{**FOUR, "rank_list": [0, 4]}], False, "from 0 to 3"),
    ([{**FOUR, "rank_list": [0, "1"]}], False, "from 0 to 3"),
    ([{**FOUR, "rank_list": [1, 2]}], False, "rank 0 is not in"),
    ([{**FOUR, "replica_cnt": 0}], False, "from 1 to 4"),
    ([{**FOUR, "replica_cnt": 5}], False, "from 1 to 4"),
    # MindIO would mix up the parts of the copies
    ([{**FOUR, "replica_cnt": 3}], False, "cannot hold 3 whole copies"),
    ([{**FOUR, "replica_shift": -1}], False, "replica_shift"),
    ([{**FOUR, "replica_shift": 1}], False, "places apart"),
    ([FOUR], True, "with MindSpore"),
]


@pytest.mark.parametrize(("info", "mindspore", "says"), GROUPS)
def test_impossible_replica_groups_are_refused(info: Any, mindspore: bool, says: str) -> None:
    """When the given replica groups are impossible, then they are refused before any step is
    trained."""
    with pytest.raises(checks.Refused, match=says):
        replicas.read(0, 4, info, whole=mindspore)


@pytest.mark.soak
def test_ranks_with_contradicting_groups_do_not_train(tmp_path: Path) -> None:
    """When ranks report groups that do not fit together, then the job ends before its first step,
    and the message names the ranks and their groups. MindIO tries five times and raises an
    `Exception` without text, or fails at the first fault."""
    both = {"rank_list": [0, 1], "replica_cnt": 2, "replica_shift": 0}
    alone = {"rank_list": [1], "replica_cnt": 1, "replica_shift": 0}
    outcome = run(tmp_path, groups=[both, alone])
    assert outcome.codes == [4]
    assert "rank 0 has set 1 kinds of groups, rank 1 has set 2" in came_of(outcome)
    assert outcome.called("train") == []


@pytest.mark.soak
def test_groups_may_be_of_different_sizes(tmp_path: Path) -> None:
    """When groups have different sizes, then a rank is repaired from its own group; MindIO can only
    exit at the first fault."""
    pair = {"rank_list": [0, 1], "replica_cnt": 2, "replica_shift": 0}
    alone = {"rank_list": [2], "replica_cnt": 1, "replica_shift": 0}
    outcome = run(tmp_path, [1, 4, "loop", "kill"], world=3, groups=[pair, alone])
    assert outcome.codes == [0], outcome.output
    assert outcome.strategies == ["recover"]
    assert {(c["src"][0], c["dst"][0]) for _, c in outcome.called("repair")} == {(0, 1)}


# ---------------------------------------------------------------- functions that are missing, or fail


@pytest.mark.soak
def test_a_missing_repair_function_leads_to_a_last_checkpoint(tmp_path: Path) -> None:
    """When a rank needs state of another one and no repair function is registered, then a last
    checkpoint is saved, and the reason is reported. MindIO trains on without the state. The groups
    are rebuilt for each attempt."""
    outcome = run(tmp_path, [1, 4, "loop", "kill"], without=["repair"])
    assert outcome.codes == [3], outcome.output
    assert (
        "rank 1 needs the shard group0.0.0 from another rank, but the training script has "
        "registered no function that transfers state" in came_of(outcome)
    )
    assert [call["step"] for _, call in outcome.called("save")] == [3]
    survivors = [call["ranks"] for rank, call in outcome.called("rebuild") if rank == 0]
    assert len(survivors) > 1
    assert all(replaced == [1] for replaced in survivors)


@pytest.mark.soak
def test_a_missing_save_function_is_reported_at_the_end(tmp_path: Path) -> None:
    """When no save function is registered, then there is no last checkpoint, and that is reported,
    as with MindIO."""
    outcome = run(tmp_path, [1, 4, "loop", "ValueError"], without=["save_ckpt"])
    assert outcome.codes == [4], outcome.output
    assert "has registered no function that saves it" in came_of(outcome)


@pytest.mark.soak
def test_a_missing_rollback_function_ends_the_job(tmp_path: Path) -> None:
    """When the program has no function to learn the step of the rollback, then it does not train
    on. With MindIO it trains on, with whatever data comes next."""
    outcome = run(tmp_path, [1, 4, "loop", "UCE ERROR"], without=["rollback"])
    assert outcome.codes == [3], outcome.output
    assert "register a function with tft_register_rollback_handler" in came_of(outcome)


@pytest.mark.soak
def test_a_program_without_rollback_function_may_ask_for_its_step(tmp_path: Path) -> None:
    """When the program has no rollback function and asks for its step, as MindSpore does, then it
    trains on."""
    outcome = run(tmp_path, [1, 4, "loop", "UCE ERROR"], without=["rollback"], asks=True)
    assert outcome.codes == [0], outcome.output
    assert outcome.strategies == ["retry"]


@pytest.mark.soak
def test_a_loop_that_ends_by_itself_needs_no_stop_and_clean_functions(tmp_path: Path) -> None:
    """When no stop and clean functions are registered, then that is reported at the start. A loop
    that ends by itself is recovered nevertheless. MindIO gives up such a job."""
    outcome = run(tmp_path, [1, 4, "loop", "kill"], without=["stop", "clean"])
    assert outcome.codes == [0], outcome.output
    assert outcome.strategies == ["recover"]
    # one line each from the first processes of both ranks, and from the replacement
    assert outcome.output.count("event=function_missing name=stop") == 3


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "says", "code"),
    [
        ("stop", "the program's stop function has failed: OSError: stop of rank 0 cannot", 0),
        ("rollback", "rank 0 could not rollback: OSError: rollback of rank 0 cannot", 3),
    ],
    ids=["stop", "rollback"],
)
def test_an_error_of_a_registered_function_is_reported_with_its_rank(
    name: str, says: str, code: int, tmp_path: Path
) -> None:
    """When a function of the program raises, then the error is reported with the rank, and the
    remaining strategies are tried. With MindIO the error is in the log of that rank."""
    outcome = run(tmp_path, [1, 4, "loop", "HCCL OP RETRY FAILED"], raises={name: 0})
    assert outcome.codes == [code], outcome.output
    assert says in came_of(outcome)


@pytest.mark.soak
def test_a_rank_that_received_no_state_is_no_source(tmp_path: Path) -> None:
    """When the function of the only sender raises, then the receiver's own function is interrupted
    at once, and the receiver counts as a rank without state. As it receives the state in no
    attempt, it does not train on and saves no checkpoint."""
    outcome = run(tmp_path, [0, 4, "loop", "UCE ERROR"], world=3, raises={"repair": 1})
    assert outcome.codes == [3], outcome.output
    assert "OSError: repair of rank 1 cannot" in came_of(outcome)
    assert [(rank, call["step"]) for rank, call in outcome.called("save")] == [(1, 3)]
    assert {rank for rank, call in outcome.called("repair")} == {0, 1}
    assert not [call for rank, call in outcome.called("rollback")]


def test_a_rank_whose_clean_function_fails_gets_a_new_process(tmp_path: Path) -> None:
    """When the clean function returns 1, then the rank gets another process."""
    outcome = run(tmp_path, [1, 4, "loop", "HCCL OP RETRY FAILED"], clean={"1": 1})
    assert outcome.codes == [0], outcome.output
    assert outcome.strategies == ["recover"]
    assert "clean function that the training script has registered returned 1" in came_of(outcome)


# ---------------------------------------------------------------- steps and pauses


@pytest.mark.soak
def test_a_skipped_step_ends_the_job(tmp_path: Path) -> None:
    """When a program skips a step, then the job ends with a last checkpoint and says so. MindIO
    accepts the wrong step number, and later brings a rank to a step that was never trained."""
    outcome = run(tmp_path, skip=4)
    assert outcome.codes == [3], outcome.output
    assert "the step that is trained is 4; steps are counted one by one" in came_of(outcome)
    assert [call["step"] for _, call in outcome.called("save")] == [4]


@pytest.mark.soak
def test_a_program_without_pause_calls_can_be_paused(tmp_path: Path) -> None:
    """When the program never calls `tft_pause_train`, then a pause takes effect before the next
    update. MindIO waits 180 s and then reports a pause, although the program trains."""
    calls = [INIT, START, ["train", [10**9]]]
    with job(tmp_path / "job", world=1, program=CALLS, calls=calls) as running:
        while not (running.directory / "trains").exists():
            assert running.processes[0].poll() is None
        for word in ("pause", "resume"):
            asked = [sys.executable, "-m", "tft", word, "--run-dir", str(running.directory / "run")]
            done = subprocess.run(asked, timeout=60, check=False, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr + done.stdout
        running.processes[0].send_signal(signal.SIGTERM)
        assert running.end().codes == [128 + signal.SIGTERM]
