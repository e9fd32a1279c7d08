"""
The code on the pages: snippets compile, files parse, and every command line has only commands, options and values that
exist. Nothing is run.
"""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent

import click
import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from tft_chaos.spec import parse

from tft.cli.main import tft
from tft.errors import UsageError

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
    ]
)

DATA = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load, "yml": yaml.safe_load}
"""For each language of files, the function that reads a text or raises ValueError or an error of YAML."""
OTHER = frozenset({"", "sh", "bash", "text", "diff", "python", "promql"})
"""The languages of the other blocks. Blocks of shell, and those without a language, may have commands."""

OF_EXAMPLES = frozenset({"--observe", "--loss-limit", "--await-spare"})
"""The options of `tft run` that plugins of the examples add. These plugins are not installed here, and the tests of the
examples run the commands with these options."""
BEGINNINGS = frozenset({"stat"})
"""What a page says to type before the tab key."""


@dataclass(frozen=True, slots=True)
class Snippet:
    """
    A block of code of a page, or code within a sentence, as GitHub reads the page.
    """

    page: Path
    line: int
    language: str
    text: str
    inline: bool = False

    @property
    def place(self) -> str:
        """
        Where the snippet is.
        """
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def snippets() -> tuple[Snippet, ...]:
    """
    Return all code of all pages.
    """
    return tuple(
        snippet
        for page in PAGES
        for token in MarkdownIt("commonmark").enable("table").parse(page.read_text())
        for snippet in of_token(page, token)
    )


def of_token(page: Path, token: Token) -> Iterator[Snippet]:
    """
    Yield the code of one part of a page.
    """
    line = token.map[0] + 1 if token.map else 0
    if token.type in ("fence", "code_block"):
        yield Snippet(page, line, token.info.strip(), token.content)
    for child in token.children or ():
        if child.type == "code_inline":
            yield Snippet(page, line, "", child.content.replace("\\|", "|"), inline=True)


def command_lines(text: str) -> Iterator[list[str]]:
    """
    Yield the words of each command in a text of shell, without comments, pipes and redirections. If the text shows
    prompts, only what follows them is a command.
    """
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    prompts = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in prompts or lines:
        try:
            lexer = shlex.shlex(line.strip(), posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:  # no line of shell: what a program prints, with an apostrophe
            continue
        command: list[str] = []
        for word in [*words, ";"]:
            if word.strip("();<>|&") == "":
                yield command
                command = []
            else:
                command.append(word)


def commands(name: str) -> list[tuple[Snippet, list[str]]]:
    """
    Return the arguments of each call of a program on the pages, each with the snippet that has it.
    """
    return [
        (snippet, words[1:])
        for snippet in snippets()
        if snippet.language in ("", "sh", "bash")
        for words in command_lines(snippet.text)
        if words and words[0] == name
    ]


# ---------------------------------------------------------------- a command line of tft


def is_placeholder(word: str) -> bool:
    """
    Say whether a word stands for a value that the reader chooses: FILE, HOST:PORT, [OPTIONS], ….
    """
    return bool(re.fullmatch(r"\[?\$?[A-Z][A-Z_:.,-]*\]?…?(\.\.\.)?|…|\.\.\.", word))


@cache
def found_command(group: click.Group, name: str) -> click.Command | None:
    """
    Return a command of a group. It is made once, because `tft run` loads all plugins.
    """
    return group.get_command(click.Context(group), name)


def check_command(words: list[str]) -> None:
    """
    Read a command line of `tft` without running it. A last option may be without its value.

    Raises click.UsageError for a command, an option or a value that does not exist.
    """
    context = click.Context(tft, info_name="tft")
    command: click.Command = tft
    words = [word for word in words if not re.fullmatch(r"\[\w+\](\.\.\.)?|…|\.\.\.|\$JOB", word)]
    while isinstance(command, click.Group) and words and not is_placeholder(words[0]):
        found = found_command(command, words[0])
        if found is None:
            raise click.UsageError(f"there is no command {words[0]!r}", context)
        command, words = found, words[1:]
        context = command.context_class(
            command, info_name=found.name, parent=context, **command.context_settings
        )
    if not isinstance(command, click.Group):
        check_options(command, context, words)


def check_options(command: click.Command, context: click.Context, words: list[str]) -> None:
    """
    Read the options of a command, and the values of those options that take a number or one of a few words.
    """
    parser = command.make_parser(context)
    ended = next((each for each in command.params if words and words[-1] in each.opts), None)
    if isinstance(ended, click.Option) and not ended.is_flag:
        words = [*words, "VALUE"]
    added = [word for word in words if word in OF_EXAMPLES] if command.name == "run" else []
    for option in added:
        click.Option([option]).add_to_parser(parser, context)
    given, _, order = parser.parse_args(words)
    for parameter in order:
        if not isinstance(parameter, click.Option) or parameter.name not in given:
            continue
        value = given[parameter.name]
        for each in value if isinstance(value, list) else [value]:
            check_value(parameter, context, each)


def check_value(option: click.Option, context: click.Context, value: object) -> None:
    """
    Convert the value of an option as click does. Paths are not looked up.
    """
    if isinstance(value, str) and not is_placeholder(value):
        if not isinstance(option.type, click.Path):
            option.type.convert(value, option, context)
        if option.name == "chaos":
            parse(value)


# ---------------------------------------------------------------- the tests


def test_every_python_snippet_compiles() -> None:
    """When a page shows Python, then it compiles. It may use `await`, as in the body of a function."""
    checked = [snippet for snippet in snippets() if snippet.language == "python"]
    for snippet in checked:
        compile(dedent(snippet.text), snippet.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    assert len(checked) >= 30


def test_every_file_on_a_page_can_be_read() -> None:
    """When a page shows a file in TOML, JSON or YAML, then a reader of this format takes it. No block has a language
    that this test does not know."""
    blocks = [snippet for snippet in snippets() if not snippet.inline]
    for snippet in blocks:
        assert snippet.language in DATA.keys() | OTHER, snippet.place
        if snippet.language in DATA:
            DATA[snippet.language](snippet.text)


def test_every_command_of_tft_on_a_page_exists() -> None:
    """When a page shows a command of tft, then the command, its options and their values exist."""
    refused = []
    checked = commands("tft")
    for snippet, words in checked:
        try:
            if not (snippet.inline and words and words[0] in BEGINNINGS):
                check_command(list(words))
        except (click.ClickException, UsageError) as error:
            refused.append(f"{snippet.place}: tft {' '.join(words)}: {error}")

    assert refused == []
    assert len(checked) >= 300


def test_every_set_of_options_in_a_variable_exists() -> None:
    """When a page sets TFT_RUN_OPTIONS, then the options are options of `tft run`."""
    found = [
        match[2]
        for snippet in snippets()
        for match in re.finditer(r"TFT_RUN_OPTIONS=(['\"])(.*?)\1", snippet.text)
    ]
    for options in found:
        check_command(["run", *shlex.split(options), "train.py"])

    assert len(found) >= 3


@pytest.mark.parametrize(
    "words",
    [
        ["rum", "train.py"],
        ["run", "--nproc-per-nodes", "4", "train.py"],
        ["run", "--nproc-per-node", "four", "train.py"],
        ["replicas", "--dp", "eight"],
        ["run", "--chaos", "kil:rank=2", "train.py"],
        ["checkpoint", "verfy", "DIR"],
        ["status", "--json", "--run-directory", "DIR"],
    ],
    ids=" ".join,
)
def test_wrong_command_on_a_page_is_noticed(words: list[str]) -> None:
    """When a page has a wrong command, option or value, then the test of commands fails."""
    with pytest.raises(
        (click.ClickException, UsageError),
        match=r"(?i)no command|no such option|not a valid|not one of|requires an|kil",
    ):
        check_command(words)


def test_every_target_of_make_on_a_page_exists() -> None:
    """When a page says `make NAME`, then the Makefile has this target."""
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    named = {words[0] for _, words in commands("make") if words and words[0][0] != "."}

    assert named - set(phony[1].split()) == set()


def test_every_module_that_a_page_runs_exists() -> None:
    """When a page says `python -m` with a module of this repository, then there is this module."""
    named = {
        name
        for snippet in snippets()
        for name in re.findall(r"python3? -m ((?:tft|tests)[\w.]*)", snippet.text)
    }
    missing = [
        name
        for name in named
        if not any(
            (room / name.replace(".", "/")).with_suffix(end).exists()
            for room in (ROOT, ROOT / "plugins")
            for end in ("", ".py")
        )
    ]

    assert missing == []


def test_every_path_on_a_page_exists() -> None:
    """When a page names a file of this repository in code, then there is this file. A path is from the root, from the
    page's own directory in the examples, or from `tests` with the name of a test."""
    rooms = "tft|tests|docs|examples|scripts|adaptors|plugins"
    missing = []
    for snippet in snippets():
        path = snippet.text.partition("::")[0]
        if snippet.inline and re.fullmatch(rf"(?:{rooms})/[\w./-]+", path):
            places: Mapping[str, Path] = {
                "root": ROOT,
                "page": snippet.page.parent,
                "tests": ROOT / "tests",
            }
            if not any((place / path).exists() for place in places.values()):
                missing.append(f"{snippet.place}: {path}")

    assert missing == []


def test_pages_link_to_no_address_of_a_repository() -> None:
    """When a page links to another host, then the host is that of a tool or a format that is named. The repository has no
    public address."""
    hosts = {
        host
        for page in [*PAGES, ROOT / "CHANGELOG.md"]
        for host in re.findall(r"\]\(https?://([^/)]+)", page.read_text())
    }

    assert {
        host for host in hosts if re.search(r"git|codeberg|sourceforge|bitbucket", host)
    } == set()
