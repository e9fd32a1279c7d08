"""
Which rank holds up a real job that stands still, and at which line.
"""

from pathlib import Path

import pytest

from tests.e2e.jobs import job

SCRIPT = Path(__file__).with_name("hanging_job.py")
STEP = 0.03
"""About the seconds of a step, of which 0.02 are a timed wait."""

CASES = {
    "skip": ({1}, "# rank 1 is here", "# the others wait here"),
    "other": ({1}, "# another collective", "other ranks in allreduce of 4 elements"),
    "deadlock": ({0, 1, 2}, "# in another order", "# in another order"),
}
"""For each case the ranks that are named, the line at which they stand, and a part of the reason."""


def number_of(comment: str) -> str:
    """
    Return the line of the script that has this comment, as FILE:LINE, or the comment itself if no
    line has it.
    """
    for number, line in enumerate(SCRIPT.read_text().splitlines(), start=1):
        if comment in line:
            return f"{SCRIPT.name}:{number}"
    return comment


@pytest.mark.parametrize(
    "how", ["skip", *(pytest.param(how, marks=pytest.mark.soak) for how in ("other", "deadlock"))]
)
def test_the_rank_that_holds_up_the_others_is_named(tmp_path: Path, how: str) -> None:
    """When a rank does not enter a collective, enters another one, or two groups wait for each
    other, then the rank and the line of its script are named within three steps and a second, before
    any process is ended. The stacks of all ranks are in a file."""
    ranks, line, why = CASES[how]
    with job(tmp_path / "run", nproc=3, script=SCRIPT, arguments=(how, "80")) as running:
        outcome = running.end(90)
    assert outcome.code == 0, outcome.output[-3000:]
    remarks = outcome.report["remarks"]
    stands = next(each for each in remarks if each["event"] == "job_stands")
    behind = [each["facts"] for each in remarks if each["event"] == "rank_behind"]
    assert {each["rank"] for each in behind} == ranks
    for each in behind:
        assert each["line"].endswith(number_of(line))
        assert number_of(why) in each["why"]
        assert each["seconds"] < 3 * STEP + 1
    ranks_told = {rank for rank in range(3) if f"tft: rank {rank} stands at " in outcome.output}
    assert ranks_told == ranks
    assert "the stacks of all ranks are in logs/stacks-1.txt" in outcome.output
    log = (outcome.run_dir / "logs" / "controller.log").read_text()
    assert log.index("event=rank_behind") < log.index("event=stalled")
    stacks = Path(stands["facts"]["stacks"]).read_text()
    assert all(f"rank {rank} (process 0) after step 59" in stacks for rank in range(3))
    assert stacks.count("in average\n") == 3


@pytest.mark.soak
def test_nobody_is_asked_in_a_job_that_trains(tmp_path: Path) -> None:
    """When all ranks make progress, then no remark is made."""
    with job(tmp_path / "run", nproc=2, script=SCRIPT, arguments=("none", "80")) as running:
        outcome = running.end(90)
    assert (outcome.code, outcome.report["remarks"]) == (0, [])
