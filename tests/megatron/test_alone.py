"""One rank in a process of its own: the release of its groups, and the modules that it imports
after the preload."""

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
    "torch.profiler._cupti_monitor",  # torch imports it in the first backward pass, in 1 ms
}
"""Modules that are imported although the rank was preloaded, with the reasons."""


@cache
def alone(*arguments: str) -> dict[str, Any]:  # Any: JSON
    """
    Run `alone.py` with these arguments and return the JSON that the script prints.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ALONE), *arguments],
        capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.soak
@pytest.mark.parametrize(
    "arguments", [("--instances", "1"), ("--instances", "0"), ("--instances", "1", "--overlap")]
)
def test_cleared_groups_have_no_references_left(arguments: tuple[str, ...]) -> None:
    """When two forward and backward passes have used the groups, and the groups are cleared, twice,
    then no object refers to them any more, Megatron knows its ranks and sizes without them, and the
    state is unchanged."""
    found = alone(*arguments)
    assert found["left"] == []
    assert found["pretends"] == "FakeProcessGroup"
    assert found["ranks"] == [0, 1]
    for before, after in (found["digests"][:2], found["digests"][2:]):
        assert after == before


def test_a_preloaded_rank_imports_no_further_module_and_can_be_forked() -> None:
    """When a rank has been preloaded, then steps, transfers and groups import no further module, no
    thread was started, and no device was used."""
    found = alone("--instances", "1")
    assert set(found["late"]) - LATE == set()
    assert found["threads"] == 1
    assert not found["cuda"]
