"""
The README and the page for Megatron against the code they show, and the picture of the README against its report.
"""

import difflib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


EXAMPLES = {"gpt": README, "megatron_gpt": (ROOT / "docs/howto/megatron.md").read_text()}
"""Example to the page that shows its difference."""
PICTURE = ROOT / "docs" / "pictures" / "incident.svg"


def example_diff(example: str) -> str:
    """
    What changes from the ordinary script to the one that survives, without the docstring.
    """
    plain, train = (
        (ROOT / "examples" / example / name).read_text().split('"""\n', 2)[2].splitlines()
        for name in ("plain.py", "train.py")
    )
    lines = list(difflib.unified_diff(plain, train, lineterm="", n=1))
    return "\n".join(lines[2:])


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_difference_shown_is_the_difference_there_is(example: str) -> None:
    """
    When one of the two scripts changes, then the page has to.
    """
    assert f"```diff\n{example_diff(example)}\n```" in EXAMPLES[example]


@pytest.mark.parametrize("example", EXAMPLES)
def test_about_ten_lines_change(example: str) -> None:
    """
    When making a script survive takes more than a handful of lines, the claim is not true. Lines
    that are only indented, and those of the example's own records, do not count.
    """
    lines = example_diff(example).splitlines()
    removed = {line[1:].strip() for line in lines if line.startswith("-")}
    added = [line[1:].strip() for line in lines if line.startswith("+")]
    new = [line for line in added if line and line not in removed and "ecord" not in line]
    assert len(new) <= 11


def test_every_page_it_links_to_is_there() -> None:
    """
    When a page is renamed, then the README has to know.
    """
    targets = [part.split(")")[0] for part in README.split("](")[1:]]
    assert targets
    assert [t for t in targets if not (ROOT / t.partition("#")[0]).exists()] == []


def test_it_is_short() -> None:
    """
    When the README grows, then something has to go to a page.
    """
    assert len(README.splitlines()) < 150


def test_the_picture_shows_the_report_beside_it(tmp_path: Path) -> None:
    """
    When the picture is drawn again from its report, then it is the same, and it has a row for each
    rank and a bar for each phase.
    """
    report, again = PICTURE.with_suffix(".json"), tmp_path / "again.svg"
    subprocess.run(
        [sys.executable, ROOT / "scripts/picture", report, again], check=True, timeout=60
    )
    drawn = again.read_text()
    assert drawn == PICTURE.read_text()

    (incident,) = json.loads(report.read_text())["incidents"]
    ranks = {phase["rank"] for phase in incident["phases"]} - {None}
    assert all(f">rank {rank}</text>" in drawn for rank in ranks)
    assert drawn.count("<title>") == 1 + len(incident["phases"]) + len(incident["faults"])


def test_a_picture_of_nothing_is_refused() -> None:
    """
    When the script gets one argument, then it says what it takes.
    """
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/picture", "x"], capture_output=True, text=True, check=False, timeout=60
    )  # fmt: skip
    assert done.returncode == 1
    assert "takes no argument, or a report" in done.stderr
