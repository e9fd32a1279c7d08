"""
Judges a job in which ranks were killed: for each phase, whether the kill left the training as it
was. All functions are pure.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
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
    Return what a job says about each of its `kills`, which are in the order of their steps.

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
        Finding(
            phase=kill.phase, result=DIFFERS, kill=kill, killed=kill.spec in fired,
            difference=difference,
        )
        if kill == guilty
        else _unharmed(kill, kill.spec in fired)
        for kill in told
    )  # fmt: skip


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


def _unharmed(kill: Kill, killed: bool) -> Finding:
    if killed:
        return Finding(phase=kill.phase, result=IDENTICAL, kill=kill, killed=True)
    return Finding(phase=kill.phase, result=NOT_TRIED, kill=kill, why=_unfired(kill))


def _unfired(kill: Kill) -> str:
    if kill.phase == "evaluation":
        return (
            f"the functions that are called after step {kill.step} do not call the model, so no "
            "rank was killed in them"
        )
    return f"rank {kill.rank} did not come to this phase in step {kill.step}"
