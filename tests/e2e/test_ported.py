"""
Scripts as people write them, and their forms with tft (`examples/ported`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.jobs import ROOT, Outcome, run
from tests.e2e.test_verify import results, verify

PORTED = ROOT / "examples" / "ported"
SCRIPTS = ("language", "vision")
PHASES = ("forward", "backward", "collective", "update", "between", "tail")


def final(where: Path) -> list[dict[str, Any]]:  # Any: torch has no types here
    """
    Return the state of the model at the end, by rank.
    """
    return [torch.load(where / f"final-{rank}.pt") for rank in range(2)]


def equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """
    Return whether two final states are equal, bit for bit.
    """
    return all(
        rank.keys() == twin.keys() and all(rank[name].equal(twin[name]) for name in twin)
        for rank, twin in zip(found, expected, strict=True)
    )


def trained(where: Path, name: str, *specs: str) -> Outcome:
    """
    Run the form with tft, with faults, and check that its exit code is 0.
    """
    where.mkdir()
    options = [word for spec in specs for word in ("--chaos", spec)]
    outcome = run(
        where / "run", *options, script=PORTED / f"{name}_tft.py", nproc=2,
        arguments=("--out", str(where)),
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    return outcome


def rows(where: Path) -> list[Any]:  # Any: JSON
    """
    Return the rows that the script has recorded, of both ranks.
    """
    found = []
    for rank in range(2):
        path = where / "run" / f"records-rank{rank}.jsonl"
        found += (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
    return found


@pytest.mark.soak
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_ported_script_is_identical_in_each_phase(tmp_path: Path, name: str) -> None:
    """When a script was ported by the docs, then `tft verify` finds it identical in each phase."""
    code, output, report = verify(tmp_path, script=(str(PORTED / f"{name}_tft.py"),))
    assert code == 0, output
    assert {results(report)[phase] for phase in PHASES} == {"identical"}


@pytest.mark.soak
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_ported_script_ends_alike_after_two_kills_in_one_incident(
    tmp_path: Path, name: str
) -> None:
    """When a rank is killed, and its replacement or the other rank in the same incident, then the
    final state is that of the undisturbed run, and each row is there once."""
    trained(tmp_path / "calm", name)
    outcome = trained(
        tmp_path / "killed", name,
        "kill:rank=1,step=5,phase=backward", "kill:rank=1,phase=repair,order=fetch",
        "kill:rank=0,step=14,phase=update", "kill:rank=1,step=20,phase=tail",
    )  # fmt: skip
    assert len(outcome.incidents) >= 3
    assert equal(final(tmp_path / "killed"), final(tmp_path / "calm"))
    assert rows(tmp_path / "killed") == rows(tmp_path / "calm") != []


@pytest.mark.soak
def test_the_form_with_tft_ends_as_the_plain_script(tmp_path: Path) -> None:
    """When the plain script is started by torchrun, and its form with tft by `tft run`, then their
    final states are equal, bit for bit."""
    plain = tmp_path / "plain"
    plain.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(PORTED / "language.py"), "--out", str(plain)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trained(tmp_path / "tft", "language")
    assert equal(final(tmp_path / "tft"), final(plain))


@pytest.mark.soak
def test_the_plain_scripts_train(tmp_path: Path) -> None:
    """When the plain script of images is started by torchrun, then it trains and evaluates."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(PORTED / "vision.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [10, 20, 30]
