"""
The site that `make docs` builds: its navigation, its pages, and what fails the build.
"""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scripts.site_parts.sources import (
    Navigation,
    code_page,
    file_of,
    linked_files,
    navigation,
    page_of,
    target,
)

ROOT = Path(__file__).parents[1]
INDEX = (ROOT / "docs/index.md").read_text()

NOTHING_TO_INSTALL = 5
"""The exit code of `scripts/site` where the package index has no mkdocs."""


def pages(parts: Navigation) -> Iterator[str]:
    """
    Yield the pages of a navigation, in its order.
    """
    for part in parts:
        for content in part.values():
            if isinstance(content, str):
                yield content
            else:
                yield from pages(content)


def test_navigation_has_the_pages_of_the_index_in_their_order() -> None:
    """When the site is built, then its navigation has each page that the index lists, in the same order, and its
    sections are the headings of the index."""
    found = navigation(INDEX)

    assert list(pages(found)) == re.findall(r"(?m)^- \[[^\]]+\]\(([^)]+)\)", INDEX)
    assert [name for part in found for name in part] == re.findall(r"(?m)^## (.*)$", INDEX)


def test_navigation_has_every_page() -> None:
    """When there is a page in docs, then it is in the navigation."""
    every = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}

    assert every - set(pages(navigation(INDEX))) == {"index.md"}


def test_item_of_the_index_without_a_page_is_refused() -> None:
    """When an item of the index does not have the form of the others, then there is no navigation without it: the item
    is named."""
    with pytest.raises(ValueError, match=r"lists no page in this line: - Something else"):
        navigation(INDEX + "\n- Something else\n")


def test_title_of_a_page_in_the_navigation_has_no_marks_of_code() -> None:
    """When the index writes a title with code, then the navigation has the words alone."""
    assert navigation("## A\n\n- [The `b` page](b.md): c.\n") == [{"A": [{"The b page": "b.md"}]}]


def test_every_file_to_which_a_page_links_has_a_page() -> None:
    """When a page links to a file outside of docs, then the file exists and has a page, whose links are those of the
    file."""
    linked = linked_files()

    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/gpt/train.py"} <= set(linked)
    for file in linked:
        page = page_of(file, linked)
        assert page
        assert (ROOT / file).is_file()
        assert file_of(page).removesuffix("" if file.endswith(".md") else ".md") == file


def test_link_is_followed_from_the_directory_of_its_page() -> None:
    """When a page links to a file, then the link is read from the page's directory. Other hosts and headings of the
    page itself are no files."""
    assert target("docs/howto/look.md", "../../README.md#use-it") == "README.md"
    assert target("README.md", "docs/index.md") == "docs/index.md"
    assert target("README.md", "https://keepachangelog.com/") is None
    assert target("README.md", "#use-it") is None


def test_page_of_a_file_with_fences_shows_the_whole_file() -> None:
    """When a file has the marks of a block of code itself, then the block of its page has longer ones."""
    assert code_page("a/b.py", "x = '```'\n") == "# a/b.py\n\n`````python\nx = '```'\n`````\n"


def test_page_of_a_file_with_data_is_left_out_of_the_search() -> None:
    """When a page links to a file with data, then its page says that the search leaves it out."""
    assert code_page("a/b.json", "{}\n").startswith("---\nsearch:\n  exclude: true\n---\n")


def test_everything_that_builds_the_site_is_pinned() -> None:
    """When the site is built, then the versions of all that is installed by name are those of pyproject.toml."""
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["docs"]

    assert [each for each in group if "==" not in each] == []


# ---------------------------------------------------------------- the build itself


class Requests(HTMLParser):
    """
    What a browser loads when it shows a page.
    """

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """
        Add the addresses of an element, other than the links that a reader may follow.
        """
        if tag != "a":
            self.addresses += [value for name, value in attrs if name in ("src", "href") and value]


def build(root: Path, to: Path) -> subprocess.CompletedProcess[str]:
    """
    Build the site of a copy of the repository.
    """
    return subprocess.run(
        [ROOT / ".venv-docs/bin/mkdocs", "build", "--strict", "--site-dir", to],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def append(page: Path, paragraph: str) -> None:
    """
    Write a paragraph at the end of a page.
    """
    page.write_text(f"{page.read_text()}\n{paragraph}\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    Return the site as `scripts/site` builds it. The tests are skipped where it cannot be built.
    """
    to = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [ROOT / "scripts/site", "--site-dir", to],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode == NOTHING_TO_INSTALL:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return to


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """
    Return a copy of what the site is made of, whose pages a test may change.
    """
    root = tmp_path / "copy"
    none = shutil.ignore_patterns("__pycache__")
    for directory in ("docs", "examples", "scripts", "tft"):
        shutil.copytree(ROOT / directory, root / directory, ignore=none)
    for file in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml"):
        shutil.copy(ROOT / file, root / file)
    return root


@pytest.mark.soak
@pytest.mark.timeout(700)
def test_site_has_every_page_and_loads_nothing_from_another_host(site: Path) -> None:
    """When the site is built, then it has a page for each page of docs and for each module of the Python API, and no
    page loads anything that is not a file of the site."""
    for page in ROOT.glob("docs/**/*.md"):
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file()
    assert "adopt" in (site / "api/tft.html").read_text()
    assert "tft_classify" in (site / "api/tft.spi.html").read_text()
    for page in site.rglob("*.html"):
        loaded = Requests()
        loaded.feed(page.read_text())
        for address in loaded.addresses:
            path = address.partition("?")[0].partition("#")[0]
            assert address[0] == "#" or page.name == "404.html" or (page.parent / path).exists()
    styles = "".join(style.read_text() for style in site.rglob("*.css"))
    assert re.findall(r"url\(\W?(?:https?:)?//[^)]*\)|@import[^;]*", styles) == []


@pytest.mark.soak
@pytest.mark.timeout(700)
@pytest.mark.skipif(not shutil.which("chromium"), reason="there is no chromium to search with")
def test_search_finds_a_page_without_a_server(site: Path, tmp_path: Path) -> None:
    """When a page is opened from the file system, then the search in it finds other pages."""
    seen = subprocess.run(
        [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
            "--timeout=20000", "--virtual-time-budget=20000", "--dump-dom",
            f"file://{site}/reference/commands.html?q=warm+ranks",
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert re.search(r"\d+ matching documents", seen.stdout)
    assert "warm_ranks.html" in seen.stdout


@pytest.mark.soak
@pytest.mark.timeout(700)
@pytest.mark.usefixtures("site")
def test_faults_of_pages_fail_the_build(copy: Path, tmp_path: Path) -> None:
    """When a page links to a file or a heading that does not exist, is not on the index, or reads in another way on
    GitHub, then the build fails and names each of these."""
    append(copy / "docs/howto/look.md", "[A](../nothing.md) [b](metrics.md#nothing)")
    append(copy / "docs/howto/report.md", "A list:\n- without an empty line before it")
    append(copy / "README.md", "[A](docs/nothing.md)")
    (copy / "docs/howto/forgotten.md").write_text("# A page\n")
    done = build(copy, tmp_path / "site")

    assert done.returncode != 0
    for words in (
        r"howto/look.md.*contains a link '../nothing.md'",
        r"howto/look.md.*contains a link 'metrics.md#nothing'",
        r"howto/report.md reads differently on GitHub",
        r"howto/forgotten.md",
        r"repository/README.md.*contains a link '../nothing.md'",
    ):
        assert re.search(words, done.stderr), words
