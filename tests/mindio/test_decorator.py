"""The decorator of a training function: how it classifies errors by their text, and how each class
is handled."""

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
    Return the error patterns. `can_repair`: whether other ranks can replace lost memory.
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
        # the order of the words in the table decides, not their order in the text
        ("STEP FINISH after FORCE STOP", "FORCE STOP", S.RS_NORMAL, "FORCE STOP"),
        ("HCCS LINK ERROR: UCE ERROR", "UCE ERROR", S.RS_UCE, OTHER),
        ("FORCE STOP after UCE ERROR", "UCE ERROR", S.RS_UCE, OTHER),
    ],
)
def test_the_first_pattern_in_an_errors_text_gives_its_state(
    text: str, name: str, state: ReportState, without_repairs: str
) -> None:
    """When the text of an error contains known patterns, then the first one gives the state. Lost
    device memory is unknown where device repair is off."""
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
def test_the_device_code_in_an_errors_text_is_reported(text: str, code: str) -> None:
    """When the text contains a device code, then it is reported with the error, cut to 15
    characters."""
    assert patterns().classify(RuntimeError(text), repairs=True).code == code


def test_user_patterns_are_tried_after_the_built_in_ones() -> None:
    """When a user has registered patterns, then they are tried after the built-in ones, in their
    order."""
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
def test_a_user_function_may_return_any_known_state_name(says: str) -> None:
    """When a user's function returns the name of a known state, then the error has that state."""
    mine = patterns()
    mine.add("MINE", S.RS_RETRY, lambda text: says if text == "MINE at 7" else "no")
    assert mine.classify(RuntimeError("MINE at 7"), repairs=True).name == says


@pytest.mark.parametrize("says", ["NONSENSE", "", None, 7])
def test_an_unknown_state_name_of_a_user_function_raises_key_error(says: Any) -> None:
    """When a user's function returns an unknown name, then a `KeyError` is raised as by MindIO, and
    its text says what was expected."""
    mine = patterns()
    mine.add("MINE", S.RS_RETRY, lambda _: says)
    with pytest.raises(
        KeyError,
        match=r"the handler of 'MINE' has returned .*; the name of a fault type is expected, one of ARF",
    ):
        mine.classify(RuntimeError("MINE"), repairs=True)


# ---------------------------------------------------------------- the decorator in jobs


def run(directory: Path, *faults: list[Any], **options: Any) -> Outcome:
    """
    Run a job of two ranks with these faults and return its outcome.
    """
    with job(directory / "job", world=2, faults=list(faults), **options) as running:
        return running.end()


def faults_of(outcome: Outcome) -> list[tuple[str, str]]:
    """
    Return the kind and evidence of each fault of the only incident.
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
            "the handler of 'MINE' has returned 'NONSENSE'",
            {"pattern": ["MINE", "RS_RETRY", "NONSENSE"]},
        ),
    ],
    ids=["another exception", "unknown", "devices are not repaired", "nonsense"],
)
def test_an_unknown_error_ends_the_job_with_a_last_checkpoint(
    text: str, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """When an error matches no pattern, then a last checkpoint is saved, the error is reported, and
    its traceback is in the output of its rank. MindIO, in contrast, waits 180 s to be ended and
    writes the error only to the log of that rank."""
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
def test_a_raised_base_exception_ends_the_process(text: str, evidence: str, tmp_path: Path) -> None:
    """When the function raises a `BaseException` that is no `Exception`, then the decorator passes
    it on, and the process is replaced."""
    outcome = run(tmp_path, [1, 4, "loop", text])
    assert outcome.codes == [0], outcome.output
    assert outcome.strategies == ["recover"]
    assert faults_of(outcome) == [("process", evidence)]


@pytest.mark.soak
def test_a_user_pattern_for_lost_memory_starts_a_repair(tmp_path: Path) -> None:
    """When a user's pattern stands for lost memory, then the rank is repaired, and the device code
    is in the report."""
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


@pytest.mark.soak
def test_training_uses_an_argument_that_a_function_has_replaced(tmp_path: Path) -> None:
    """When a function replaces an entry of the list of arguments, then the training function is
    called again with the new entry. MindSpeed-LLM replaces its scheduler in this way after it has
    loaded a checkpoint."""
    outcome = run(tmp_path, [1, 4, "loop", "UCE ERROR"], swaps=True)
    assert outcome.codes == [0], outcome.output
    trained = [(rank, call["step"], call["first"]) for rank, call in outcome.called("train")]
    assert trained == [(0, 0, 0), (0, 3, 3), (1, 0, 0), (1, 3, 3)]


@pytest.mark.soak
@pytest.mark.parametrize("text", [pytest.param("UCE ERROR", marks=pytest.mark.soak), "kill"])
def test_every_function_runs_with_the_current_device_of_its_process(
    text: str, tmp_path: Path
) -> None:
    """When a function is called on any thread, then the current device is that of the process, also
    on other ranks than 0. Otherwise a survivor would stop device 0 instead of its own device."""
    outcome = run(tmp_path, [0, 4, "loop", text], device=True)
    assert outcome.codes == [0], outcome.output
    for what in ("stop", "repair", "rollback", "train"):
        called = outcome.called(what)
        assert called, what
        assert [call["device"] for rank, call in called] == [rank for rank, _ in called], what


@pytest.mark.soak
def test_the_first_rank_to_return_waits_for_the_others(tmp_path: Path) -> None:
    """When one rank has completed its training, then its function returns only when those of the
    other ranks have, too."""
    outcome = run(tmp_path, early={"0": 3, "1": 6})
    assert outcome.codes == [0], outcome.output
    assert outcome.ranks_called("returned") == [0, 1]


@pytest.mark.soak
def test_a_rank_that_has_returned_is_called_again_for_a_repair(tmp_path: Path) -> None:
    """When a rank is lost after another one has returned, then the function of the returned rank is
    called again, and it takes part in the repair."""
    outcome = run(tmp_path, [1, 5, "loop", "kill"], early={"0": 3, "1": 6})
    assert outcome.codes == [0], outcome.output
    assert outcome.ranks_called("train").count(0) == 2
    assert [call["step"] for _, call in outcome.called("rollback")] == [3, 3]


@pytest.mark.soak
def test_a_replacement_that_fails_before_it_is_ready_ends_the_job(tmp_path: Path) -> None:
    """When a replacement raises an error before it is ready, then the error ends its process, which
    has no state to repair. The rank is not started again, and the others save a last checkpoint."""
    outcome = run(tmp_path, [1, 4, "loop", "kill"], [1, 1, "replaced", "UCE ERROR"])
    assert outcome.codes == [3], outcome.output
    assert (
        "rank 1 left with code 1 before it called session.run: its log says why" in outcome.output
    )
    assert "RuntimeError: UCE ERROR" in outcome.output
    assert [rank for rank, _ in outcome.called("save")] == [0]


@SOAK
def test_a_replacement_that_repeats_arf_finish_ends_with_a_message(tmp_path: Path) -> None:
    """When a program raises ARF FINISH in every call of a replacement, then it never trains: its
    process ends with a message, and after several of them the job ends with a last checkpoint."""
    outcome = run(tmp_path, [1, 4, "loop", "kill"], ready="always")
    assert outcome.codes == [3], outcome.output
    assert (
        "RS_PREREPAIR_FINISH was reported a second time, but this rank already trains"
        in outcome.output
    )


@pytest.mark.soak
@pytest.mark.parametrize("asked", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_savers_stop_and_clean_first_when_the_variable_asks_for_that(
    asked: bool, tmp_path: Path
) -> None:
    """When TTP_STOP_CLEAN_BEFORE_DUMP is 1, then every saver has stopped and cleaned before it
    saves."""
    outcome = run(
        tmp_path, [1, 4, "loop", "ValueError"],
        environment={"TTP_STOP_CLEAN_BEFORE_DUMP": str(int(asked))},
    )  # fmt: skip
    assert outcome.codes == [3], outcome.output
    called = [
        call["what"] for call in outcome.calls(0) if call["what"] in ("stop", "clean", "save")
    ]
    assert called == (["stop", "clean", "save"] if asked else ["stop", "save"])


# ---------------------------------------------------------------- programs without the decorator


@pytest.mark.soak
@pytest.mark.parametrize("text", [pytest.param("UCE ERROR", marks=SOAK), "kill"])
def test_a_program_with_its_own_loop_is_recovered(text: str, tmp_path: Path) -> None:
    """When a program reports its errors itself and waits once or twice, as MindSpore does, then it
    is recovered like any other program."""
    outcome = run(
        tmp_path, [1, 4, "loop", text], loop=True, asks=True, without=["rollback"],
        environment={"MINDIO_FOR_MINDSPORE": "1"},
    )  # fmt: skip
    assert outcome.codes == [0], outcome.output
    assert outcome.strategies == ["recover" if text == "kill" else "retry"]
    assert outcome.ranks_called("returned") == [0, 1]
    assert len(outcome.finals()) == 1
    assert outcome.called("exit") == []


@pytest.mark.soak
def test_a_rank_that_has_left_its_own_loop_takes_part_in_a_repair(tmp_path: Path) -> None:
    """When a rank is lost after another one has left its own loop, then the latter sends its state
    and waits once more."""
    outcome = run(tmp_path, [1, 5, "loop", "kill"], loop=True, early={"0": 3, "1": 6})
    assert outcome.codes == [0], outcome.output
    assert outcome.ranks_called("returned") == [0, 1]


@pytest.mark.soak
@pytest.mark.parametrize(("mindspore", "ranks"), [("1", [0, 1]), pytest.param("0", [], marks=SOAK)])
def test_mindspores_exit_function_is_called_on_every_rank_at_an_early_end(
    mindspore: str, ranks: list[int], tmp_path: Path
) -> None:
    """When a MindSpore job ends early, then the program's exit function is called on every rank."""
    outcome = run(
        tmp_path, [1, 4, "loop", "ValueError"], environment={"MINDIO_FOR_MINDSPORE": mindspore}
    )
    assert outcome.codes == [3], outcome.output
    assert outcome.ranks_called("exit") == ranks
