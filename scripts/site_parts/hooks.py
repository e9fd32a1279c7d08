"""
Hooks of mkdocs for the site that `make docs` builds.

The pages are written for GitHub, and the site is made of them as they are. The hooks add the navigation in the order of
docs/index.md, a page for each file of the repository that a page links to, the pages of the Python API, and a check
that GitHub and the site read each page alike.
"""

import logging
import posixpath
import re
import xml.etree.ElementTree as etree
from collections import Counter
from html.parser import HTMLParser
from itertools import takewhile

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString
from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from sources import ROOT, code_page, file_of, linked_files, navigation, page_of, repository, target

log = logging.getLogger("mkdocs.hooks.site")

API = {
    "tft": "What a training script imports.",
    "tft.spi": "What an adaptor or a plugin imports.",
    "tft.spi.generators": "What an adaptor imports that keeps random generators of Python and numpy.",
    "tft.spi.plain_values": "What an adaptor imports that keeps attributes of the user's objects.",
    "tft.spi.launcher": "What a program imports that starts ranks itself.",
}
"""The modules whose docstrings have a page, each with its first sentence."""


LONG = 30
"""The most characters of a name in a table that stays on one line."""

# ---------------------------------------------------------------- links


class Links(Treeprocessor):
    """
    Turns links to files of the repository into links to the pages of the site.
    """

    page = ""
    """The path of the page that is being read."""
    linked: tuple[str, ...] = ()

    def run(self, root: etree.Element) -> None:
        """
        Change the links and pictures of a page, and the code in its tables. mkdocs checks them afterwards, at a lower priority.
        """
        for element in root.iter():
            name = {"a": "href", "img": "src"}.get(element.tag)
            link = element.get(name) if name else None
            file = target(file_of(self.page), link) if link else None
            page = page_of(file, self.linked) if file else None
            if name and link and page:
                _, hash_mark, anchor = link.partition("#")
                path = posixpath.relpath(page, posixpath.dirname(self.page) or ".")
                element.set(name, path + hash_mark + anchor)
        # A bar in a cell is written with a backslash, which GitHub takes away.
        for cell in (*root.iter("td"), *root.iter("th")):
            for code in cell.iter("code"):
                break_long_name(code, (code.text or "").replace("\\|", "|"))


def break_long_name(code: etree.Element, text: str) -> None:
    """
    Set the text of code in a cell. A long name may be broken after its dots, slashes and underscores, so that the other
    columns keep their width.
    """
    first, *others = (
        re.findall(r"[^/_.:,]*[/_.:,]+|[^/_.:,]+", text) if len(text) > LONG else [text]
    )
    code.text = AtomicString(first)
    for other in others:
        etree.SubElement(code, "wbr").tail = AtomicString(other)


class Site(Extension):
    """
    Gives Markdown the links of the site, and the anchors that GitHub gives to headings.
    """

    links = Links()

    def extendMarkdown(self, md: Markdown) -> None:
        """
        Register the links before those of mkdocs, which have priority 0.
        """
        md.treeprocessors.register(self.links, "site_links", 5)


def slug(text: str, separator: str) -> str:
    """
    Return the anchor of a heading as GitHub makes it.
    """
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


# ---------------------------------------------------------------- hooks of mkdocs


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """
    Give the site its navigation, and Markdown its links.
    """
    Links.linked = tuple(linked_files())
    sections = navigation((ROOT / "docs/index.md").read_text())
    (reference,) = (section["Reference"] for section in sections if "Reference" in section)
    reference.append({"Python": [{name: f"api/{name}.md"} for name in API]})
    config.nav = [{"Home": "index.md"}, *sections, {"Repository": repository(Links.linked)}]
    config.markdown_extensions.append(Site())
    config.mdx_configs["toc"]["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """
    Add the pages that are not files of docs/.
    """
    for file in Links.linked:
        content = (ROOT / file).read_text()
        page = page_of(file, Links.linked)
        assert page
        text = content if file.endswith(".md") else code_page(file, content)
        files.append(File.generated(config, page, content=text))
    for name, sentence in API.items():
        text = f"# {name}\n\n{sentence}\n\n::: {name}\n"
        files.append(File.generated(config, f"api/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """
    Remember which page is read next.
    """
    Links.page = page.file.src_uri
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """
    Warn of a page that GitHub reads in another way. Return the page unchanged.
    """
    if not page.file.src_uri.startswith("api/"):
        github = MarkdownIt("commonmark").enable("table").render(page.markdown or "")
        difference = Reading.of(html).difference(Reading.of(github))
        if difference:
            log.warning("%s reads differently on GitHub: %s", page.file.src_uri, difference)
    return html


# ---------------------------------------------------------------- reading a page

TEXT = ("h1", "h2", "h3", "h4", "p", "pre", "blockquote", "a", "code", "em", "strong", "img")
COUNTED = frozenset([*TEXT, "ul", "ol", "li", "table", "tr", "th", "td"])
"""The elements whose number is compared."""


class Reading(HTMLParser):
    """
    What a reader sees of a page: its words, and how many elements of each kind it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.words: list[str] = []
        self._skipped = False

    @classmethod
    def of(cls, html: str) -> "Reading":
        """
        Return the reading of a page.
        """
        reading = cls()
        reading.feed(html)
        reading.close()
        return reading

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """
        Count an element. The links beside headings are the site's own.
        """
        self._skipped = tag == "a" and dict(attrs).get("class") == "headerlink"
        if tag in COUNTED and not self._skipped:
            self.elements[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        """
        Go on after the link beside a heading.
        """
        self._skipped = False

    def handle_data(self, data: str) -> None:
        """
        Add the words of a text.
        """
        if not self._skipped:
            self.words += data.split()

    def difference(self, other: "Reading") -> str:
        """
        Return the first difference from the reading on GitHub in words, or nothing if there is none.
        """
        counts = {
            tag: (self.elements[tag], other.elements[tag])
            for tag in sorted(COUNTED)
            if self.elements[tag] != other.elements[tag]
        }
        if counts:
            return ", ".join(
                f"{here} {tag} here and {there} there" for tag, (here, there) in counts.items()
            )
        here, there = "".join(self.words), "".join(other.words)
        pairs = zip(here, there, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if len(here) == len(there) == same:
            return ""
        around = slice(max(0, same - 30), same + 30)
        return f"{here[around]!r} here and {there[around]!r} there"
