"""
`tft verify` on real scripts.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import ROOT, left_behind
from tests.test_docs import anchors
from tft.verify.differences import KINDS

SCRIPT = ROOT / "tests" / "e2e" / "verify_job.py"
VARIANT = ROOT / "tests" / "e2e" / "verify_variants.py"


def verify(where: Path, *options: str, script: tuple[str, ...]) -> tuple[int, str, dict[str, Any]]:
    """
    Run `tft verify`. Return its exit code, its output and its report, which is empty if it refused.
    """
    run_dir = where / "run"
    done = subprocess.run(
        [sys.executable, "-m", "tft", "verify", "--run-dir", str(run_dir), *options, *script],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    for job in run_dir.glob("*/job.json"):
        assert left_behind(job.parent) == []
    report = run_dir / "verify.json"
    found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    return done.returncode, done.stdout + done.stderr, found


def results(report: dict[str, Any]) -> dict[str, str]:  # Any: JSON
    """
    Return the result of each phase.
    """
    return {each["phase"]: each["result"] for each in report["phases"]}


@pytest.mark.parametrize(
    ("options", "on", "phases"),
    [
        (("--phases", "evaluation"), ("--on", "0"), 1),
        pytest.param((), ("--on", "0"), 7, marks=pytest.mark.soak),
        pytest.param((), (), 7, marks=pytest.mark.soak),
    ],
)
def test_a_script_that_keeps_its_state_is_identical(
    tmp_path: Path, options: tuple[str, ...], on: tuple[str, ...], phases: int
) -> None:
    """When a script evaluates after steps, on all ranks or on rank 0, and keeps its state, then it is
    identical in each phase, although a time in its rows differs from run to run. Rank 0 is killed in
    the evaluation."""
    script = (str(SCRIPT), "--habit", "evaluate", *on)
    code, output, report = verify(tmp_path, *options, script=script)
    assert code == 0, output
    assert set(results(report).values()) == {"identical"}
    assert len(report["phases"]) == phases
    assert f"with a rank killed in {phases} phases" in output
    assert report["phases"][-1]["kill"]["rank"] == 0


@pytest.mark.soak
def test_an_evaluation_on_another_rank_is_found(tmp_path: Path) -> None:
    """When only rank 1 evaluates, then it is killed there in one further job. When no rank does, then
    the phase is not tried, and the reason names both ranks."""
    script = (str(SCRIPT), "--habit", "evaluate", "--on")
    phases = ("--phases", "tail,evaluation")
    code, output, report = verify(tmp_path / "one", *phases, script=(*script, "1"))
    assert code == 0, output
    assert results(report) == {"tail": "identical", "evaluation": "identical"}
    assert report["phases"][-1]["kill"]["rank"] == 1
    code, output, report = verify(tmp_path / "none", *phases, script=(*script, "2"))
    assert code == 0, output
    assert results(report) == {"tail": "identical", "evaluation": "not tried"}
    for rank in (0, 1):
        assert f"rank {rank} did not call the model that was handed over" in output


@pytest.mark.soak
def test_an_evaluation_of_a_moving_average_is_tried(tmp_path: Path) -> None:
    """When an evaluation calls only a moving average of the model, which is among `others`, then a
    rank is killed in it."""
    script = (str(ROOT / "examples" / "ported" / "vision_tft.py"),)
    options = ("--phases", "evaluation", "--steps", "12")
    code, output, report = verify(tmp_path, *options, script=script)
    assert code == 0, output
    assert results(report) == {"evaluation": "identical"}


@pytest.mark.soak
def test_state_that_is_not_kept_is_named_with_step_and_rank(tmp_path: Path) -> None:
    """When a loss depends on numbers that tft does not keep, then the output names the first step
    that differs, the killed rank and the kind of difference. Each phase is judged by itself, and
    the named section of the page exists."""
    code, output, report = verify(
        tmp_path, "--phases", "backward,tail,evaluation", script=(str(SCRIPT), "--habit", "random")
    )
    assert code == 1, output
    assert results(report) == {
        "backward": "differs", "tail": "differs", "evaluation": "not tried",
    }  # fmt: skip
    [backward, tail, _] = report["phases"]
    for found, late in ((backward, 0), (tail, 1)):
        difference, kill = found["difference"], found["kill"]
        assert (difference["kind"], difference["rank"]) == ("losses", kill["rank"])
        assert difference["step"] == kill["step"] + late
        page, _, anchor = difference["section"].partition("#")
        assert anchor in anchors(ROOT / page)


VARIANTS = [
    ("prefetch", 0, "batches"),
    ("loader", 0, "generators"),
    ("scheduler", 0, "settings"),
    ("ema", 0, "rows"),
    ("scaler", 0, "losses"),
    ("evaluates", 0, "generators"),
    ("tells", 0, "rank-local"),
    ("counts", 0, "rank-local"),
    ("preconditions", 2, "parameters"),
    ("hides", 2, "parameters"),
    ("zeroes", 0, "rank-local"),
    ("seeds", 0, "generators"),
    ("broadcast", 0, "batches"),
    ("random", 0, "losses"),
]
"""Habits, the exit code where tft keeps or refuses their state, and the kind that differs first
where the state is not kept."""


@pytest.mark.soak
@pytest.mark.parametrize(("habit", "code", "kind"), VARIANTS, ids=[each[0] for each in VARIANTS])
def test_kept_state_is_identical_and_lost_state_is_named(
    tmp_path: Path, habit: str, code: int, kind: str
) -> None:
    """When the state of a habit is kept, then a killed rank changes nothing; where the habit is
    refused, the verification is refused. When the state is not kept, then the kind of the first
    difference is named, and its section exists."""
    # The phase decides which rank is killed. Rank 0 alone reads data that is broadcast: after another
    # rank was killed, it has lost a batch or not, as far as it had come.
    phases = ("--phases", "backward" if habit == "broadcast" else "between")
    script = (str(VARIANT), habit)
    found, output, _ = verify(tmp_path / "kept", *phases, script=script)
    assert found == code, output
    found, output, report = verify(tmp_path / "lost", *phases, script=(*script, "--lost"))
    assert found == 1, output
    (phase,) = report["phases"]
    assert phase["difference"]["kind"] == kind, output
    page, _, anchor = phase["difference"]["section"].partition("#")
    assert anchor in anchors(ROOT / page)


def test_every_kind_has_a_section_of_its_page() -> None:
    """When a difference of any kind is found, then the page has a section about it."""
    assert set(KINDS) <= anchors(ROOT / "docs" / "reference" / "verify.md")


@pytest.mark.soak
def test_a_script_that_differs_by_itself_is_refused(tmp_path: Path) -> None:
    """When a script seeds from a clock, then two undisturbed runs differ, and the command makes no
    statement about disturbed runs."""
    code, output, report = verify(
        tmp_path, "--phases", "backward", script=(str(SCRIPT), "--habit", "clock")
    )
    assert (code, report) == (2, {}), output
    assert "two undisturbed runs of the script differ" in output


@pytest.mark.soak
def test_a_loop_without_steps_of_the_session_is_left_after_the_last_step(tmp_path: Path) -> None:
    """When a script trains in a loop of its own that never ends, then its jobs end with the last
    step that is needed, and are identical."""
    code, output, report = verify(
        tmp_path, "--phases", "forward,update,tail", "--json", script=(str(SCRIPT), "--plain")
    )
    assert code == 0, output
    assert json.loads(output) == report
    assert set(results(report).values()) == {"identical"}


@pytest.mark.soak
def test_a_script_that_fails_undisturbed_is_refused_with_its_last_lines(tmp_path: Path) -> None:
    """When the script does not exist, ends with an error, trains too few steps or takes too long,
    then the command says so and exits with 2."""
    script = str(SCRIPT)
    for options, arguments, words in (
        ((), ("missing.py",), "does not exist"),
        (("--phases", "lunch"), (script,), "--phases does not know lunch"),
        ((), (script, "--habit", "evaluate", "--steps", "x"), "invalid int value"),
        ((), (script, "--steps", "1"), "has trained 1 steps on all ranks"),
        (("--limit", "1"), (script,), "has not ended within 1 s"),
        (("--phases", "evaluation"), (script, "--steps", "4"), "nothing was verified"),
    ):
        code, output, report = verify(tmp_path / words[:8], *options, script=arguments)
        assert (code, report) == (2, {}), output
        assert words in output


@pytest.mark.soak
def test_a_job_that_fails_before_its_kill_is_no_success(tmp_path: Path) -> None:
    """When the script does not start again because of a file of the undisturbed job, then the phase
    differs, with the exit code and the last lines of the job, and it is said that no rank was killed
    before."""
    kept = tmp_path / "kept"
    code, output, report = verify(
        tmp_path, "--phases", "forward",
        script=(str(SCRIPT), "--habit", "once", "--keep", str(kept)),
    )  # fmt: skip
    assert code == 1, output
    (phase,) = report["phases"]
    assert (report["verdict"], phase["result"], phase["killed"]) == ("differs", "differs", False)
    assert "the job ended with exit code" in phase["why"]
    assert "FileExistsError" in phase["why"]
    assert "forward      differs (before rank 1 was killed in step 2)" in output


@pytest.mark.soak
def test_a_function_that_counts_its_calls_is_named(tmp_path: Path) -> None:
    """When a function is called again after step 3 because of a kill in step 4, and records how often
    it was called, then the phase of this kill differs, and that of the kill in step 2 is
    identical."""
    code, output, report = verify(
        tmp_path, "--phases", "forward,backward", script=(str(SCRIPT), "--habit", "calls")
    )
    assert code == 1, output
    assert results(report) == {"forward": "identical", "backward": "differs"}
    difference = report["phases"][1]["difference"]
    assert (difference["step"], difference["kind"], difference["after"]) == (3, "rows", True)
