"""
`tft report` of real jobs: its goodput is that computed by hand from the script's own times, and its
page says what happened. The processes are real, and the adaptor is the fake one.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.e2e.conftest import FAKE
from tests.e2e.jobs import ROOT, Outcome, job, run, strike, until
from tft.cli.main import tft
from tft.report.facts import gather
from tft.report.html import html

TIMED = ROOT / "tests" / "e2e" / "timed_job.py"
STEP = 0.03
WORLD = 3
SLACK, ONE = 0.05, 0.25
"""Seconds by which times may differ, on average, and in one incident."""


def reported(run_dir: Path, *options: str) -> dict[str, Any]:  # Any: JSON
    """
    Return what `tft report --json` prints about a job.
    """
    done = CliRunner().invoke(tft, ["report", str(run_dir), "--json", *options])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def part(goodput: dict[str, Any], kind: str) -> float:  # Any: JSON
    """
    Return the seconds of all parts of a kind.
    """
    return sum(float(each["seconds"]) for each in goodput["parts"] if each["kind"] == kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """
    The times of a job, computed from the rows that its script has written, and from the moments at
    which ranks were killed.
    """

    first: float
    """The end of the first step on all ranks."""
    incidents: tuple[float, ...]
    """For each kill: the seconds until all ranks have ended a step that was begun after it."""
    kept: float
    """The seconds in which steps were computed whose results were kept: for each step, the time
    since the end of the step before or, if a rank was killed meanwhile, since the last rank has
    begun the step."""
    longest: float
    """The longest step that was not interrupted, in seconds."""
    last: float
    """The end of the last step."""


def by_hand(run_dir: Path, kills: Sequence[float]) -> ByHand:
    """
    Compute the times of a job.
    """
    ranks: dict[int, list[dict[str, float]]] = {rank: [] for rank in range(WORLD)}
    for path in run_dir.glob("times-rank*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        ranks[int(path.stem.split("-")[1].removeprefix("rank"))] += rows

    def ended(after: float) -> float:
        """When all ranks have ended the first common step that ends after a moment."""
        ends = [
            {row["step"]: row["end"] for row in rows if row["end"] > after}
            for rows in ranks.values()
        ]
        common = min(set.intersection(*(set(found) for found in ends)))
        return max(found[common] for found in ends)

    first = ended(0.0)
    incidents = tuple(ended(kill) - kill for kill in kills)
    completed = {}  # by step: when the last rank has ended it, in its last computation
    begun = {}
    for step in sorted({row["step"] for rows in ranks.values() for row in rows}):
        last = [[row for row in rows if row["step"] == step][-1:] for rows in ranks.values()]
        completed[step] = max(row["end"] for found in last for row in found)
        begun[step] = max(row["begin"] for found in last for row in found)
    steps = sorted(completed)
    kept, longest = completed[steps[0]] - begun[steps[0]], 0.0
    for before, step in pairwise(steps):
        struck = any(completed[before] - STEP < kill < completed[step] for kill in kills)
        # in a step that was interrupted, survivors wait for the rank that takes part last
        took = completed[step] - (begun[step] if struck else completed[before])
        kept, longest = kept + took, max(longest, 0.0 if struck else took)
    return ByHand(
        first=first, incidents=incidents, kept=kept, longest=longest, last=completed[steps[-1]]
    )


def agree(run_dir: Path, strategies: Sequence[str], took: float) -> None:
    """
    Check the goodput of a job with one incident for each of the strategies against that computed by
    hand. `took` is how long `tft run` took, in seconds.

    The incidents are the same to SLACK, but one may differ by ONE on a busy machine: the script and
    tft look at the clock one after the other. Training is the same as the sum of all kept steps but
    for two steps for each incident and for the start: the first step counts to the incident, and the
    step that was interrupted to training.
    """
    report = reported(run_dir)
    moments = [record["at"] for record in Outcome(code=0, output="", run_dir=run_dir).chaos()]
    kills = len(strategies)
    assert len(moments) == kills
    hand = by_hand(run_dir, moments)
    goodput = report["goodput"]

    assert sum(each["seconds"] for each in goodput["parts"]) == pytest.approx(goodput["seconds"])
    assert [i["strategy"] for i in report["incidents"]] == [*strategies]
    totals = [incident["seconds"]["total"] for incident in report["incidents"]]
    assert totals == pytest.approx(hand.incidents, abs=ONE)
    assert part(goodput, "incident") == pytest.approx(sum(hand.incidents), abs=SLACK * (kills + 4))
    training = hand.last - hand.first - sum(hand.incidents)
    assert part(goodput, "training") == pytest.approx(training, abs=SLACK * (kills + 4))
    steps = 2 * hand.longest * (kills + 1)
    assert part(goodput, "training") == pytest.approx(hand.kept, abs=steps + SLACK * 4)
    # `tft run` starts the controller and waits for its end: that is not in the time of the run
    assert 0 <= took - goodput["seconds"] < 10.0


def struck(run_dir: Path, strategies: Sequence[str], every: int) -> None:
    """
    Train, make a fault every so many steps, and check the goodput. A fault is handled by a strategy:
    a killed rank by `recover`, a memory fault of a device by `retry`.
    """
    faults = {"recover": "kill:{},phase=between", "retry": "raise:{},phase=between,kind=memory"}
    specs = [
        word
        for n, strategy in enumerate(strategies)
        for word in (
            "--chaos",
            faults[strategy].format(f"rank={n % WORLD},step={every * (n + 1)}"),
        )
    ]
    began = time.monotonic()
    outcome = run(
        run_dir, "--adaptor", "fake", *specs, script=TIMED, nproc=WORLD,
        arguments=(str(every * (len(strategies) + 1)), "--seconds", str(STEP)),
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    agree(run_dir, strategies, time.monotonic() - began)


def test_goodput_is_that_computed_by_hand(tmp_path: Path) -> None:
    """When two ranks are killed, then the goodput of the report is that which follows from the times
    that the script has written itself."""
    struck(tmp_path / "run", ("recover", "recover"), every=25)


@pytest.mark.soak
def test_goodput_of_ten_faults_is_that_computed_by_hand(tmp_path: Path) -> None:
    """When there are ten faults one after another, of two kinds, then the goodput of the report is
    that which follows from the times that the script has written itself."""
    struck(tmp_path / "run", ("recover", "recover", "retry", "recover", "recover") * 2, every=60)


@pytest.mark.soak
def test_steps_that_were_lost_are_those_computed_by_hand(tmp_path: Path) -> None:
    """When wrong numbers take all ranks back to a checkpoint, then the time of the steps that were
    computed twice, as the script has written them, counts as computed again."""
    run_dir = tmp_path / "run"
    outcome = run(
        run_dir, "--adaptor", "fake", "--checkpoint-every", "30",
        script=TIMED, nproc=WORLD,
        arguments=("80", "--seconds", str(STEP), "--wrong", "1,55"),
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    report = reported(run_dir)
    twice = [
        row
        for path in run_dir.glob("times-rank0-*.jsonl")
        for row in map(json.loads, path.read_text().splitlines())
    ]
    steps = [row["step"] for row in twice]
    wasted = [
        row["end"] - row["begin"] for n, row in enumerate(twice) if row["step"] in steps[n + 1 :]
    ]
    [incident] = report["incidents"]
    assert incident["steps_lost"] == len(wasted) > 0
    assert part(report["goodput"], "again") == pytest.approx(sum(wasted), rel=0.15)


@pytest.mark.soak
def test_killed_job_is_unfinished_until_it_is_resumed(tmp_path: Path) -> None:
    """When a job runs, its controller is restarted, and then the whole job is killed, then the report
    says so each time, and has the incident from the story. When the job is resumed, then the steps
    after the checkpoint count as computed again, and the report has both runs."""
    run_dir = tmp_path / "run"
    kills = [
        word for step in (30, 100) for word in ("--chaos", f"kill:rank=1,step={step},phase=between")
    ]
    options = ("--adaptor", "fake", "--checkpoint-every", "20", *kills)
    arguments = ("120", "--seconds", "0.02")
    with job(run_dir, *options, script=FAKE, arguments=arguments, nproc=2) as running:
        progress = run_dir / "progress.jsonl"
        until(lambda: progress.exists() and '"step"' in progress.read_text(), "a first step")
        assert reported(run_dir)["result"] == "running"
        strike(running, "controller")
        until(lambda: '"epoch":2' in progress.read_text(), "another controller")
        checkpoint = run_dir / "checkpoints" / "step-00000060" / "manifest.json"
        until(checkpoint.exists, "a checkpoint of step 60")
        until(lambda: reported(run_dir)["steps"] > 60, "a row about a step after it")

    killed = reported(run_dir)
    assert (killed["result"], killed["over"]) == ("unfinished", False)
    assert "step-000000" in killed["checkpoint"]
    assert [each["strategy"] for each in killed["incidents"]] == ["recover"]
    assert any("--resume" in advice for advice in killed["next"])

    outcome = run(run_dir, *options, "--resume", script=FAKE, arguments=arguments, nproc=2)
    assert outcome.code == 0, outcome.output
    resumed = reported(run_dir)
    first, second = resumed["runs"]
    assert (resumed["result"], resumed["steps"]) == ("completed", 120)
    assert (first["controllers"], first["ended"], second["ended"]) == (2, False, True)
    # a run that was killed has no report, and the next one counts its incidents on
    assert (first["incidents"], second["incidents"]) == ([1], [2])
    assert [each["run"] for each in resumed["incidents"]] == [1, 2]
    page = html(gather(run_dir))
    assert page.count('id="incident-1-1"') == page.count('id="incident-2-2"') == 1
    again = max(0, first["last_step"] - second["from_step"])
    times = {each["kind"]: each["times"] for each in first["goodput"]["parts"]}
    assert times["again"] >= again  # and those after the last row
    assert part(first["goodput"], "again") == pytest.approx(times["again"] * 0.02, rel=0.5)
