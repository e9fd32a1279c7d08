"""
The two scripts of `examples/lightning`: the plain one runs without protection, and the other one is
identical after faults.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import ROOT, run

EXAMPLES = ROOT / "examples" / "lightning"


@pytest.mark.soak
def test_an_unchanged_script_is_told_what_would_protect_it(tmp_path: Path) -> None:
    """When a script of Lightning runs without the strategy, then it completes, and `tft run` names
    the strategy at the end."""
    outcome = run(
        tmp_path / "run", script=EXAMPLES / "plain.py", nproc=2,
        arguments=("--dir", str(tmp_path / "own"), "--epochs", "1"),
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    assert "this run was not protected" in outcome.output
    assert "plain.py imports lightning" in outcome.output


@pytest.mark.soak
def test_verify_finds_the_example_identical(tmp_path: Path) -> None:
    """When tft verify kills ranks of the example in each phase, then nothing differs."""
    command = [
        sys.executable, "-m", "tft", "verify", "--json", "--run-dir", str(tmp_path / "runs"),
        str(EXAMPLES / "train.py"), "--dir", str(tmp_path / "own"),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output + errors
    assert json.loads(output)
