"""
The README and the Megatron page agree with the code that they show, and the README's picture with
its report.
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
"""For each example, the text of the page that shows its difference."""
PICTURE = ROOT / "docs" / "pictures" / "incident.svg"


def example_diff(example: str) -> str:
    """
    Return the differences between the ordinary script and the script with tft, without the
    docstring.
    """
    plain, train = (
        (ROOT / "examples" / example / name).read_text().split('"""\n', 2)[2].splitlines()
        for name in ("plain.py", "train.py")
    )
    lines = list(difflib.unified_diff(plain, train, lineterm="", n=1))
    return "\n".join(lines[2:])


@pytest.mark.parametrize("example", EXAMPLES)
def test_readme_shows_the_real_difference_of_the_example_scripts(example: str) -> None:
    """When the README shows the difference between the two example scripts, then it is the real
    one."""
    assert f"```diff\n{example_diff(example)}\n```" in EXAMPLES[example]


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_script_needs_at_most_11_new_lines(example: str) -> None:
    """When a script is made to survive faults, then at most 11 lines are new. Lines that are only
    indented, and those of the example's own records, do not count."""
    lines = example_diff(example).splitlines()
    removed = {line[1:].strip() for line in lines if line.startswith("-")}
    added = [line[1:].strip() for line in lines if line.startswith("+")]
    new = [line for line in added if line and line not in removed and "ecord" not in line]
    assert len(new) <= 11


def test_every_link_of_the_readme_has_an_existing_file() -> None:
    """When the README links to a page, then the page exists."""
    targets = [part.split(")")[0] for part in README.split("](")[1:]]
    assert targets
    assert [t for t in targets if not (ROOT / t.partition("#")[0]).exists()] == []


def test_readme_has_fewer_than_150_lines() -> None:
    """When the README is read, then it has fewer than 150 lines."""
    assert len(README.splitlines()) < 150


def test_picture_shows_the_report_that_is_stored_with_it(tmp_path: Path) -> None:
    """When the picture is drawn again from its report, then the picture is the same. It has a row
    for each rank and a bar for each phase."""
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


def test_picture_script_with_a_single_argument_is_refused() -> None:
    """When the picture script gets one argument, then the script fails and prints the arguments
    that it expects."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/picture", "x"], capture_output=True, text=True, check=False, timeout=60
    )  # fmt: skip
    assert done.returncode == 1
    assert "takes no argument, or a report" in done.stderr
