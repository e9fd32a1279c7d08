"""
What the site is made of, as facts about files: the navigation, and the files of the repository that pages link to.
"""

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALWAYS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Files outside of docs/ that have a page, whether or not a page links to them."""
REPOSITORY = "repository/"
"""Where the site has its pages for files outside of docs/."""

Navigation = list[dict[str, "str | Navigation"]]


def navigation(index: str) -> Navigation:
    """
    Return the navigation that the text of docs/index.md describes, in the form of mkdocs.

    A heading of level two is a section, a line that ends with a colon begins a part of it, and each item of a list
    is one page: `- [title](path): description`. Raises ValueError for an item of another form.
    """
    found, section, pages = Navigation(), Navigation(), Navigation()
    for line in index.splitlines():
        if line.startswith("## "):
            section = pages = []
            found.append({line[3:]: section})
        elif line.endswith(":") and not line.startswith("-"):
            pages = []
            section.append({line[:-1]: pages})
        elif line.startswith("- "):
            item = re.fullmatch(r"- \[([^\]]+)\]\(([^)#]+\.md)\): .+", line)
            if item is None:
                raise ValueError(f"docs/index.md lists no page in this line: {line}")
            pages.append({item[1].replace("`", ""): item[2]})
    return found


def links(text: str) -> list[str]:
    """
    Return the targets of the links of a page, without its blocks of code.
    """
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"(?ms)^```.*?^```$", "", text))


def target(source: str, link: str) -> str | None:
    """
    Return the file that a link of the file `source` names. Both are paths from the root of the repository. Return
    None if the link names no file: an address of another host, or a heading of the page itself.
    """
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:|/", path):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def linked_files(root: Path = ROOT) -> list[str]:
    """
    Return the files outside of docs/ to which pages link, and those to which these link, as paths from the root.
    """
    waiting = [
        *ALWAYS,
        *(str(page.relative_to(root)) for page in sorted(root.glob("docs/**/*.md"))),
    ]
    seen: dict[str, None] = {}
    for source in waiting:
        if source in seen or not (root / source).is_file():
            continue
        seen[source] = None
        if source.endswith(".md"):
            found = (target(source, link) for link in links((root / source).read_text()))
            waiting += [file for file in found if file and not file.startswith("docs/")]
    return [
        *ALWAYS,
        *sorted(file for file in seen if not file.startswith("docs/") and file not in ALWAYS),
    ]


def page_of(file: str, linked: Iterable[str]) -> str | None:
    """
    Return the path within the site's sources of a file of the repository, or None if the site does not have it.
    """
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if file in linked:
        return REPOSITORY + (file if file.endswith(".md") else f"{file}.md")
    return None


def repository(linked: Iterable[str]) -> Navigation:
    """
    Return the navigation of the pages for files outside of docs/, by directory.
    """
    found: Navigation = []
    directories: dict[str, Navigation] = {"": found}
    for file in linked:
        directory, name = posixpath.split(file)
        if directory not in directories:
            directories[directory] = []
            found.append({directory: directories[directory]})
        directories[directory].append({name: page_of(file, linked) or ""})
    return found


def file_of(page: str) -> str:
    """
    Return the file of the repository whose links a page of the site has, the reverse of `page_of`.
    """
    return page.removeprefix(REPOSITORY) if page.startswith(REPOSITORY) else f"docs/{page}"


LANGUAGES = {".py": "python", ".yml": "yaml", ".toml": "toml"}
DATA = (".json", ".jsonl", ".csv")
"""The ends of the names of files that hold data. The search leaves them out."""


def code_page(file: str, content: str) -> str:
    """
    Return a page that shows a file that is not Markdown.
    """
    head = "---\nsearch:\n  exclude: true\n---\n\n" if file.endswith(DATA) else ""
    name = posixpath.basename(file)
    fence = "`" * (2 + max([1, *map(len, re.findall("`+", content))]))
    language = LANGUAGES.get(posixpath.splitext(name)[1], "text")
    return f"{head}# {file}\n\n{fence}{language}\n{content.rstrip()}\n{fence}\n"
