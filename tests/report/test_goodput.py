"""
How the time of a run is split: each kind of loss, and the sum.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tft.core.job.transitions import State
from tft.report.goodput import (
    AGAIN,
    END,
    INCIDENT,
    KINDS,
    PAUSE,
    STANDING,
    START,
    TRAINING,
    Goodput,
    Known,
    goodput,
    together,
)
from tft.report.progress import RunProgress, runs_of

BEGIN = {"run": "r", "opened": 0.0, "epoch": 1, "world": 2, "from_step": 0, "first_incident": 1}


def row(at: float, **more: object) -> str:
    """
    Return a row of `progress.jsonl`.
    """
    return json.dumps({"at": at, "unix": 1000.0 + at, **more})


def told(*rows: str) -> RunProgress:
    """
    Return the run that these rows tell.
    """
    [run], unread = runs_of("\n".join([row(0.0, **BEGIN), *rows]))
    assert unread == 0
    return run


def state(at: float, name: State, incident: int = 0) -> str:
    """
    Return a row about a state of the job.
    """
    return row(at, state=str(name), incident=incident)


def steps(start: float, first: int, number: int, each: float) -> list[str]:
    """
    Return rows about steps that take `each` seconds.
    """
    return [row(start + n * each, step=first + n, ranks=2) for n in range(number)]


def split(result: Goodput) -> dict[str, float]:
    """
    Return the seconds of each kind that has any, and check that they add up.
    """
    assert sum(part.seconds for part in result.parts) == pytest.approx(result.wall)
    found: dict[str, float] = {}
    for part in result.parts:
        if part.seconds:
            name = f"{part.kind} {part.strategy}".strip()
            found[name] = found.get(name, 0.0) + round(part.seconds, 6)
    return found


CALM = [state(0.0, State.AWAITING), state(10.0, State.HEALTHY), *steps(11.0, 2, 90, 1.0)]
"""A start of 10 s, and steps 2 to 91 of a second each, until 100.5 s."""


def test_calm_run_is_start_training_and_end() -> None:
    """When nothing happens, then the time is start, training and end."""
    run = told(*CALM, state(100.5, State.EXITING), state(102.0, State.ENDED))
    result = goodput(run, {}, 102.0)

    assert split(result) == {START: 10.0, TRAINING: 90.5, END: 1.5}
    assert result.step_time == 1.0
    assert result.share == pytest.approx(90.5 / 102)


def test_incident_counts_from_its_fault() -> None:
    """When the fault came 2 s before its first evidence, then these 2 s are in the incident, as in
    `total` of the report."""
    run = told(*CALM, state(103.0, State.FREEZING, 1), state(108.0, State.HEALTHY))
    known = {1: Known(strategy="recover", total=7.0, steps_lost=0)}

    assert split(goodput(run, known, 110.0)) == {
        START: 10.0, TRAINING: 93.0, f"{INCIDENT} recover": 7.0,
    }  # fmt: skip


def test_incident_without_report_counts_from_its_first_evidence() -> None:
    """When neither report nor story is known, then the incident has the times of the rows."""
    run = told(*CALM, state(103.0, State.FREEZING, 1), state(108.0, State.HEALTHY))
    assert split(goodput(run, {}, 110.0))[f"{INCIDENT} unknown"] == 5.0


def test_lost_steps_are_taken_from_training() -> None:
    """When an incident has lost 20 steps, then 20 median steps of training were not kept."""
    run = told(*CALM, state(100.5, State.FREEZING, 1), state(102.5, State.HEALTHY))
    known = {1: Known(strategy="recover", total=2.0, steps_lost=20)}

    assert split(goodput(run, known, 110.0)) == {
        START: 10.0, TRAINING: 78.0, AGAIN: 20.0, f"{INCIDENT} recover": 2.0,
    }  # fmt: skip


def test_steps_after_the_checkpoint_of_the_next_run_were_not_kept() -> None:
    """When the next run continues from step 81 and this one was at step 91, then 10 steps count."""
    assert split(goodput(told(*CALM), {}, 100.5, continued_from=81))[AGAIN] == 10.0


def test_steps_after_the_last_row_of_a_killed_run_were_not_kept() -> None:
    """When the last event of a killed run is 3 s after its last row, then the steps of these 3 s
    were not kept either."""
    result = goodput(told(*CALM), {}, 103.0, continued_from=81)
    assert split(result) == {START: 10.0, TRAINING: 80.0, AGAIN: 13.0}


def test_steps_are_lost_once_if_a_third_run_goes_back_behind_the_second() -> None:
    """When a third run continues from before the second, then the second one loses only the steps
    that it has trained itself."""
    run = told(*CALM)
    run.from_step = 86
    run.samples = [each for each in run.samples if each.step > 86]
    assert split(goodput(run, {}, 100.5, continued_from=40))[AGAIN] == 5.0


def test_pause_lasts_until_all_ranks_train_again() -> None:
    """When the job is paused, then the pause ends with the first step. The way to the boundary is
    training."""
    run = told(
        *CALM, state(100.5, State.PAUSING), state(101.0, State.PAUSED),
        state(131.0, State.RESUMING), state(132.0, State.HEALTHY),
    )  # fmt: skip
    assert split(goodput(run, {}, 133.0)) == {START: 10.0, TRAINING: 92.0, PAUSE: 31.0}


def test_gathering_for_a_takeover_is_no_pause() -> None:
    """When ranks only gather at a step boundary and go on, then that is training."""
    run = told(
        *CALM,
        state(100.5, State.PAUSING),
        state(101.0, State.RESUMING),
        state(102.0, State.HEALTHY),
    )
    assert split(goodput(run, {}, 103.0)) == {START: 10.0, TRAINING: 93.0}


def test_long_time_without_a_step_is_standing_still() -> None:
    """When no step is completed for a minute, without an incident, then all but one step of this
    time is no training."""
    run = told(*CALM, *steps(161.0, 92, 10, 1.0))
    assert split(goodput(run, {}, 170.0)) == {START: 10.0, TRAINING: 100.0, STANDING: 60.0}


def test_standing_still_before_a_fault_is_seen() -> None:
    """When the job hangs for a minute before this is taken for a fault, then the minute shows."""
    run = told(*CALM, state(160.0, State.FREEZING, 1), state(165.0, State.HEALTHY))
    known = {1: Known(strategy="recover", total=5.0, steps_lost=0)}
    assert split(goodput(run, known, 165.0))[STANDING] == pytest.approx(59.0)


def test_missing_rows_while_steps_went_on_are_training() -> None:
    """When a controller was away for 30 s and 30 steps were trained meanwhile, then nothing stood
    still."""
    run = told(*CALM, *steps(130.0, 121, 2, 1.0))
    assert split(goodput(run, {}, 131.0)) == {START: 10.0, TRAINING: 121.0}


def test_fault_during_the_start_is_an_incident() -> None:
    """When a rank is lost before the first step, then the start ends with the fault."""
    run = told(state(0.0, State.AWAITING), state(4.0, State.AWAITING, 1), state(9.0, State.HEALTHY))
    known = {1: Known(strategy="recover", total=5.5, steps_lost=0)}
    assert split(goodput(run, known, 10.0)) == {
        START: 3.5, TRAINING: 1.0, f"{INCIDENT} recover": 5.5,
    }  # fmt: skip


def test_incident_that_ends_the_job_is_a_part_of_the_end() -> None:
    """When the job ends with a last checkpoint, then the time since the fault is the end."""
    run = told(
        *CALM, state(103.0, State.FREEZING, 1), state(104.0, State.DUMPING, 1),
        state(110.0, State.EXITING), state(111.0, State.ENDED),
    )  # fmt: skip
    known = {1: Known(strategy="dump", total=9.5, steps_lost=0)}
    assert split(goodput(run, known, 111.0)) == {START: 10.0, TRAINING: 90.5, END: 10.5}


def test_run_without_a_step_has_no_goodput() -> None:
    """When no step was trained, then all of the time is start, and the goodput is 0."""
    result = goodput(told(state(0.0, State.AWAITING)), {}, 20.0)
    assert split(result) == {START: 20.0}
    assert result.share == 0.0
    assert result.step_time is None


def test_runs_are_added() -> None:
    """When a job has two runs, then the times of their parts are added."""
    run = told(*CALM)
    one = goodput(run, {}, 100.5, continued_from=81)
    both = together([one, goodput(run, {}, 100.5)])

    assert split(both) == {START: 20.0, TRAINING: 171.0, AGAIN: 10.0}
    assert both.share == pytest.approx(171 / 201)


def test_each_step_counts_the_same_in_the_median() -> None:
    """When rows are a second apart, then a row over 50 fast steps has 50 times the weight."""
    run = told(
        state(0.0, State.HEALTHY),
        *(row(1.0 + n, step=1 + 50 * n, ranks=2) for n in range(3)),
        *(row(10.0 + 2 * n, step=102 + n, ranks=2) for n in range(20)),
    )
    assert goodput(run, {}, 60.0).step_time == pytest.approx(0.02)


TIMES = st.floats(0, 1000, allow_nan=False)


@given(
    changes=st.lists(st.tuples(TIMES, st.sampled_from(State), st.integers(0, 3)), max_size=12),
    samples=st.lists(st.tuples(TIMES, st.integers(1, 500)), max_size=12),
    totals=st.lists(st.none() | TIMES, min_size=3, max_size=3),
    strategy=st.sampled_from(["recover", "dump"]),
)
def test_parts_always_add_up(
    changes: list[tuple[float, State, int]],
    samples: list[tuple[float, int]],
    totals: list[float | None],
    strategy: str,
) -> None:
    """When rows have any order of states, then no part is negative, and they add up to the time."""
    run = told(
        *(state(at, name, incident) for at, name, incident in sorted(changes)),
        *(row(at, step=step, ranks=1) for at, step in sorted(samples)),
    )
    known = {
        number: Known(strategy=strategy, total=total, steps_lost=number)
        for number, total in enumerate(totals, start=1)
    }
    result = goodput(run, known, 1000.0, continued_from=2)
    split(result)
    assert all(part.seconds >= 0 and part.kind in KINDS for part in result.parts)
    ends = [0.0, *(span.end for span in result.spans)]
    assert [span.start for span in result.spans] == pytest.approx(ends[:-1])
