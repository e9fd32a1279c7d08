"""
What becomes of a script's own objects in an incident: seen in one rank alone.
"""

import json
import os
import subprocess
import sys
from typing import Any

from tests.e2e.jobs import ROOT

ONCE = ROOT / "tests" / "megatron" / "once.py"


def once(*arguments: str) -> dict[str, Any]:  # Any: JSON
    """
    What the script finds.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ONCE), *arguments],
        capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_evaluation_that_is_broken_off_leaves_nothing_switched() -> None:
    """
    When a fault strikes while the model is evaluated, with overlapped gathering of parameters off, then all of
    it is as it was handed over: as it is in a rank that takes the place of another.
    """
    found = once("evaluation", "--instances", "1", "--overlap")
    assert found["between"]["hooks"] == 0
    assert not any(found["between"]["training"])
    assert found["after"] == found["before"]
    assert found["after"]["hooks"] == found["after"]["modules"]
    assert found["after"]["gathers"]
