"""
What a person sees of a real job on the console of `tft run`.
"""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.conftest import FAKE
from tests.e2e.jobs import left_behind, run
from tests.e2e.terminals import shown, terminal

LONG = ("100000", "--seconds", "0.02")
"""The arguments of a job that does not end by itself."""


@contextmanager
def no_process_left(run_dir: Path) -> Iterator[None]:
    """
    Kill the processes of a job that are left after the `with` block.
    """
    try:
        yield
    finally:
        for pid in left_behind(run_dir):
            os.kill(pid, signal.SIGKILL)


def rows(text: str) -> list[str]:
    """
    Return the lines that stand in a terminal after this text.
    """
    return [line.split("\r\x1b[K")[-1] for line in text.split("\r\n")]


def test_terminal_shows_progress_incidents_and_a_summary(tmp_path: Path) -> None:
    """When a rank is killed and the job is ended by SIGTERM, then a live line shows the step, the
    incident is one sentence as soon as it is over, and the end is a summary and what to do next.
    Nothing of the live line is left."""
    run_dir = tmp_path / "run"
    words = ("run", "--adaptor", "fake", "--nproc-per-node", "3", "--run-dir", str(run_dir))
    with no_process_left(run_dir), terminal(*words, str(FAKE), *LONG) as (process, ours):
        before = shown(ours, "s/step, 3 ranks", raw=True)
        pid = (run_dir / "pids" / "rank-2.pid").read_text().strip()
        os.kill(int(pid), signal.SIGKILL)
        during = shown(ours, "3 ranks, 1 incident", raw=True)
        process.send_signal(signal.SIGTERM)
        text = before + during + shown(ours, raw=True)
        assert process.wait(20) == 143
        assert left_behind(run_dir) == []

    lines = rows(text)
    assert lines[0] == f"tft: the records of this run are in {run_dir}"
    killed = rf"tft: incident 1: rank 2 \(pid {pid} on 127.0.0.1\) was killed by SIGKILL in step "
    assert re.fullmatch(rf"{killed}\d+; replaced in [\d.]+ m?s; no step lost", lines[1])
    assert (
        lines[2] == "tft: SIGTERM: the job ends after a last checkpoint; a second signal kills it"
    )
    asked = "incident 2: the job was asked to end; the job ended with a last checkpoint"
    assert lines[3] == f"tft: {asked}; no step lost"
    assert re.fullmatch(
        r"tft: \d+ steps in [\d.]+ s; 2 incidents: no step and [\d.]+ m?s lost", lines[4]
    )
    assert lines[5] == f"tft: `tft report {run_dir}` writes a page about the job from its records"
    assert lines[6] == "tft: the job did not complete: SIGTERM was sent to `tft run` on node 0"
    assert lines[7].endswith(f"with --run-dir {run_dir} --resume, continues from it")
    assert lines[8:] == [""]


def test_lines_are_printed_without_a_terminal(tmp_path: Path) -> None:
    """When there is no terminal, then a line about the progress is printed in each interval, and the
    output has no control sequence."""
    outcome = run(
        tmp_path / "run", "--adaptor", "fake", "--progress", "1",
        script=FAKE, arguments=("60", "--seconds", "0.03"), nproc=2,
    )  # fmt: skip
    assert outcome.code == 0
    assert re.search(r"^tft: step \d+, [\d.]+ s/step, 2 ranks$", outcome.output, re.MULTILINE)
    assert "\x1b" not in outcome.output
