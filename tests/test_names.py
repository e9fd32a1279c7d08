"""
Names that the project no longer uses do not come back: `names.toml` lists them.
"""

import io
import re
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OLD: dict[str, dict[str, str]] = tomllib.loads((ROOT / "tests" / "names.toml").read_text())
SOURCES = sorted(
    path
    for room in ("tft", "adaptors", "plugins", "tests", "examples")
    for path in (ROOT / room).rglob("*.py")
    if ".venv" not in path.parts and "build" not in path.parts
)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SPACE = frozenset({tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT})


def tokens(path: Path) -> list[tokenize.TokenInfo]:
    """
    Return the tokens of a file.
    """
    return list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))


def may_have_any(text: str) -> bool:
    """
    Return whether a text has an old name anywhere. This is much faster than to find the tokens of
    the text.
    """
    names = OLD["identifiers"].keys() & set(re.findall(r"\w+", text))
    return bool(names or found(text, OLD["prose"]))


def prose(every: Sequence[tokenize.TokenInfo]) -> Iterator[tuple[int, str]]:
    """
    Return the comments and docstrings of a file with their first lines. A docstring is a string
    that is a statement.
    """
    before, depth = tokenize.NEWLINE, 0
    for token in every:
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        statement = token.type == tokenize.STRING and before in SPACE and not depth
        if token.type == tokenize.COMMENT or statement:
            yield token.start[0], token.string
        if token.type not in (tokenize.COMMENT, tokenize.ENCODING):
            before = token.type


def found(text: str, old: dict[str, str]) -> list[str]:
    """
    Return the words of a text that are no longer used.
    """
    words = re.findall(r"[A-Za-z]+", text.lower())
    return sorted(old.keys() & set(words))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_has_no_retired_name(path: Path) -> None:
    """When a source file is read, then none of its identifiers and no word of its prose is on the
    list of retired names."""
    if not may_have_any(path.read_text()):
        return
    every = tokens(path)
    names = [
        f"{path}:{token.start[0]}: {token.string} is called {OLD['identifiers'][token.string]}"
        for token in every
        if token.type == tokenize.NAME and token.string in OLD["identifiers"]
    ]
    words = [
        f"{path}:{line}: {word} is called {OLD['prose'][word]}"
        for line, text in prose(every)
        for word in found(text, OLD["prose"])
    ]
    assert names + words == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_page_has_no_retired_word(path: Path) -> None:
    """When a page is read, then no word of the page is on the list of retired words."""
    lines = path.read_text().splitlines()
    words = [
        f"{path}:{number}: {word} is called {OLD['prose'][word]}"
        for number, line in enumerate(lines, 1)
        for word in found(line, OLD["prose"])
    ]
    assert words == []


@pytest.mark.parametrize("name", OLD["files"])
def test_renamed_file_exists_only_under_its_new_name(name: str) -> None:
    """When a file was renamed, then no file has the old name, and one has the new name."""
    assert not (ROOT / name).exists()
    assert (ROOT / OLD["files"][name]).exists()
