"""
The decorator of a training function: what the texts of errors stand for, and what becomes of each.
"""

import signal
from pathlib import Path
from typing import Any

import pytest
from mindio_ttp.classification import OTHER, REPAIRABLE, UNREPAIRABLE, Patterns
from mindio_ttp.constants import ReportState

from tests.mindio.jobs import Outcome, job

S = ReportState

SOAK = pytest.mark.soak


def patterns(*, can_repair: bool = True) -> Patterns:
    """
    What is looked for, where lost memory can be had from others, or cannot.
    """
    return Patterns(can_repair=lambda time: can_repair and time == 1234)


@pytest.mark.parametrize(
    ("text", "name", "state", "without_repairs"),
    [
        ("a UCE ERROR in it", "UCE ERROR", S.RS_UCE, OTHER),
        ("HBM MULTI BIT ECC, time us= 1234.", REPAIRABLE, S.RS_UCE, OTHER),
        ("HBM MULTI BIT ECC, time us=1234", REPAIRABLE, S.RS_UCE, OTHER),
        ("HBM MULTI BIT ECC, time us=1235", UNREPAIRABLE, S.RS_UCE_CORRUPTED, OTHER),
        ("HBM MULTI BIT ECC, at some time", UNREPAIRABLE, S.RS_UCE_CORRUPTED, OTHER),
        ("FORCE STOP", "FORCE STOP", S.RS_NORMAL, "FORCE STOP"),
        ("ARF FINISH", "ARF FINISH", S.RS_PREREPAIR_FINISH, "ARF FINISH"),
        ("STEP FINISH", "STEP FINISH", S.RS_STEP_FINISH, "STEP FINISH"),
        ("HCCL OP RETRY FAILED", "HCCL OP RETRY FAILED", S.RS_HCCL_FAILED, OTHER),
        ("SUSPECT REMOTE ERROR", "SUSPECT REMOTE ERROR", S.RS_HCCL_FAILED, OTHER),
        ("UB LINK ERROR", "UB LINK ERROR", S.RS_HCCL_FAILED, OTHER),
        ("HCCS LINK ERROR", "HCCS LINK ERROR", S.RS_HCCL_FAILED, OTHER),
        ("uce error", OTHER, S.RS_UNKNOWN, OTHER),
        ("UCEERROR", OTHER, S.RS_UNKNOWN, OTHER),
        ("", OTHER, S.RS_UNKNOWN, OTHER),
        # the first in the order of the table, not in that of the text
        ("STEP FINISH after FORCE STOP", "FORCE STOP", S.RS_NORMAL, "FORCE STOP"),
        ("HCCS LINK ERROR: UCE ERROR", "UCE ERROR", S.RS_UCE, OTHER),
        ("FORCE STOP after UCE ERROR", "UCE ERROR", S.RS_UCE, OTHER),
    ],
)
def test_a_text_stands_for_a_state(
    text: str, name: str, state: ReportState, without_repairs: str
) -> None:
    """
    When the text of an error has a pattern in it, the first one says what it is; what devices have lost is unknown
    where devices are not to be repaired.
    """
    found = patterns().classify(RuntimeError(text), repairs=True)
    assert (found.name, found.state) == (name, state)
    found = patterns().classify(RuntimeError(text), repairs=False)
    assert found.name == without_repairs
    assert found.state is (S.RS_UNKNOWN if without_repairs == OTHER else state)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("UCE ERROR, device error type 507054", "507054"),
        ("UCE ERROR, Device Error Type  0a1B,", "0a1B"),
        ("UCE ERROR, device error type 0123456789abcdef0", "0123456789abcde"),
        ("UCE ERROR, device error type xyz", ""),
        ("UCE ERROR, device error types 1", ""),
        ("UCE ERROR", ""),
        ("anything, device error type 7", "7"),
    ],
)
def test_the_code_of_a_device_is_found(text: str, code: str) -> None:
    """
    When the text has the code of a device in it, it is told with the error, of at most 15 characters.
    """
    assert patterns().classify(RuntimeError(text), repairs=True).code == code


def test_users_patterns_come_last() -> None:
    """
    When a user has patterns, they are looked for after those that are there, in their order.
    """
    mine = patterns()
    mine.add("PRECISION ERROR", S.RS_RETRY, lambda _: "PRECISION ERROR")
    mine.add("ERROR", S.RS_UNKNOWN, lambda _: "ERROR")
    for text, state in (
        ("a PRECISION ERROR", S.RS_RETRY),
        ("any ERROR", S.RS_UNKNOWN),
        ("a PRECISION ERROR or UCE ERROR", S.RS_UCE),
    ):
        assert mine.classify(RuntimeError(text), repairs=True).state is state
    assert mine.classify(RuntimeError("a PRECISION ERROR"), repairs=False).state is S.RS_RETRY


@pytest.mark.parametrize("says", ["UCE ERROR", UNREPAIRABLE, "MINE"])
def test_a_users_function_may_say_any_name(says: str) -> None:
    """
    When a user's function says a name that is known, that counts.
    """
    mine = patterns()
    mine.add("MINE", S.RS_RETRY, lambda text: says if text == "MINE at 7" else "no")
    assert mine.classify(RuntimeError("MINE at 7"), repairs=True).name == says


@pytest.mark.parametrize("says", ["NONSENSE", "", None, 7])
def test_a_users_function_that_says_nonsense_is_named(says: Any) -> None:
    """
    When a user's function says no name that is known, it is a `KeyError` as with MindIO, one that says what was
    expected.
    """
    mine = patterns()
    mine.add("MINE", S.RS_RETRY, lambda _: says)
    with pytest.raises(
        KeyError, match=r"the handler of 'MINE' says .*; it must say one of ARF FINISH"
    ):
        mine.classify(RuntimeError("MINE"), repairs=True)


# ---------------------------------------------------------------- in jobs


def run(directory: Path, *faults: list[Any], **options: Any) -> Outcome:
    """
    A job of two ranks with these faults.
    """
    with job(directory / "job", world=2, faults=list(faults), **options) as running:
        return running.end()


def faults_of(outcome: Outcome) -> list[tuple[str, str]]:
    """
    Kind and evidence of each fault of the only incident.
    """
    [incident] = outcome.report["incidents"]
    return [(str(each["kind"]), str(each["evidence"])) for each in incident["faults"]]


@pytest.mark.parametrize(
    ("text", "kind", "options"),
    [
        pytest.param("ValueError of a bug", "ValueError: ValueError of a bug", {}, marks=SOAK),
        pytest.param(
            "nobody knows this", "RuntimeError: nobody knows this", {}, marks=pytest.mark.soak
        ),
        pytest.param("UCE ERROR", "RuntimeError: UCE ERROR", {"uce": False}, marks=SOAK),
        (
            "MINE",
            "the handler of 'MINE' says 'NONSENSE'",
            {"pattern": ["MINE", "RS_RETRY", "NONSENSE"]},
        ),
    ],
    ids=["another exception", "unknown", "devices are not repaired", "nonsense"],
)
def test_what_is_unknown_ends_with_a_last_checkpoint(
    text: str, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """
    When nobody knows what an error means, the state is saved, the error is said, and its traceback is in the output
    of its rank; MindIO waits 180 s to be ended, and the error is in the log of that rank.
    """
    outcome = run(tmp_path, [1, 4, "loop", text], **options)
    assert outcome.codes == [3], outcome.output
    [(found, evidence)] = faults_of(outcome)
    assert (found, kind in evidence) == ("software", True)
    assert [call["step"] for _, call in outcome.called("save")] == [3]
    assert (
        "event=loop_left state=RS_UNKNOWN" in outcome.output or "not_classified" in outcome.output
    )
    assert ", in train\n" in outcome.output


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        ("KeyboardInterrupt", f"was ended by signal {signal.SIGINT.value}"),
        pytest.param("SystemExit", "left with code 1", marks=SOAK),
    ],
)
def test_what_is_no_error_ends_the_process(text: str, evidence: str, tmp_path: Path) -> None:
    """
    When the function is left by something that is no `Exception`, it is left to go on, and the process is replaced.
    """
    outcome = run(tmp_path, [1, 4, "loop", text])
    assert outcome.codes == [0], outcome.output
    assert outcome.strategies == ["recover"]
    assert faults_of(outcome) == [("process", evidence)]


@pytest.mark.soak
def test_a_users_pattern_is_handled_as_what_it_is(tmp_path: Path) -> None:
    """
    When a user's pattern stands for a lost memory, the rank is repaired; the code of its device is in the report.
    """
    outcome = run(
        tmp_path,
        [1, 4, "loop", "MINE, device error type 507054"],
        pattern=["MINE", "RS_UCE", "MINE"],
    )
    assert outcome.codes == [0], outcome.output
    assert outcome.strategies == ["retry"]
    [(kind, evidence)] = faults_of(outcome)
    assert kind == "memory"
    assert "device error 507054: RuntimeError: MINE, device error type 507054" in evidence
    assert outcome.ranks_called("repair") == [0, 1]


def test_what_a_function_puts_into_the_list_of_arguments_is_trained_with(tmp_path: Path) -> None:
    """
    When a function replaces an entry of the list that it is handed, the training function is called again with
    the new entry: MindSpeed-LLM replaces its scheduler so, after it has loaded a checkpoint.
    """
    outcome = run(tmp_path, [1, 4, "loop", "UCE ERROR"], swaps=True)
    assert outcome.codes == [0], outcome.output
    trained = [(rank, call["step"], call["first"]) for rank, call in outcome.called("train")]
    assert trained == [(0, 0, 0), (0, 3, 3), (1, 0, 0), (1, 3, 3)]


@pytest.mark.parametrize("text", [pytest.param("UCE ERROR", marks=pytest.mark.soak), "kill"])
def test_every_function_finds_the_process_s_device(text: str, tmp_path: Path) -> None:
    """
    When a function is called on whatever thread, the current device there is the one of the process, also where
    its rank is not 0: a survivor would stop device 0 else.
    """
    outcome = run(tmp_path, [0, 4, "loop", text], device=True)
    assert outcome.codes == [0], outcome.output
    for what in ("stop", "repair", "rollback", "train"):
        called = outcome.called(what)
        assert called, what
        assert [call["device"] for rank, call in called] == [rank for rank, _ in called], what


def test_who_returns_first_waits_for_the_others(tmp_path: Path) -> None:
    """
    When one rank has trained all it was to, its function returns when the others have, too.
    """
    outcome = run(tmp_path, early={"0": 3, "1": 6})
    assert outcome.codes == [0], outcome.output
    assert outcome.ranks_called("returned") == [0, 1]


@pytest.mark.soak
def test_who_has_returned_is_called_again_for_the_others(tmp_path: Path) -> None:
    """
    When another rank is lost after one has returned, this one takes part in the repair: its function is called again.
    """
    outcome = run(tmp_path, [1, 5, "loop", "kill"], early={"0": 3, "1": 6})
    assert outcome.codes == [0], outcome.output
    assert outcome.ranks_called("train").count(0) == 2
    assert [call["step"] for _, call in outcome.called("rollback")] == [3, 3]


def test_a_replacement_that_fails_before_it_is_ready_ends_by_its_error(tmp_path: Path) -> None:
    """
    When a replacement has an error before it says that it is ready, the error ends its process: nothing of it could
    be repaired. What ends so is not begun again; the others save a last checkpoint.
    """
    outcome = run(tmp_path, [1, 4, "loop", "kill"], [1, 1, "replaced", "UCE ERROR"])
    assert outcome.codes == [3], outcome.output
    assert "rank 1 left with code 1 before it took any order: its log says why" in outcome.output
    assert "RuntimeError: UCE ERROR" in outcome.output
    assert [rank for rank, _ in outcome.called("save")] == [0]


@SOAK
def test_a_replacement_that_is_ready_again_and_again_is_told_so(tmp_path: Path) -> None:
    """
    When a program says ARF FINISH whenever it is called in a replacement, it would never train: its process ends with
    a sentence, and after some of those the job does, with a last checkpoint.
    """
    outcome = run(tmp_path, [1, 4, "loop", "kill"], ready="always")
    assert outcome.codes == [3], outcome.output
    assert "RS_PREREPAIR_FINISH was reported before, and this rank trains" in outcome.output


@pytest.mark.parametrize("asked", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_last_checkpoint_begins_with_stop_and_clean_where_that_is_asked_for(
    asked: bool, tmp_path: Path
) -> None:
    """
    When TTP_STOP_CLEAN_BEFORE_DUMP is 1, whoever saves has stopped and cleaned before.
    """
    outcome = run(
        tmp_path, [1, 4, "loop", "ValueError"],
        environment={"TTP_STOP_CLEAN_BEFORE_DUMP": str(int(asked))},
    )  # fmt: skip
    assert outcome.codes == [3], outcome.output
    called = [
        call["what"] for call in outcome.calls(0) if call["what"] in ("stop", "clean", "save")
    ]
    assert called == (["stop", "clean", "save"] if asked else ["stop", "save"])


# ---------------------------------------------------------------- without it


@pytest.mark.soak
@pytest.mark.parametrize("text", [pytest.param("UCE ERROR", marks=SOAK), "kill"])
def test_a_program_may_have_a_loop_of_its_own(text: str, tmp_path: Path) -> None:
    """
    When a program reports its errors itself and waits once or twice, as MindSpore does, it is brought back as any
    other.
    """
    outcome = run(
        tmp_path, [1, 4, "loop", text], loop=True, asks=True, without=["rollback"],
        environment={"MINDIO_FOR_MINDSPORE": "1"},
    )  # fmt: skip
    assert outcome.codes == [0], outcome.output
    assert outcome.strategies == ["recover" if text == "kill" else "retry"]
    assert outcome.ranks_called("returned") == [0, 1]
    assert len(outcome.finals()) == 1
    assert outcome.called("exit") == []


def test_who_has_left_a_loop_of_its_own_takes_part_in_a_repair(tmp_path: Path) -> None:
    """
    When another rank is lost after this one has left its loop, it gives its state, and waits once more.
    """
    outcome = run(tmp_path, [1, 5, "loop", "kill"], loop=True, early={"0": 3, "1": 6})
    assert outcome.codes == [0], outcome.output
    assert outcome.ranks_called("returned") == [0, 1]


@pytest.mark.parametrize(("mindspore", "ranks"), [("1", [0, 1]), pytest.param("0", [], marks=SOAK)])
def test_the_exit_function_is_mindspores(mindspore: str, ranks: list[int], tmp_path: Path) -> None:
    """
    When a job of MindSpore is over before its time, the program's function for that is called in every rank.
    """
    outcome = run(
        tmp_path, [1, 4, "loop", "ValueError"], environment={"MINDIO_FOR_MINDSPORE": mindspore}
    )
    assert outcome.codes == [3], outcome.output
    assert outcome.ranks_called("exit") == ranks
