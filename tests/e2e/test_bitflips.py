"""
Flipped bits in real jobs: what a comparison of the copies finds, and what no copy shows.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import GPT_STEPS
from tests.e2e.jobs import ROOT, Outcome, identical, run

REPLICAS = ROOT / "examples" / "gpt" / "replicas.py"
MASTERS = ("--steps", "12", "--dtype", "bfloat16", "--copies", "4")
KILL = ("--chaos", "kill:rank=3,step=6,phase=forward")


@pytest.mark.soak
def test_flipped_gradient_gives_equal_but_other_copies_on_all_ranks(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When bits of one rank's gradient flip before its all-reduce, then nothing is reported. The
    losses of all ranks are other ones from the next step on, and all ranks end with equal copies."""
    # two bits of the exponent: a change of the mantissa alone may leave the rounded losses as they are
    spec = "bitflip:rank=2,step=9,target=gradient,tensor=1,period=32,bit=26,bits=2"
    options = ("--chaos", spec, "--last-step", "12")
    outcome = run(tmp_path / "run", *options, arguments=("--steps", str(GPT_STEPS)))
    assert (outcome.code, outcome.incidents) == (0, []), outcome.output
    (firing,) = outcome.chaos()
    assert (firing["rank"], firing["step"], firing["phase"]) == (2, 9, "backward")
    assert firing["evidence"]["elements"]["number"] > 1

    calm = gpt_undisturbed.rows()
    differ = {place for place, loss in outcome.rows().items() if loss != calm[place]}
    assert differ == {(rank, step) for rank in range(4) for step in (10, 11, 12)}
    finals = outcome.finals().values()
    assert len(finals) == 4
    for name in ("parameters", "optimizer", "scheduler"):
        assert len({final[name] for final in finals}) == 1, name


@pytest.mark.soak
@pytest.mark.parametrize(
    "keys",
    [
        "target=param,bits=3",
        "target=param,tensor=2,period=128B,bit=0",
        "target=exp_avg,tensor=1,element=5,bit=31",
        "target=exp_avg_sq,tensor=3,period=32,bits=4",
    ],
)
def test_flipped_bits_of_the_state_are_found_when_another_rank_is_lost(
    tmp_path: Path, gpt_undisturbed: Outcome, keys: str
) -> None:
    """When bits of one rank's state flip, and another rank is lost before the next all-reduce, then
    the first rank has a fault of kind `corruption`, and losses and final state are those of the
    undisturbed run."""
    flip = ("--chaos", f"bitflip:rank=1,step=5,{keys}")
    outcome = run(tmp_path / "run", *flip, *KILL, arguments=("--steps", str(GPT_STEPS)))
    assert outcome.code == 0, outcome.output
    found_as_corruption(outcome)
    identical(outcome, gpt_undisturbed)


@pytest.mark.soak
def test_flipped_bits_of_a_master_are_found_when_another_rank_is_lost(tmp_path: Path) -> None:
    """When bits of a 32-bit master flip on one of four ranks that hold it, and another rank is lost
    in the next step, then the first rank has a fault of kind `corruption`, and losses and final
    state are those of the undisturbed run."""
    how: dict[str, Any] = {"script": REPLICAS, "arguments": MASTERS}
    undisturbed = run(tmp_path / "undisturbed", **how)
    # the lowest bit: the rounded parameter does not show it
    flip = ("--chaos", "bitflip:rank=1,step=5,target=master,tensor=2,element=9,bit=0")
    outcome = run(tmp_path / "run", *flip, *KILL, **how)
    assert outcome.code == 0, outcome.output
    found_as_corruption(outcome)
    identical(outcome, undisturbed)


def found_as_corruption(outcome: Outcome) -> None:
    """
    Check that the flip has happened once, and was found in the incident of the rank that was lost.
    """
    assert sorted(firing["rank"] for firing in outcome.chaos()) == [1, 3]
    (incident,) = outcome.incidents
    assert [(fault["kind"], fault["rank"]) for fault in incident["faults"]] == [
        ("process", 3),
        ("corruption", 1),
    ]
