"""
Tests that the ranks that hold the same shard, or the same part of the model, hold the same bits.

The ranks are compared after each of two hundred steps.
"""

from pathlib import Path

import pytest

from tests.e2e.jobs import Outcome
from tests.megatron.copies import read
from tests.megatron.jobs import SHAPES, train

STEPS = 200
LIMIT = 400.0
"""The time limit of a job in seconds. It is long, because several processes wait for each other on
few cores in each step."""


def train_long(run_dir: Path, shape: str, *specs: str) -> Outcome:
    """
    Run a job of two hundred steps that records its copies, with the smallest model for its
    pipeline.
    """
    more = ("--copies",) if shape.startswith("PP") else ("--copies", "--layers", "1")
    return train(run_dir, shape, *specs, more=more, steps=STEPS, limit=LIMIT)


def compared(run_dir: Path, shape: str) -> None:
    """
    Compare the recorded digests of all holders in every step.

    Checks that each shard has the holders in its name, that they hold the same values, and that the
    values changed since the step before. Every rank must hold a part of the optimizer and of the
    model. Every shard must have several holders, except the optimizer shards of a single-instance
    optimizer.
    """
    ranks = SHAPES[shape][0]
    steps = read(run_dir)
    assert sorted(steps) == list(range(1, STEPS + 1))
    before: dict[str, str] = {}
    for step, shards in sorted(steps.items()):
        for shard, held in shards.items():
            holders = {int(rank) for rank in shard.partition(".")[2].split("+")}
            assert (step, shard, set(held)) == (step, shard, holders)
            alone = shape.endswith("-one") and shard.startswith("optimizer")
            assert (step, shard, len(holders) == 1) == (step, shard, alone)
            [told] = {(step, shard, digest) for digest in held.values()}
            assert told[2] != before.get(shard), told
            before[shard] = told[2]
        for kind in ("optimizer0", "parameters", "rest"):
            found = [set(held) for shard, held in shards.items() if shard.startswith(kind)]
            assert sorted(rank for holders in found for rank in holders) == list(range(ranks))


@pytest.mark.soak
@pytest.mark.timeout(450)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_holders_of_a_shard_are_equal_after_every_step(shape: str, tmp_path: Path) -> None:
    """When a job trains, then all holders of a shard have the same bits after every step."""
    outcome = train_long(tmp_path / "run", shape)
    assert outcome.code == 0, outcome.output
    compared(tmp_path / "run", shape)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", ["TP1DP4", "TP1DP4-plain", "TP2DP2", "EP2DP4"])
def test_a_replacement_is_equal_to_the_other_holders(shape: str, tmp_path: Path) -> None:
    """When a rank is killed in the middle, then its replacement has the same bits as the other
    holders, after its first step and all later ones."""
    spec = f"kill:rank=1,step={STEPS // 2},phase=forward"
    outcome = train_long(tmp_path / "run", shape, spec)
    assert outcome.code == 0, outcome.output
    assert [i["strategy"] for i in outcome.incidents] == ["recover"]
    compared(tmp_path / "run", shape)
