"""
Flipped bits on real megatron-core, found in the digests that every rank records after each step.
"""

from pathlib import Path

import pytest

from tests.e2e.jobs import Outcome
from tests.megatron.copies import read
from tests.megatron.jobs import Undisturbed, train

SHAPE = "TP1DP2"
STEP = 4


def others(outcome: Outcome, calm: Outcome) -> set[tuple[int, str, int]]:
    """
    Return each step, shard and rank whose digest is not that of the undisturbed run.
    """
    found, expected = read(outcome.run_dir), read(calm.run_dir)
    assert found.keys() == expected.keys()
    return {
        (step, shard, rank)
        for step, shards in found.items()
        for shard, held in shards.items()
        for rank, digest in held.items()
        if digest != expected[step][shard][rank]
    }


@pytest.mark.soak
@pytest.mark.parametrize("target", ["master", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("more", [(), ("--fp32",)], ids="-".join)
def test_flip_is_in_the_optimizer_shard_of_its_rank_alone(
    tmp_path: Path, undisturbed: Undisturbed, target: str, more: tuple[str, ...]
) -> None:
    """When bits of a rank's master or moments flip, then in that step the digest of its optimizer
    shard differs, and no other one of any rank. 32-bit parameters have no masters: nothing flips
    then, and the output says so."""
    spec = f"bitflip:rank=1,step={STEP},target={target},bits=2,period=16"
    outcome = train(tmp_path / "run", SHAPE, spec, more=("--copies", *more))
    assert outcome.code == 0, outcome.output
    differ = others(outcome, undisturbed(SHAPE, "--copies", *more))
    if target == "master" and more:
        assert (outcome.chaos(), differ) == ([], set())
        assert "this rank has no master of any tensor" in outcome.output
        return
    (firing,) = outcome.chaos()
    assert firing["evidence"]["elements"]["number"] > 1
    assert min(step for step, _, _ in differ) == STEP
    ((shard, rank),) = {(shard, rank) for step, shard, rank in differ if step == STEP}
    assert (shard.partition(".")[0], rank) == ("optimizer0", 1)


@pytest.mark.soak
def test_flipped_gradient_leaves_all_holders_equal(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When bits of a gradient of one rank flip, then all holders of a shard stay equal, and from
    that step on they differ from the undisturbed run."""
    spec = f"bitflip:rank=1,step={STEP},target=gradient,bits=2,period=16"
    outcome = train(tmp_path / "run", SHAPE, spec, more=("--copies",))
    assert outcome.code == 0, outcome.output
    (firing,) = outcome.chaos()
    assert firing["phase"] == "backward"
    differ = others(outcome, undisturbed(SHAPE, "--copies"))
    assert {rank for step, _, rank in differ if step == STEP} == {0, 1}
    assert min(step for step, _, _ in differ) == STEP
    for step, shards in read(outcome.run_dir).items():
        for shard, held in shards.items():
            assert len(set(held.values())) == 1, (step, shard)
