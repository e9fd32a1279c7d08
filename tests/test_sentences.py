"""
Sentences for people about incidents and remarks. `tests/report/test_pages.py` has more incidents.
"""

from typing import Any

import pytest

from tft.sentences import incident_line, incident_story, is_long, open_incident, remark_text


def incident(**differences: Any) -> dict[str, Any]:  # Any: JSON
    """
    Return one incident of a report.
    """
    fault = {
        "kind": "process", "rank": 2, "step": 30, "at": 0.0, "pid": 3283, "host": "10.0.0.7",
        "evidence": "was ended by signal 9",
    }  # fmt: skip
    return {
        "id": 1, "faults": [fault], "strategy": "recover", "tried": [], "step": 30,
        "steps_lost": 0, "inexact": [], "unprotected": [], "refused": [], "processes_started": 1,
        "seconds": {"total": 0.34}, **differences,
    }  # fmt: skip


def test_line_of_an_incident_names_the_process() -> None:
    """When one rank was lost, then the line has its pid and its host. When several were lost in the
    same way, only the ranks are named."""
    one = incident()
    assert incident_line(one) == (
        "incident 1: rank 2 (pid 3283 on 10.0.0.7) was killed by SIGKILL in step 30; replaced in "
        "0.34 s; no step lost"
    )
    (fault,) = one["faults"]
    several = incident(faults=[fault, {**fault, "rank": 3, "pid": 9}])
    assert "incident 1: ranks 2-3 were killed by SIGKILL in step 30" in incident_line(several)


def test_process_that_tft_has_ended_is_no_second_fault_of_the_line() -> None:
    """When tft has ended the process of a rank because of a fault that the line names, then the line
    does not say that the rank has lost its process. Without such a fault it does."""
    (lost,) = incident()["faults"]
    memory = {**lost, "kind": "memory", "evidence": "CUDA error: uncorrectable ECC error"}
    for why in ("no retry: a recovery plugin has ruled it out: cards fail",
                "a recovery plugin has advised it"):  # fmt: skip
        ended = {**lost, "evidence": why}
        assert incident_line(incident(faults=[memory, ended])).startswith(
            "incident 1: rank 2 (pid 3283 on 10.0.0.7) met a memory fault of its device in step 30; "
            "replaced in"
        )
        for faults in ([ended], [{**memory, "rank": 1}, ended]):
            line = incident_line(incident(faults=faults))
            assert "rank 2 (pid 3283 on 10.0.0.7) lost its process in step 30; replaced" in line
    by_itself = incident_line(incident(faults=[memory, lost]))
    assert "rank 2 (pid 3283 on 10.0.0.7) was killed by SIGKILL in step 30" in by_itself


def test_line_of_an_incident_says_that_training_may_differ() -> None:
    """When batches were left out, or the state may be wrong, then the line says so beside the steps
    that were lost. An incident that is not over, or has ended the job without a checkpoint, has no
    such clause."""
    wrong, less = "it may be wrong since step 25", "batches left out on all ranks before step 30: 2"
    refused = [
        {"step": 30, "times": 2, "cause": "data or model", "ranks": [], "skipped": 2},
        {"step": 31, "times": 1, "cause": "device", "ranks": [1], "skipped": 0},
    ]
    batches, doubt = "2 batches left out on each rank", "training may not be bit for bit the same"
    for told, clauses in (
        (incident(inexact=[wrong]), f"; no step lost; {doubt}"),
        (incident(inexact=[less], refused=refused), f"; no step lost; {batches}"),
        (incident(inexact=[less, wrong], refused=refused), f"; no step lost; {batches}; {doubt}"),
        (incident(inexact=[], refused=refused[1:]), "; no step lost"),
        (incident(inexact=[wrong], strategy="exit"), "without a last checkpoint"),
        (incident(inexact=[wrong], open=True), "not over when this was written (recover)"),
    ):
        assert incident_line(told).endswith(clauses)


def test_story_of_an_incident_says_what_was_tried_again() -> None:
    """When an attempt has failed and was repeated, then the incident has a story, which says why."""
    why = "retry: rank 1 could not fetch: digest differs"
    told = incident(repeated=[why])
    assert is_long(told)
    assert why in incident_story(told)


def test_open_incident_has_its_faults_and_its_strategy() -> None:
    """When an incident is not over, then the faults and the strategy are named as far as they are
    known."""
    told = open_incident(incident())
    assert told == "rank 2 (pid 3283 on 10.0.0.7) was killed by SIGKILL in step 30: recover"
    assert open_incident(incident(faults=[], strategy="")) == "no fault is known yet"


def test_incident_with_more_to_say_has_a_story() -> None:
    """When an incident has a traceback, stacks or reservations, then its story has them, and the
    reasons against other strategies. A plain loss of a process needs no story."""
    assert not is_long(incident())
    fault = {**incident()["faults"][0], "kind": "hang", "evidence": "Thread 1:\n  File train.py"}
    tried = [{"strategy": "retry", "why_not": "it hangs"}]
    told = incident(faults=[fault], tried=tried, inexact=["the tail of step 30 was interrupted"])
    assert is_long(told)
    story = incident_story(told)
    assert story.startswith("Rank 2 (pid 3283 on 10.0.0.7) stood still in step 30; replaced in")
    for part in ("- not retry: it hangs", "- the tail of step 30", "\nThread 1:\n  File train.py"):
        assert part in story


@pytest.mark.parametrize(
    ("event", "facts", "text"),
    [
        (
            "rank_slow",
            {
                "rank": 2, "node": 0, "step": 141, "cause": "input", "seconds": 0.0121,
                "percent": 31.2, "compared_with": "peers",
            },
            "rank 2 on node 0 is slow since step 141: its input takes 12 ms longer in each step than "
            "on its peers (31 % of their work)",
        ),
        (
            "rank_slow",
            {
                "rank": 2, "node": 0, "step": 141, "cause": "compute", "seconds": 0.563,
                "percent": 563.0, "compared_with": "its own first steps",
            },
            "rank 2 on node 0 is slow since step 141: its computation takes 0.56 s longer in each "
            "step than in its first steps (563 % of its work then)",
        ),
        (
            "logger_failed",
            {"logger": "wandb", "why": "OSError: no room"},
            "the logger wandb does not take values, and is tried again: OSError: no room",
        ),
        ("logger_failed_over", {"logger": "wandb"}, "the logger wandb takes values again"),
        (
            "rank_slow_over",
            {"rank": 2, "node": 0, "step": 200},
            "rank 2 is as fast as the others again since step 200",
        ),
        (
            "values_not_sent",
            {"why": "/runs/a/values cannot be written (No space left on device)"},
            "no values of session.log are sent until they can be: /runs/a/values cannot be written (No "
            "space left on device)",
        ),
        ("values_not_sent_over", {}, "values of session.log are sent again"),
        (
            "checkpoints_suspended",
            {"ranks": [2, 3], "step": 40},
            "ranks 2-3 left after step 40: until they come back, no periodic checkpoint is written",
        ),
        (
            "checkpoints_resumed",
            {"step": 60},
            "periodic checkpoints are written again since step 60",
        ),
        (
            "report_waits",
            {"why": "No space left on device"},
            "the report cannot be written yet: No space left on device; the job ends when there is room "
            "for it, or with a second signal without it",
        ),
        (
            "job_stands",
            {"seconds": 0.64, "ranks": [1], "stacks": "/runs/a/logs/stacks-1.txt"},
            "no rank has made progress for 0.64 s: rank 1 holds up the others; the stacks of all "
            "ranks are in logs/stacks-1.txt",
        ),
        (
            "job_stands",
            {"seconds": 0.64, "ranks": [], "stacks": ""},
            "no rank has made progress for 0.64 s",
        ),
        (
            "rank_behind",
            {"rank": 1, "line": "train.py:54", "why": "it has entered 59 collectives", "seconds": 1},
            "rank 1 stands at train.py:54: it has entered 59 collectives",
        ),
        (
            "rank_behind",
            {"rank": 1, "line": "", "why": "it does not answer", "seconds": 1},
            "rank 1 holds up the others: it does not answer",
        ),
        (
            "no_node_heard",
            {"nodes": [0, 1], "seconds": 10.0, "limit": 300.0},
            "no node has been connected to the bus for 10 s: if none comes back, all nodes count as "
            "lost 4 min 50 s from now",
        ),
        ("rank_slow", {"why": "mine"}, "remark rank_slow: why mine"),
        ("too_hot", {"device": 3, "celsius": 97}, "remark too_hot: device 3, celsius 97"),
        ("seen", {}, "remark seen"),
    ],
)  # fmt: skip
def test_remark_is_one_sentence(event: str, facts: dict[str, object], text: str) -> None:
    """When something is remarked, then a sentence says it. A remark of another plugin is shown with
    its name and facts, also if it has the name of one of tft's."""
    assert remark_text(event, facts) == text
