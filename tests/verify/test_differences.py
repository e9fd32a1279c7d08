"""
The first difference between what two runs have recorded.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tft.verify.differences import KINDS, Difference, first_difference, volatile_keys
from tft.verify.digests import Digests, Part, read_digests

WINDOW: dict[Part, str] = {
    ("batches", ""): "b", ("losses", ""): "l", ("data", "data"): "d", ("generators", "torch"): "g",
}  # fmt: skip
END: dict[Part, str] = {
    ("rank-local", ""): "r", ("modes", "description of shard dense"): "m",
    ("settings", "settings of shard dense"): "s", ("scheduler", "scheduler of shard dense"): "c",
    ("others", "ema of shard dense"): "e", ("optimizer", "optim of shard dense"): "o",
    ("parameters", "model of shard dense"): "p",
}  # fmt: skip
CALM = Digests(
    steps={(rank, step): {**WINDOW, **END} for rank in range(2) for step in (1, 2, 3)},
    ends={0: 3, 1: 3},
    functions={},
    rows={rank: tuple({"step": step, "loss": 0.5} for step in (1, 2, 3)) for rank in range(2)},
)


def changed(rank: int, step: int, **kinds: str | None) -> Digests:
    """
    Return the calm run with other digests of some kinds at one step; None: they are missing.
    """
    parts = {
        part: kinds.get(part[0].replace("-", "_"), digest)
        for part, digest in CALM.steps[rank, step].items()
    }
    kept = {part: digest for part, digest in parts.items() if digest is not None}
    return replace(CALM, steps={**CALM.steps, (rank, step): kept})


def test_equal_runs_have_no_difference() -> None:
    """When two runs have recorded the same, then there is no difference."""
    assert first_difference(CALM, CALM) is None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("rows", "length")])
def test_each_kind_of_state_is_compared(kind: str) -> None:
    """When one kind of state differs on one rank, then it is named with its step and rank."""
    other = changed(1, 2, **{kind.replace("-", "_"): "x"})
    difference = first_difference(CALM, other)
    assert difference is not None
    assert (difference.step, difference.rank, difference.kind) == (2, 1, kind)


def test_the_cause_is_named_before_its_effects() -> None:
    """When the loss of rank 1 and the parameters of both ranks differ in one step, then the loss is
    named, and a later difference is not."""
    other = changed(1, 2, losses="x", parameters="x", optimizer="x")
    other = replace(
        other,
        steps={**other.steps, (0, 2): changed(0, 2, parameters="x").steps[0, 2],
               (0, 3): changed(0, 3, batches="x").steps[0, 3]},
    )  # fmt: skip
    assert first_difference(CALM, other) == Difference(step=2, rank=1, kind="losses", name="")


def test_a_job_that_trains_longer_is_different() -> None:
    """When a disturbed job has trained more steps than the undisturbed one, then the first step too
    many is named. An earlier difference comes first."""
    longer = replace(CALM, steps={**CALM.steps, (1, 4): {**WINDOW, **END}}, ends={0: 3, 1: 4})
    assert first_difference(CALM, longer) == Difference(
        step=4, rank=1, kind="length", name="4 instead of 3"
    )
    both = replace(longer, steps={**longer.steps, (0, 2): changed(0, 2, losses="x").steps[0, 2]})
    assert first_difference(CALM, both) == Difference(step=2, rank=0, kind="losses", name="")


def test_a_step_that_a_rank_took_from_another_is_not_compared() -> None:
    """When a replacement has not recorded a step, or only its end, then the other steps decide; but
    the last step must be there."""
    missing = {key: parts for key, parts in CALM.steps.items() if key != (1, 2)}
    assert first_difference(CALM, replace(CALM, steps=missing)) is None
    assert first_difference(CALM, replace(CALM, steps={**missing, (1, 2): END})) is None
    last = {key: parts for key, parts in CALM.steps.items() if key != (1, 3)}
    difference = first_difference(CALM, replace(CALM, steps=last))
    assert difference is not None
    assert (difference.step, difference.rank) == (3, 1)


def test_a_part_that_only_one_run_has_is_a_difference() -> None:
    """When a generator exists in one run only, then it is named."""
    more = {**CALM.steps[0, 2], ("generators", "python"): "g"}
    other = replace(CALM, steps={**CALM.steps, (0, 2): more})
    difference = first_difference(CALM, other)
    assert difference is not None
    assert difference.name == "python"


def test_a_row_that_comes_twice_or_is_missing_is_a_difference() -> None:
    """When a row of `session.record` is missing, comes twice or has another value, then the step is
    named; a value that differs between undisturbed runs is not compared."""
    rows = CALM.rows[1]
    for there, words in (
        (rows[:1] + rows[2:], "0 rows instead of 1"),
        (rows[:2] + rows[1:], "2 rows instead of 1"),
        ((rows[0], {"step": 2, "loss": 9.0}, rows[2]), ""),
    ):
        other = replace(CALM, rows={**CALM.rows, 1: there})
        difference = first_difference(CALM, other)
        assert difference == Difference(step=2, rank=1, kind="rows", name=words)
    again = replace(CALM, rows={**CALM.rows, 1: tuple({**row, "loss": 7.0} for row in rows)})
    volatile = volatile_keys(CALM, again)
    assert volatile == {"loss"}
    assert first_difference(CALM, again, volatile=volatile) is None


def test_row_with_nan_equals_itself_and_no_other(tmp_path: Path) -> None:
    """When a row has NaN, alone or in a list, then the same row of another run has no difference and
    no key is ignored. A number in its place is a difference."""

    def read(name: str, mean: float) -> Digests:
        (tmp_path / name).mkdir()
        row = {"step": 1, "mean": mean, "means": [mean, float("inf")]}
        (tmp_path / name / "records-rank0.jsonl").write_text(json.dumps(row) + "\n")
        return read_digests(tmp_path / name, 1)

    nan = float("nan")
    calm, again, other = read("calm", nan), read("again", nan), read("other", 0.0)
    assert volatile_keys(calm, again) == frozenset()
    assert first_difference(calm, again) is None
    difference = first_difference(calm, other)
    assert difference is not None
    assert difference.kind == "rows"


def test_failed_job_is_compared_as_far_as_it_has_come() -> None:
    """When a job has failed in step 3, then what it has not recorded is no difference, in the last
    step and in the rows. What it has recorded is compared."""
    recorded = {key: parts for key, parts in CALM.steps.items() if key[1] < 3}
    rows = {rank: rows[:2] for rank, rows in CALM.rows.items()}
    failed = replace(CALM, steps=recorded, rows=rows, ends={0: 2, 1: 2})
    assert first_difference(CALM, failed) is not None
    assert first_difference(CALM, failed, whole=False) is None
    twice = replace(failed, rows={**rows, 1: (*rows[1], rows[1][1])})
    assert first_difference(CALM, twice, whole=False) == Difference(
        step=2, rank=1, kind="rows", name="2 rows instead of 1"
    )
    other = replace(failed, steps={**recorded, (1, 2): changed(1, 2, losses="x").steps[1, 2]})
    assert first_difference(CALM, other, whole=False) == Difference(
        step=2, rank=1, kind="losses", name=""
    )


def test_rows_of_functions_after_a_step_are_told_from_its_own() -> None:
    """When only rows differ that functions after the step have written, then the difference says so.
    When a row of the step itself differs too, then it does not."""
    own, after = {"step": 2, "loss": 0.5}, {"step": 2, "after": True, "calls": 2}
    calm = replace(CALM, rows={0: (own, after)})
    for rows, alone in (
        ((own, {**after, "calls": 3}), True),
        ((own,), True),
        (({**own, "loss": 0.7}, {**after, "calls": 3}), False),
        ((after,), False),
    ):
        difference = first_difference(calm, replace(calm, rows={0: rows}))
        assert difference is not None
        assert (difference.kind, difference.after) == ("rows", alone)
