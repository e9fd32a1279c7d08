"""
What becomes of the groups, and what is imported when: seen in one rank alone.
"""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.e2e.jobs import ROOT

ALONE = ROOT / "tests" / "megatron" / "alone.py"

LATE = {
    "torch.profiler._cupti_monitor",  # 1 ms: torch asks for it in the first backward
}
"""What is imported after all, with its reason."""


@cache
def alone(*arguments: str) -> dict[str, Any]:  # Any: JSON
    """
    What the script finds.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ALONE), *arguments],
        capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ("--instances", "1"),
        pytest.param(("--instances", "0"), marks=pytest.mark.soak),
        pytest.param(("--instances", "1", "--overlap"), marks=pytest.mark.soak),
    ],
)
def test_groups_are_really_freed_and_pretended_again(arguments: tuple[str, ...]) -> None:
    """
    When two forward and backward passes have used the groups, and they are cleared, twice, then nothing refers
    to any of them any more, Megatron knows its place without them, and the state is what it was.
    """
    found = alone(*arguments)
    assert found["left"] == []
    assert found["pretends"] == "FakeProcessGroup"
    assert found["ranks"] == [0, 1]
    for before, after in (found["digests"][:2], found["digests"][2:]):
        assert after == before


def test_nothing_is_imported_after_the_preload_and_it_can_be_forked() -> None:
    """
    When a rank has been preloaded, then steps, moves and groups import nothing more, no thread was begun, and
    no device was touched.
    """
    found = alone("--instances", "1")
    assert set(found["late"]) - LATE == set()
    assert found["threads"] == 1
    assert not found["cuda"]
