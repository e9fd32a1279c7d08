"""
Judges a job in which ranks were killed: for each phase, whether the kill left the training as it
was. All functions are pure.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from tft.verify.differences import Difference
from tft.verify.schedule import Kill

IDENTICAL, DIFFERS, NOT_TRIED = "identical", "differs", "not tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """
    The result of killing a rank in one phase of a step.
    """

    phase: str
    result: str
    """`identical`, `differs` or `not tried`."""
    kill: Kill | None = None
    killed: bool = False
    """True if `kill` was carried out. A job may fail before that."""
    difference: Difference | None = None
    why: str = ""
    """The reason why no rank was killed in the phase, or a text that says how the job failed."""
    inexact: tuple[str, ...] = ()
    """Sentences from the job's own report about parts of the recovery that may not be
    bit-identical."""
    run_dir: Path | None = None
    """The run directory of the job in which the rank was killed."""


def judge(
    kills: Sequence[Kill],
    *,
    fired: Collection[str],
    code: int | None,
    difference: Difference | None,
) -> tuple[Finding, ...]:
    """
    Return what a job says about the phases of its `kills`, which are in the order of their steps.

    `fired` has the specs of the kills that were carried out. `code` is the exit code of the job, or
    None if it was ended because its time was over. `difference` is its first difference from the
    undisturbed job.

    The kill to which the difference or the failure is ascribed is the last one with a finding,
    because the job says nothing about later kills. Return nothing if the job has ended well, and
    differs from before any kill.
    """
    guilty = _guilty(kills, fired=fired, code=code, difference=difference)
    if guilty is None and difference is not None:
        return ()
    told = kills if guilty is None else kills[: kills.index(guilty) + 1]
    return tuple(
        _found(list(planned), guilty, fired, difference)
        for _, planned in groupby(told, key=lambda kill: kill.phase)
    )


def settle(finding: Finding, alone: Finding | None, *, untried: int, time: bool) -> Finding | None:
    """
    Return the finding to report for a phase, or None if the other ranks are to be tried before
    that.

    A user may evaluate on one rank only. So if rank 0 does not call the model in the phase
    `evaluation`, the others are tried in one further job, if there is `time` for it. `alone` is the
    finding about rank 0 when they were. `untried` is the number of ranks for which that job had no
    step.
    """
    if finding.phase != "evaluation" or finding.result != NOT_TRIED:
        return finding
    if alone is None and time:
        return None
    if alone is None:
        reasons = [finding.why, "no time was left to try other ranks: give a higher --limit"]
    else:
        reasons = [alone.why, finding.why]
        if untried:
            reasons.append(f"ranks not tried for lack of such steps: {untried}; give more --steps")
    return replace(finding, why="\n".join(reasons))


def _guilty(
    kills: Sequence[Kill],
    *,
    fired: Collection[str],
    code: int | None,
    difference: Difference | None,
) -> Kill | None:
    """
    Return the kill to which a job's difference or failure is ascribed. Return None if there is
    neither, or only a difference from before any kill.

    This is the last kill that was carried out, of those that can have caused the difference. The
    failure of a job always counts. If there is no such kill, it is ascribed to the first kill that
    was carried out, or else to the first planned one.
    """
    if code == 0 and difference is None:
        return None
    done = [kill for kill in kills if kill.spec in fired]
    able = [kill for kill in done if difference is None or _can_cause(kill, difference)]
    if able:
        return able[-1]
    return None if code == 0 else [*done, *kills][0]


def _can_cause(kill: Kill, difference: Difference) -> bool:
    """
    Return whether a kill in its step can have caused a difference.

    A kill changes nothing in an earlier step, apart from the rows of functions that are called
    after the step before. If a rank is killed before all ranks have been through these functions,
    all ranks call them again.
    """
    first = kill.step - 1 if difference.after else kill.step
    return first <= difference.step


def _found(
    planned: Sequence[Kill],
    guilty: Kill | None,
    fired: Collection[str],
    difference: Difference | None,
) -> Finding:
    """
    Return the finding for the phase of the `planned` kills.
    """
    phase = planned[0].phase
    if guilty is not None and guilty in planned:
        return Finding(
            phase=phase, result=DIFFERS, kill=guilty, killed=guilty.spec in fired,
            difference=difference,
        )  # fmt: skip
    for kill in planned:
        if kill.spec in fired:
            return Finding(phase=phase, result=IDENTICAL, kill=kill, killed=True)
    why = "\n".join(_unfired(kill) for kill in planned)
    return Finding(phase=phase, result=NOT_TRIED, kill=planned[0], why=why)


def _unfired(kill: Kill) -> str:
    if kill.phase == "evaluation":
        return (
            f"in the functions after step {kill.step}, rank {kill.rank} did not call the model "
            "that was handed over"
        )
    return f"rank {kill.rank} did not come to this phase in step {kill.step}"
