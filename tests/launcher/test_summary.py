"""
The lines a run ends with.
"""

from typing import Any

from tft.launcher.summary import summary


def incident(**differences: Any) -> dict[str, Any]:  # Any: JSON
    """
    One incident of a report.
    """
    fault = {"kind": "process", "rank": 2, "step": 10, "at": 0.0, "evidence": "ended by signal 9"}
    return {
        "id": 1, "faults": [fault], "strategy": "recover", "tried": [], "step": 11,
        "steps_lost": 0, "seconds": {"total": 0.514}, **differences,
    }  # fmt: skip


def test_an_incident_is_one_line() -> None:
    """
    When a job has recovered, then one line says from what, how, and what it cost.
    """
    assert summary([incident()], []) == [
        "incident 1: process at rank 2 in step 10: recover, 0 steps lost, 0.51 s"
    ]


def test_a_users_own_bug_is_shown_with_rank_and_step_and_the_reasons() -> None:
    """
    When a job was dumped for a bug, then its traceback is there once, and why nothing else was
    done.
    """
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


def test_a_stall_without_a_culprit_and_a_request_to_stop_have_words_too() -> None:
    """
    When no rank can be named, or there is no fault at all, then the line says so.
    """
    nobody = {"kind": "network", "rank": None, "step": 3, "at": 0.0, "evidence": "silence"}
    (first,) = summary([incident(faults=[nobody], strategy="retry")], [])
    (second,) = summary([incident(faults=[], strategy="dump")], [])
    assert "network at no one rank in step 3" in first
    assert "asked to stop: dump" in second


def test_an_end_without_a_checkpoint_counts_no_steps() -> None:
    """
    When nothing was left but the end, then the line says that nothing was saved.
    """
    (line,) = summary([incident(strategy="exit")], [])
    assert line.endswith("exit, nothing was saved, 0.51 s")


def test_checkpoints_that_there_are_not_are_told_with_the_reason() -> None:
    """
    When periodic checkpoints could not be written, then each reason is one line, with the first step.
    """
    missed = {"rank": 3, "why": "OSError: No space left on device", "step": 20}
    assert summary([], [{**missed, "times": times} for times in (1, 2, 3)]) == [
        "no checkpoint of step 20: rank 3: OSError: No space left on device",
        "no checkpoint of step 20 and 1 later one: rank 3: OSError: No space left on device",
        "no checkpoint of step 20 and 2 later ones: rank 3: OSError: No space left on device",
    ]
