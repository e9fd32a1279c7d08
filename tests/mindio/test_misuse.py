"""
What a program for MindIO can do wrong. Where MindIO says what is wrong, so do we; where it ends the process, waits
for ever, lies, or goes on with what was not repaired, there is an error that says what is wrong. Each test
names what MindIO does.
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
"""[function, arguments, keyword arguments] each. Any: JSON."""


def run(directory: Path, *faults: list[Any], world: int = 2, **options: Any) -> Outcome:
    """
    A job with these faults.
    """
    with job(directory / "job", world=world, faults=list(faults), **options) as running:
        return running.end()


def came_of(outcome: Outcome) -> str:
    """
    Why the job has ended, with all that was tried in its last incident and why that could not be.
    """
    [*_, incident] = outcome.report["incidents"]
    found = [fault["evidence"] for fault in incident["faults"]]
    return " ".join([str(outcome.report["why"]), *found, *map(str, incident["tried"])])


# ---------------------------------------------------------------- in a process that has joined

INIT = ["tft_init_processor", [0, 1, False], {"enable_tls": False, "enable_arf": True}]
START = ["tft_start_processor", ["127.0.0.1", "$port"]]
ONE = {"rank_list": [0], "replica_cnt": 1, "replica_shift": 0}

LIFE: list[tuple[list[Any], Any]] = [
    (INIT, None),
    (INIT, "called before in this process"),  # MindIO ends the process
    (START, None),
    (START, "called before in this process"),
    (["tft_is_reboot_node"], False),
    (["tft_is_reboot_node"], False),
    (["tft_get_repair_step"], 0),
    (["tft_set_optimizer_replica", [1, [ONE]]], "rank is to be a number from 0 to 0"),
    (["tft_set_optimizer_replica", [0, [ONE]]], None),
    (["tft_set_dp_group_info", [0, [0]]], None),
    (["tft_set_dp_group_info", [0, [1]]], "a rank of dp_rank_list"),
    (["tft_set_dp_group_info", [0, []]], "to be a list of ranks"),
    # nothing can be repaired before there is something
    (["tft_report_error", [2]], "before training has begun"),
    (["tft_report_error", [8]], None),
    (["tft_report_error", [9]], "0 to 8"),
    (["tft_report_error", [9]], "0 to 8"),  # MindIO waits for ever: its lock is still taken
    (["tft_end_updating_os", [1]], "no tft_start_updating_os came before it"),  # MindIO ignores it
    (["tft_start_updating_os"], None),
    (["tft_start_updating_os", [-1]], None),
    (["tft_end_updating_os", [1]], None),
    (["tft_end_updating_os", [1]], "no tft_start_updating_os came before it"),
    (["tft_start_updating_os"], None),
    (["tft_end_updating_os", [3]], "the step that is trained is 2"),
    (["tft_start_updating_os"], None),
    (["tft_end_updating_os", [3]], None),
    (["tft_pause_train", [2]], None),
    (["tft_start_copy_os"], None),
    (
        ["tft_set_optimizer_replica", [0, [ONE, ONE]]],
        "training has begun with other groups",
    ),
    (["tft_set_optimizer_replica", [0, [ONE]]], None),
    (["tft_wait_next_action"], 0),
    (["tft_wait_repair_action"], 0),
    # only a replacement says that it is ready, once
    (["tft_report_error", [6]], None),
    (["tft_report_error", [6]], "was reported before, and this rank trains"),
    (["tft_destroy_processor"], None),
    (["tft_destroy_processor"], None),
    (["tft_start_updating_os"], "all ranks have trained to the end"),
    (["tft_end_updating_os", [3]], "all ranks have trained to the end"),
    (["tft_set_step_args", [1]], "all ranks have trained to the end"),
    (["tft_start_copy_os"], "all ranks have trained to the end"),
    (INIT, "a process takes part in one job"),
]
"""What is called, one after the other, and what it returns, or part of what it says."""


def test_a_life_in_which_much_is_wrong(tmp_path: Path) -> None:
    """
    When a process calls what it must not, or too late, or twice, it is told so; what was right counts, and
    the job completes.
    """
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


def test_who_leaves_without_a_word_has_not_finished(tmp_path: Path) -> None:
    """
    When a process ends and has not said that it has trained to the end, the job ends and says so; MindIO says it for
    the process at its exit, whatever that was for.
    """
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
        (
            ["tft_start_controller", ["127.0.0.1", "$port", False]],
            "tft_init_controller comes first",
        ),  # MindIO: SystemExit
        (["tft_init_controller", [-2, 2, False]], "rank is to be"),
        (["tft_init_controller", [2, 2, False]], "rank is to be"),
        (["tft_init_controller", [0, 100_001, False]], "world_size is to be"),
        (["tft_init_controller", [0, 2, None]], "enable_local_copy"),
        (["tft_init_controller", [0, 2, False], {"enable_arf": True}], None),
        (["tft_init_controller", [0, 2, False]], "called before"),
        (["tft_start_controller", ["0.0.0.0", "$port", False]], "no address others reach"),
        (["tft_start_controller", ["127.0.0.1", 1023, False]], "port is to be"),
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
def test_a_controller_that_cannot_be_is_refused(
    calls: list[tuple[list[Any], str | int | None]], tmp_path: Path
) -> None:
    """
    When the controller's functions are called in a wrong order or with what cannot be, an `Exception` says so; it
    is a `SystemExit` of MindIO, which few programs expect. Those that tell it something return 1, as MindIO's do.
    """
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


# ---------------------------------------------------------------- who holds copies

FOUR = {"rank_list": [0, 1, 2, 3], "replica_cnt": 2, "replica_shift": 0}
GROUPS: list[tuple[Any, bool, str]] = [
    ("none", False, "a list of 1 to 1000"),
    ([], False, "a list of 1 to 1000"),
    ([FOUR] * 1001, False, "a list of 1 to 1000"),
    ([[0, 1]], False, "group 0 is to be a dict"),
    ([{"rank_list": [0]}], False, "has no replica_cnt, replica_shift"),
    ([{**FOUR, "rank_list": "0123"}], False, "a list of ranks"),
    ([{**FOUR, "rank_list": [0, 1, 1]}], False, "more than once"),
    ([{**FOUR, "rank_list": [0, 4]}], False, "from 0 to 3"),
    ([{**FOUR, "rank_list": [0, "1"]}], False, "from 0 to 3"),
    ([{**FOUR, "rank_list": [1, 2]}], False, "rank 0 is not in"),
    ([{**FOUR, "replica_cnt": 0}], False, "from 1 to 4"),
    ([{**FOUR, "replica_cnt": 5}], False, "from 1 to 4"),
    (
        [{**FOUR, "replica_cnt": 3}],
        False,
        "cannot hold 3 whole copies",
    ),  # MindIO mixes up the parts
    ([{**FOUR, "replica_shift": -1}], False, "replica_shift"),
    ([{**FOUR, "replica_shift": 1}], False, "places apart"),
    ([FOUR], True, "with MindSpore"),
]


@pytest.mark.parametrize(("info", "mindspore", "says"), GROUPS)
def test_groups_that_cannot_be_are_refused(info: Any, mindspore: bool, says: str) -> None:
    """
    When what is told of the copies cannot be, it is refused before anything is trained.
    """
    with pytest.raises(checks.Refused, match=says):
        replicas.read(0, 4, info, whole=mindspore)


@pytest.mark.soak
def test_ranks_that_contradict_each_other_do_not_train(tmp_path: Path) -> None:
    """
    When ranks tell of groups that do not fit together, the job ends before its first step and says who said
    what; MindIO tries five times and raises an `Exception` without a word, or notices at the first fault.
    """
    both = {"rank_list": [0, 1], "replica_cnt": 2, "replica_shift": 0}
    alone = {"rank_list": [1], "replica_cnt": 1, "replica_shift": 0}
    outcome = run(tmp_path, groups=[both, alone])
    assert outcome.codes == [4]
    assert "rank 0 has told of 1 kinds of groups, rank 1 of 2" in came_of(outcome)
    assert outcome.called("train") == []


def test_groups_may_be_of_different_sizes(tmp_path: Path) -> None:
    """
    When groups have different sizes, a rank is repaired from its own; at the first fault MindIO can only exit.
    """
    pair = {"rank_list": [0, 1], "replica_cnt": 2, "replica_shift": 0}
    alone = {"rank_list": [2], "replica_cnt": 1, "replica_shift": 0}
    outcome = run(tmp_path, [1, 4, "loop", "kill"], world=3, groups=[pair, alone])
    assert outcome.codes == [0], outcome.output
    assert outcome.strategies == ["recover"]
    assert {(c["src"][0], c["dst"][0]) for _, c in outcome.called("repair")} == {(0, 1)}


# ---------------------------------------------------------------- functions that are missing, or fail


def test_a_missing_repair_is_noticed_when_it_is_needed(tmp_path: Path) -> None:
    """
    When a rank needs the state of another and there is no function for that, a last checkpoint is saved, and
    the reason is said; MindIO goes on without the state. The groups are formed anew for each attempt.
    """
    outcome = run(tmp_path, [1, 4, "loop", "kill"], without=["repair"])
    assert outcome.codes == [3], outcome.output
    assert "has registered no repair function, and rank 1 needs group0.0.0" in came_of(outcome)
    assert [call["step"] for _, call in outcome.called("save")] == [3]
    survivors = [call["ranks"] for rank, call in outcome.called("rebuild") if rank == 0]
    assert len(survivors) > 1
    assert all(replaced == [1] for replaced in survivors)


@pytest.mark.soak
def test_a_missing_save_is_noticed_when_it_is_needed(tmp_path: Path) -> None:
    """
    When there is no function that saves, there is no last checkpoint, which is said, as with MindIO.
    """
    outcome = run(tmp_path, [1, 4, "loop", "ValueError"], without=["save_ckpt"])
    assert outcome.codes == [4], outcome.output
    assert "has registered no function that saves" in came_of(outcome)


@pytest.mark.soak
def test_a_missing_rollback_is_noticed_when_training_goes_on(tmp_path: Path) -> None:
    """
    When nothing has told the program which step it was brought to, it does not go on; with MindIO it does, with
    whatever data come next.
    """
    outcome = run(tmp_path, [1, 4, "loop", "UCE ERROR"], without=["rollback"])
    assert outcome.codes == [3], outcome.output
    assert "register a function with tft_register_rollback_handler" in came_of(outcome)


def test_a_program_may_ask_which_step_it_is_at(tmp_path: Path) -> None:
    """
    When the program has no function for that and asks, as MindSpore does, it goes on.
    """
    outcome = run(tmp_path, [1, 4, "loop", "UCE ERROR"], without=["rollback"], asks=True)
    assert outcome.codes == [0], outcome.output
    assert outcome.strategies == ["retry"]


def test_who_leaves_by_itself_needs_no_stop_and_no_clean(tmp_path: Path) -> None:
    """
    When there are no functions to stop and to clean, that is said at the start; a loop that ends by itself
    goes on all the same, where MindIO gives the job up.
    """
    outcome = run(tmp_path, [1, 4, "loop", "kill"], without=["stop", "clean"])
    assert outcome.codes == [0], outcome.output
    assert outcome.strategies == ["recover"]
    assert outcome.output.count("event=function_missing name=stop") == 3  # the replacement, too


@pytest.mark.parametrize(
    ("name", "says", "code"),
    [
        ("stop", "the program's stop function has failed: OSError: stop of rank 0 cannot", 0),
        pytest.param(
            "rollback",
            "rank 0 could not rollback: OSError: rollback of rank 0 cannot",
            3,
            marks=pytest.mark.soak,
        ),
    ],
    ids=["stop", "rollback"],
)
def test_a_function_that_raises_is_told_of(name: str, says: str, code: int, tmp_path: Path) -> None:
    """
    When a function of the program raises, what it raised is said with the rank, and what is left is tried;
    with MindIO it is in the log of that rank.
    """
    outcome = run(tmp_path, [1, 4, "loop", "HCCL OP RETRY FAILED"], raises={name: 0})
    assert outcome.codes == [code], outcome.output
    assert says in came_of(outcome)


def test_who_has_received_nothing_is_no_copy(tmp_path: Path) -> None:
    """
    When the function of the only sender raises, the receiver is brought out of its own at once, and counts as what
    it is: a rank without the state. It receives it in no attempt, does not train on, and saves nothing.
    """
    outcome = run(tmp_path, [0, 4, "loop", "UCE ERROR"], world=3, raises={"repair": 1})
    assert outcome.codes == [3], outcome.output
    assert "OSError: repair of rank 1 cannot" in came_of(outcome)
    assert [(rank, call["step"]) for rank, call in outcome.called("save")] == [(1, 3)]
    assert {rank for rank, call in outcome.called("repair")} == {0, 1}
    assert not [call for rank, call in outcome.called("rollback")]


def test_a_rank_that_could_not_be_cleaned_is_not_gone_on_with(tmp_path: Path) -> None:
    """
    When the function to clean says 1, the rank gets another process.
    """
    outcome = run(tmp_path, [1, 4, "loop", "HCCL OP RETRY FAILED"], clean={"1": 1})
    assert outcome.codes == [0], outcome.output
    assert outcome.strategies == ["recover"]
    assert "clean function says 1: it could not clean" in came_of(outcome)


# ---------------------------------------------------------------- steps


@pytest.mark.soak
def test_a_step_that_is_left_out_is_noticed(tmp_path: Path) -> None:
    """
    When a step is left out, the job ends with a last checkpoint and says so; MindIO takes the number as it is, and
    brings a rank to a step that was never trained.
    """
    outcome = run(tmp_path, skip=4)
    assert outcome.codes == [3], outcome.output
    assert "the step that is trained is 4; steps are counted one by one" in came_of(outcome)
    assert [call["step"] for _, call in outcome.called("save")] == [4]


@pytest.mark.soak
def test_a_program_that_never_pauses_can_be_paused(tmp_path: Path) -> None:
    """
    When nobody calls `tft_pause_train`, a pause stands before the next update; MindIO waits 180 s and says that it
    has paused.
    """
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
