"""
The audit of real loops: each habit that an incident cannot repair is reported with its line of
code.

With the strict audit the job is refused. Loops without such habits are not reported.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.jobs import ROOT, Outcome, run

SCRIPT = ROOT / "tests" / "e2e" / "audit_job.py"
FINDINGS = {
    "draws": "draws",
    "iterates": "draws",
    "decides": "collective",
    "swallows": "swallows",
    "averages": "head",
    "backward": "outside",
    "unended": "unended",
    "prefetches": "ahead",
    "twice": "windows",
}
"""The name of each habit in the log, by habit of the script."""
HARM = {
    "draws": "kill:rank=1,step=4,phase=update",
    "iterates": "kill:rank=1,step=4,phase=update",
    "averages": "kill:rank=1,step=4,phase=forward",
    "backward": "kill:rank=1,step=4,phase=backward",
    "unended": "kill:rank=1,step=4,phase=update",
    "prefetches": "kill:rank=1,step=4,phase=update",
    "swallows": "",
}
"""For each habit whose harm lasts beyond the step: the fault that causes the harm. Empty: the
script kills itself."""
UNCOMPARED = {"PYTHONPATH": str(Path(__file__).parent / "uncompared")}


def audit(
    where: Path,
    *arguments: str,
    options: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """
    Run `audit_job.py` with these arguments on two ranks, and return the outcome.
    """
    return run(
        where, *options, script=SCRIPT, arguments=arguments, nproc=2, environment=environment
    )


def harmed(where: Path, habit: str, audit_mode: str) -> Outcome:
    """
    Run the loop with a fault that makes the habit do harm, and return the outcome.

    The job does not compare copies between ranks. It must recover from exactly one incident.
    """
    spec = HARM[habit]
    fault = ("--chaos", spec) if spec else ()
    dies = () if spec else ("--die", "1,4")
    outcome = audit(
        where, habit, *dies, options=("--audit", audit_mode, *fault), environment=UNCOMPARED
    )
    assert outcome.code == 0, outcome.output
    assert len(outcome.incidents) == 1
    return outcome


def is_identical(outcome: Outcome, calm: Outcome) -> bool:
    """
    Return whether all losses and final digests of both jobs are the same.
    """
    return (outcome.rows(), outcome.finals()) == (calm.rows(), calm.finals())


def findings(outcome: Outcome) -> list[str]:
    """
    Return the findings that rank 0 printed, in order.
    """
    return re.findall(r"\[rank 0\] .* audit +finding=(\w+)", outcome.output)


def lines(outcome: Outcome) -> list[str]:
    """
    Return the lines of the script that the audit names, as they are in the file.
    """
    text = SCRIPT.read_text().splitlines()
    return [text[int(n) - 1].strip() for n in re.findall(r"audit_job\.py:(\d+)", outcome.output)]


@pytest.mark.timeout(120)
def test_each_habit_is_named_once_with_its_line(tmp_path: Path) -> None:
    """When a loop has every habit that an incident cannot repair, then each habit is named once,
    with lines of the loop. The report of an incident says that it is not bit-identical, with the
    reasons."""
    habits = ("draws", "decides", "averages", "backward", "swallows")
    outcome = audit(tmp_path / "run", *habits, "--die", "1,4")
    assert outcome.code == 0, outcome.output
    named = findings(outcome)
    assert set(named) == {FINDINGS[habit] for habit in habits}
    assert (named.count("draws"), named.count("head"), named.count("swallows")) == (1, 1, 1)
    assert sorted(
        re.findall(r"finding=collective .*?changes (.*?) after its collective", outcome.output)
    ) == ["the scheduler", "the settings of the parameter groups"]
    assert set(lines(outcome)) == {
        "for step in steps(session):", "with session.update():", "TAILS[habit](loss)"
    }  # fmt: skip
    (incident,) = outcome.incidents
    said = " ".join(incident["inexact"])
    assert "draws random numbers in the tail of a step (generator torch)" in said
    assert "the tail of step 4 has hidden a fault from tft" in said


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_the_strict_audit_accepts_a_loop_without_these_habits(tmp_path: Path) -> None:
    """When a loop has BatchNorm, dropout, autocast with a GradScaler, an average, a learning rate
    set by hand, and an evaluation on all ranks with its own loader, then the strict audit finds no
    habit."""
    outcome = audit(tmp_path / "run", "clean", options=("--audit", "strict"))
    assert outcome.code == 0, outcome.output
    assert findings(outcome) == []
    output = outcome.output
    for path in (SCRIPT.name, str(ROOT), str(tmp_path)):
        output = output.replace(path, "")
    assert "audit" not in output


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize("habit", FINDINGS)
def test_the_strict_audit_ends_the_job_on_each_habit(tmp_path: Path, habit: str) -> None:
    """When the audit is strict, then each habit ends the job like a bug of the script, with the
    message of the habit."""
    outcome = audit(tmp_path / "run", habit, "--die", "1,4", options=("--audit", "strict"))
    assert outcome.code == 3, outcome.output
    assert "`--audit strict` does not let a job go on like this" in outcome.output
    assert "software" in [fault["kind"] for i in outcome.incidents for fault in i["faults"]]


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize("habit", FINDINGS)
def test_the_audit_names_no_habit_when_it_is_off(tmp_path: Path, habit: str) -> None:
    """When the audit is off, then no habit is named."""
    outcome = audit(tmp_path / "run", habit, "--die", "1,4", options=("--audit", "off"))
    assert outcome.code == 0, outcome.output
    assert findings(outcome) == []


@pytest.mark.soak
@pytest.mark.timeout(200)
@pytest.mark.parametrize("habit", HARM)
def test_the_audit_names_a_harmful_habit_without_a_comparison_of_copies(
    tmp_path: Path, habit: str
) -> None:
    """When copies are not compared, and the habit makes the result of an incident wrong, then the
    audit has named the habit. Without the audit the result differs from the undisturbed job too,
    and no message says so."""
    calm = audit(tmp_path / "calm", habit, environment=UNCOMPARED)
    named = harmed(tmp_path / "named", habit, "first")
    assert FINDINGS[habit] in findings(named)
    silent = harmed(tmp_path / "silent", habit, "off")
    assert not is_identical(silent, calm)
    assert findings(silent) == []
    assert [incident["inexact"] for incident in silent.incidents] == [[]]


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_the_strict_audit_accepts_the_example(tmp_path: Path) -> None:
    """When the example trains under a strict audit, and loses a rank, then no habit is found, and
    the incident is exact."""
    outcome = run(
        tmp_path / "run", "--audit", "strict", "--chaos", "kill:rank=1,step=5,phase=update",
        arguments=("--steps", "12"), nproc=2,
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    assert findings(outcome) == []
    assert [incident["inexact"] for incident in outcome.incidents] == [[]]


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_a_batch_taken_before_the_window_closes_is_named(tmp_path: Path) -> None:
    """When a loop takes the batch of the next step before its window closes, then an incident
    skips a batch: the audit names the loop, and the report says that the incident is not
    bit-identical."""
    outcome = audit(
        tmp_path / "run", "prefetches", options=("--chaos", "kill:rank=1,step=4,phase=update")
    )
    assert outcome.code == 0, outcome.output
    assert findings(outcome) == ["ahead"]
    (incident,) = outcome.incidents
    assert "the loop advances the data position before its first step" in " ".join(
        incident["inexact"]
    )


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_a_batch_taken_after_the_window_is_not_skipped(tmp_path: Path) -> None:
    """When a loop takes the batch of the next step after its window, then no batch is skipped: all
    losses and digests are those of the undisturbed job, and no habit is named."""
    calm = audit(tmp_path / "calm", "behind", options=("--audit", "strict"))
    outcome = audit(
        tmp_path / "run", "behind",
        options=("--audit", "strict", "--chaos", "kill:rank=1,step=4,phase=update"),
    )  # fmt: skip
    assert (calm.code, outcome.code) == (0, 0), outcome.output
    assert is_identical(outcome, calm)
    assert [incident["inexact"] for incident in outcome.incidents] == [[]]
