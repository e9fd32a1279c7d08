"""
A real Megatron job takes part in what its arguments and its environment name, and in nothing else.
"""

from pathlib import Path

import pytest

from tests.e2e.jobs import identical
from tests.megatron.jobs import Undisturbed, train

KILL = "kill:rank=1,step=4,phase=forward"
HA = "--enable-high-availability"


@pytest.mark.soak
def test_what_was_not_switched_on_is_not_done(tmp_path: Path) -> None:
    """
    When high availability alone is on and a rank is killed, then it is not replaced: the others save a last
    checkpoint, and the reason is told.
    """
    outcome = train(tmp_path / "run", "TP1DP4", KILL, more=(HA,))
    assert outcome.code == 3, outcome.output
    (incident,) = outcome.incidents
    assert incident["strategy"] == "dump"
    why_not = {each["strategy"]: each["why_not"] for each in incident["tried"]}
    assert why_not["recover"] == "the adaptor of ranks [0, 2, 3] cannot take part"


@pytest.mark.soak
def test_what_is_refused_is_one_line_of_each_rank(tmp_path: Path) -> None:
    """
    When the environment has a word that is not known, then ranks say so in one line and leave with code 2, and
    the job ends.
    """
    outcome = train(
        tmp_path / "run", "TP1DP4", more=(HA,), environment={"HIGH_AVAILABILITY": "recver,dump"}
    )
    assert outcome.code == 4, outcome.output
    assert "] tft: HIGH_AVAILABILITY is 'recver,dump', in which 'recver'" in outcome.output
    assert "left with code 2 before any rank had joined the job" in outcome.output
    assert "Traceback" not in outcome.output


@pytest.mark.soak
@pytest.mark.parametrize(
    ("more", "words"),
    [((HA, "--enable-worker-reboot"), ""), ((HA,), "Recover"), ((), "retry,recover")],
)
def test_what_was_switched_on_is_done(
    more: tuple[str, ...], words: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """
    When the replacing of ranks is on, by an argument, by the environment beside one, or by that alone, then a
    killed rank is replaced.
    """
    outcome = train(
        tmp_path / "run", "TP1DP4", KILL, more=more, environment={"HIGH_AVAILABILITY": words}
    )
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed("TP1DP4"))
    assert [incident["strategy"] for incident in outcome.incidents] == ["recover"]
