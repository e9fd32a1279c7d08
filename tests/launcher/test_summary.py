"""
The lines at the end of a run.
"""

from typing import Any

from tft.launcher.summary import summary


def incident(**differences: Any) -> dict[str, Any]:  # Any: JSON
    """
    Return one incident of a report.
    """
    fault = {"kind": "process", "rank": 2, "step": 10, "at": 0.0, "evidence": "ended by signal 9"}
    return {
        "id": 1, "faults": [fault], "strategy": "recover", "tried": [], "step": 11,
        "steps_lost": 0, "seconds": {"total": 0.514}, **differences,
    }  # fmt: skip


def test_incident_is_summarised_in_one_line() -> None:
    """When a job has recovered, then one line of the summary names the fault, the strategy, the
    lost steps and the duration."""
    assert summary([incident()], []) == [
        "incident 1: process at rank 2 in step 10: recover, 0 steps lost, 0.51 s"
    ]


def test_software_fault_is_summarised_with_traceback_and_reasons() -> None:
    """When a job was dumped because of a bug in the user's script, then the summary names the rank
    and the step. It has the traceback once, and the reason why retry was refused."""
    fault = {"kind": "software", "rank": 1, "step": 8, "at": 0.0, "evidence": "Traceback\nBoom: x"}
    tried = [{"strategy": "retry", "why_not": "a user's own bug is not retried: Boom: x"}]
    lines = summary([incident(faults=[fault], strategy="dump", tried=tried, steps_lost=1)], [])
    assert lines == [
        "incident 1: software at rank 1 in step 8: dump, 1 step lost, 0.51 s",
        "  not retry: a user's own bug is not retried: Boom: x",
        "  rank 1, step 8:",
        "    Traceback",
        "    Boom: x",
    ]


def test_fault_without_a_rank_and_stop_request_are_summarised() -> None:
    """When a fault has no known rank, then its line says `at no one rank`. When an incident has no
    fault, its line says `asked to stop`."""
    nobody = {"kind": "network", "rank": None, "step": 3, "at": 0.0, "evidence": "silence"}
    (first,) = summary([incident(faults=[nobody], strategy="retry")], [])
    (second,) = summary([incident(faults=[], strategy="dump")], [])
    assert "network at no one rank in step 3" in first
    assert "asked to stop: dump" in second


def test_exit_without_a_checkpoint_is_summarised_as_nothing_saved() -> None:
    """When the strategy was `exit`, then the line says that nothing was saved and counts no lost
    steps."""
    (line,) = summary([incident(strategy="exit")], [])
    assert line.endswith("exit, nothing was saved, 0.51 s")


def test_missed_checkpoints_are_summarised_with_the_reason() -> None:
    """When periodic checkpoints could not be written, then one line for each reason names the first
    step and the number of later ones."""
    missed = {"rank": 3, "why": "OSError: No space left on device", "step": 20}
    assert summary([], [{**missed, "times": times} for times in (1, 2, 3)]) == [
        "no checkpoint of step 20: rank 3: OSError: No space left on device",
        "no checkpoint of step 20 and 1 later one: rank 3: OSError: No space left on device",
        "no checkpoint of step 20 and 2 later ones: rank 3: OSError: No space left on device",
    ]
    unfinished = {"rank": None, "why": "ranks ended", "step": 20, "times": 1}
    assert summary([], [unfinished]) == ["no checkpoint of step 20: ranks ended"]


def test_refused_updates_are_summarised_with_their_cause() -> None:
    """When ranks have refused updates, then the summary says how often, what was left out, and
    which rank's device is the cause."""
    data = {"step": 7, "times": 2, "cause": "data or model", "ranks": [], "skipped": 4}
    device = {"step": 9, "times": 1, "cause": "device", "ranks": [1], "skipped": 0}
    lines = summary([incident(strategy="retry", refused=[data, device])], [])
    assert lines[1:] == [
        "  the update of step 7 was refused 2 times, batches left out: 4; the cause: data or model",
        "  the update of step 9 was refused once; the cause: device, rank 1",
    ]


def test_ranks_that_began_with_different_copies_are_named() -> None:
    """When ranks began with different copies that were never found equal, then the last lines say
    so, and what to do."""
    (line,) = summary([], [], ["ranks [1] hold another copy of model"])

    assert line.startswith(
        "ranks [1] hold another copy of model; copies were not found equal later"
    )
    assert "seed all ranks alike" in line
