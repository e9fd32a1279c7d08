"""A real Megatron job uses the strategies that its arguments and its environment enable, and no
others."""

from pathlib import Path

import pytest

from tests.e2e.jobs import identical
from tests.megatron.jobs import Undisturbed, train

KILL = "kill:rank=1,step=4,phase=forward"
HA = "--enable-high-availability"


@pytest.mark.soak
def test_a_strategy_that_is_not_enabled_is_not_used(tmp_path: Path) -> None:
    """When only high availability is enabled and a rank is killed, then it is not replaced: the
    others save a last checkpoint, and the reason is reported."""
    outcome = train(tmp_path / "run", "TP1DP4", KILL, more=(HA,))
    assert outcome.code == 3, outcome.output
    (incident,) = outcome.incidents
    assert incident["strategy"] == "dump"
    why_not = {each["strategy"]: each["why_not"] for each in incident["tried"]}
    assert (
        why_not["recover"] == "the adaptor of ranks [0, 2, 3] does not support the strategy recover"
    )


@pytest.mark.soak
def test_an_unknown_word_ends_each_rank_with_one_line(tmp_path: Path) -> None:
    """When the environment has an unknown word, then the ranks report this word in one line and
    exit with code 2, and the job ends."""
    outcome = train(
        tmp_path / "run", "TP1DP4", more=(HA,), environment={"HIGH_AVAILABILITY": "recver,dump"}
    )
    assert outcome.code == 4, outcome.output
    assert (
        "] tft: HIGH_AVAILABILITY is 'recver,dump', which contains the unknown word 'recver'"
        in outcome.output
    )
    assert "left with code 2 before any rank had joined the job" in outcome.output
    assert "Traceback" not in outcome.output


@pytest.mark.soak
@pytest.mark.parametrize(
    ("more", "words"),
    [((HA, "--enable-worker-reboot"), ""), ((HA,), "Recover"), ((), "retry,recover")],
)
def test_a_killed_rank_is_replaced_when_that_is_enabled(
    more: tuple[str, ...], words: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When the replacement of ranks is enabled by an argument, by the environment beside an
    argument, or by the environment alone, then a killed rank is replaced."""
    outcome = train(
        tmp_path / "run", "TP1DP4", KILL, more=more, environment={"HIGH_AVAILABILITY": words}
    )
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed("TP1DP4"))
    assert [incident["strategy"] for incident in outcome.incidents] == ["recover"]
