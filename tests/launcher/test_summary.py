"""
The lines at the end of a run.
"""

from pathlib import Path
from typing import Any

from tft.launcher.summary import asked_to_end, reasons, remaining, summary, to_go_on

RUN_DIR = Path("/runs/a")


def incident(**differences: Any) -> dict[str, Any]:  # Any: JSON
    """
    Return one incident of a report.
    """
    fault = {"kind": "process", "rank": 2, "step": 10, "at": 0.0, "evidence": "ended by signal 9"}
    return {
        "id": 1, "faults": [fault], "strategy": "recover", "tried": [], "step": 11,
        "steps_lost": 0, "seconds": {"total": 0.514}, **differences,
    }  # fmt: skip


def software(rank: int, evidence: str) -> dict[str, Any]:  # Any: JSON
    """
    Return the fault of a rank whose script has raised an exception in step 8.
    """
    return {"kind": "software", "rank": rank, "step": 8, "at": 0.0, "evidence": evidence}


def test_line_about_a_signal_says_what_follows_in_the_state_of_the_job() -> None:
    """When a signal asks for the end while ranks train, then the line promises a last checkpoint.
    When all steps are done, then it says how long the scripts have to end."""
    kills = "; a second signal kills it"
    assert asked_to_end("", placed=False) == f"the job ends after a last checkpoint{kills}"
    assert asked_to_end("healthy", placed=True) == "the job is to end after a last checkpoint"
    over = "the job is over, and scripts that still run after 60 s are ended"
    assert asked_to_end("exiting", placed=False) == f"{over}{kills}"
    assert asked_to_end("exiting", placed=True) == over


def test_summary_has_steps_incidents_and_what_they_cost() -> None:
    """When a job is over, then two lines say how far it came, what incidents have cost, and which
    command writes the page about it."""
    page = "`tft report /runs/a` writes a page about the job from its records"
    assert summary(60, [], 8.12, RUN_DIR) == ["60 steps in 8.12 s; no incident", page]
    told, _ = summary(60, [incident()], 300.0, RUN_DIR)
    assert told == "60 steps in 5 min 0 s; 1 incident: no step and 0.51 s lost"
    told, _ = summary(1, [incident(steps_lost=2), incident(steps_lost=1)], 40.0, RUN_DIR)
    assert told == "1 step in 40 s; 2 incidents: 3 steps and 1.03 s lost"


def test_a_job_that_ended_without_a_last_checkpoint_has_lost_its_newest_steps() -> None:
    """When the last incident has ended the job without a checkpoint, then the summary does not say
    that no step was lost."""
    told, _ = summary(3, [incident(), incident(strategy="exit", step=None)], 40.0, RUN_DIR)
    assert told == (
        "3 steps in 40 s; 2 incidents: all steps since the newest checkpoint and 1.03 s lost"
    )


def test_error_of_the_script_is_the_reason_and_is_printed_once() -> None:
    """When a bug in the user's script has ended the job, then the reason is its traceback, once for
    all ranks that have the same, and not why each strategy was refused."""
    faults = [software(0, "Traceback\nBoom: x"), software(1, "Traceback\nBoom: x")]
    tried = [{"strategy": "retry", "why_not": "a user's own bug is not retried"}]
    assert reasons([incident(faults=faults, strategy="dump", tried=tried)]) == [
        "the error of ranks 0-1 in step 8:",
        "  Traceback",
        "  Boom: x",
    ]


def test_error_that_comes_again_must_be_corrected_before_the_job_goes_on() -> None:
    """When tft has refused what the script does, then the words that say how to continue say first
    that the script must be changed. For other ends they do not."""
    refused = "Traceback\n  File x\ntft.errors.UsageError: the list a has grown"
    again = "the same command continues"
    ended = incident(faults=[software(0, refused)], strategy="dump")
    words = to_go_on([incident(), ended], again)
    assert words == "change the script first, or the same error comes again; then " + again
    others = [software(0, "Traceback\nValueError: x"), incident()["faults"][0]]
    assert to_go_on([incident(faults=others, strategy="dump")], again) == again
    assert to_go_on([ended, incident()], again) == again
    assert to_go_on([], again) == again


def test_many_different_errors_are_in_the_file_of_the_incident() -> None:
    """When more than three ranks have different errors, then three are printed, and the file of the
    incident is named."""
    faults = [software(rank, f"Traceback\nBoom: {rank}") for rank in range(5)]
    lines = reasons([incident(faults=faults, strategy="exit")])
    assert lines[-1] == "2 more errors: see logs/incident-1.txt"
    assert sum(line.startswith("the error of") for line in lines) == 3


def test_reasons_against_each_strategy_are_printed_for_a_last_checkpoint() -> None:
    """When a lost rank has ended the job with a last checkpoint, then the reasons against the other
    strategies are printed. Without a checkpoint the sentence at the end has them already. A job that
    goes on, or that was asked to end, has no such reasons."""
    tried = [{"strategy": "recover", "why_not": "recover is not enabled"}]
    why = ["not recover: recover is not enabled"]
    assert reasons([incident(strategy="dump", tried=tried)]) == why
    assert reasons([incident(strategy="exit", tried=tried)]) == []
    assert reasons([incident(tried=tried)]) == []
    assert reasons([incident(strategy="dump", tried=tried, faults=[])]) == []
    assert reasons([]) == []


def test_missed_checkpoints_are_summarised_with_the_reason() -> None:
    """When periodic checkpoints could not be written, then one line for each reason names the first
    step and the number of later ones."""
    missed = {"rank": 3, "why": "OSError: No space left on device", "step": 20}
    assert remaining([{**missed, "times": times} for times in (1, 2, 3)]) == [
        "no checkpoint of step 20: rank 3: OSError: No space left on device",
        "no checkpoint of step 20 and 1 later one: rank 3: OSError: No space left on device",
        "no checkpoint of step 20 and 2 later ones: rank 3: OSError: No space left on device",
    ]
    unfinished = {"rank": None, "why": "ranks ended", "step": 20, "times": 1}
    assert remaining([unfinished]) == ["no checkpoint of step 20: ranks ended"]


def test_refused_updates_are_reasons_with_their_cause() -> None:
    """When ranks have refused updates before the job ended, then the reasons say how often, what was
    left out, and which rank's device is the cause."""
    data = {"step": 7, "times": 2, "cause": "data or model", "ranks": [], "skipped": 4}
    device = {"step": 9, "times": 1, "cause": "device", "ranks": [1], "skipped": 0}
    assert reasons([incident(strategy="dump", refused=[data, device])]) == [
        "the update of step 7 was refused 2 times, batches left out: 4; the cause: data or model",
        "the update of step 9 was refused once; the cause: device, rank 1",
    ]


def test_ranks_that_began_with_different_copies_are_named() -> None:
    """When ranks began with different copies that were never found equal, then a line says so, and
    what to do."""
    (line,) = remaining([], ["ranks [1] hold another copy of model"])

    assert line.startswith(
        "ranks [1] hold another copy of model; copies were not found equal later"
    )
    assert "seed all ranks alike" in line
