"""
The README against the code it shows.
"""

import difflib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


EXAMPLES = ("gpt", "megatron_gpt")


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
    When one of the two scripts changes, then the README has to.
    """
    assert f"```diff\n{example_diff(example)}\n```" in README


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
