"""
`docs/machine.md` against the code.
"""

from pathlib import Path

from tft.core.policy import STRATEGIES, Policy
from tft.core.table import TRANSITIONS

TEXT = (Path(__file__).parents[2] / "docs" / "machine.md").read_text()


def test_the_table_of_states_is_the_codes_own() -> None:
    """
    When a state or a transition changes, then the drawing is stale until it changes too.
    """
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in TEXT.split("## States")[1].split("## One incident")[0].splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| state"))
    ]
    drawn = {row[0]: row[2].split(", ") if row[2] else [] for row in rows}
    assert drawn == {str(a): sorted(map(str, b)) for a, b in TRANSITIONS.items()}


def test_the_strategies_and_their_limits_are_named() -> None:
    """
    When a strategy or a limit the text quotes changes, then the text has to.
    """
    for strategy in (*STRATEGIES, "exit"):
        assert f"| `{strategy}` |" in TEXT
    policy = Policy()
    assert f"({policy.respawns} times per rank and incident)" in TEXT
    assert f"largest of {policy.stall_floor:.0f} s, {policy.stall_factor:.0f} median" in TEXT
    assert policy.attempts == 3
