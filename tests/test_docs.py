"""
The documentation agrees with the code: commands, settings, variables, rooms and links.
"""

import dataclasses
import re
from pathlib import Path
from typing import get_args

import click
import pytest
from tft_chaos.spec import Phase

from tft import config
from tft.cli.main import tft
from tft.core.job.commands import JobOver
from tft.core.job.incident_report import SECONDS, job_report
from tft.launcher import exit_codes as verdicts
from tft.launcher.options import settings_of

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])

PROSE = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

DECLARED = [
    thing
    for thing in vars(config).values()
    if dataclasses.is_dataclass(thing) and isinstance(thing, type)
]


def section(page: str, heading: str) -> str:
    """
    Return the text of a page between a heading of level two and the next one.
    """
    text = (ROOT / page).read_text()
    found = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    assert found, f"{page} has no section {heading!r}"
    return found[1]


def rows(text: str) -> dict[str, list[str]]:
    """
    Return the tables of a text: the first word in backticks of each row, with the row's other
    cells.
    """
    table = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
    return {row[0].split("`")[1].split()[0]: row[1:] for row in cells}


def command(name: str) -> click.Command:
    """
    Return a command of `tft` as it is installed.
    """
    found = tft.get_command(click.Context(tft), name)
    assert found is not None
    return found


COMMANDS = tft.list_commands(click.Context(tft))


def options(name: str) -> dict[str, click.Option]:
    """
    Return the options of a command by their names.
    """
    parameters = command(name).get_params(click.Context(command(name)))
    return {each.opts[0]: each for each in parameters if isinstance(each, click.Option)}


def test_every_command_is_documented() -> None:
    """When the page lists commands, then it has a section for each command of tft and no other
    section."""
    text = (ROOT / "docs/reference/commands.md").read_text()
    headings = re.findall(r"^## tft (\w+)$", text, re.MULTILINE)

    assert headings == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented(name: str) -> None:
    """When a command has options, then its table has a row for each option and no other row."""
    documented = {
        option
        for option in rows(section("docs/reference/commands.md", f"tft {name}"))
        if option[0] == "-"
    }

    assert documented == set(options(name))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_default_is_documented(name: str) -> None:
    """When an option has a default that the help shows, then its row shows the same default."""
    documented = rows(section("docs/reference/commands.md", f"tft {name}"))
    for option, declared in options(name).items():
        stated = documented[option][0]
        if declared.required:
            assert stated == "must be given", option
        elif declared.show_default:
            assert stated == str(declared.default), option
        elif declared.is_flag:
            assert stated == "", option


def test_contract_page_names_only_existing_options() -> None:
    """When the contract page names an option, then `tft run` has this option."""
    named = {
        word for word in rows(section("docs/reference/contracts.md", "Commands")) if word[0] == "-"
    }

    assert named <= set(options("run"))
    assert len(named) == 11


def test_contract_page_explains_every_exit_code() -> None:
    """When `tft run` can end with an exit code, then the contract page says what it means."""
    codes = re.findall(
        r"^\| (\d+) \|",
        section("docs/reference/exit_codes.md", "Exit codes of tft run"),
        re.MULTILINE,
    )

    assert set(map(int, codes)) == {*verdicts.RESULTS, verdicts.REFUSED}


def test_contract_page_explains_every_phase_of_a_step() -> None:
    """When the chaos plugin can inject a fault in a phase, then the contract page says where that
    phase is."""
    assert tuple(rows(section("docs/reference/contracts.md", "Step and phases"))) == get_args(Phase)


def test_report_page_has_every_part_of_the_report() -> None:
    """When a report names a time span or a key, then the page on the report has it too."""
    page = section("docs/reference/report.md", "report.json")
    written = job_report(JobOver(result="completed", code=0, why=""), 0, [], [])

    assert all(f'"{name}"' in page for name in (*SECONDS, *written.keys() - {"why"}))
    assert "`why`" in page


def test_page_on_scripts_says_how_to_continue_a_wandb_run() -> None:
    """When a process replaces a lost rank, then the page on scripts says how it continues the wandb
    run instead of starting a second one."""
    text = (ROOT / "docs/howto/scripts.md").read_text()
    calls = re.findall(r"wandb\.init\(([^)]*)\)", text)

    assert calls
    assert all("id=" in call and 'resume="allow"' in call for call in calls)
    assert "without an id it begins a second run" in " ".join(text.split())


@pytest.mark.parametrize("declared", DECLARED, ids=lambda declared: declared.__name__)
def test_every_setting_is_documented(declared: type) -> None:
    """When a setting is declared, then its table has a row with its default, in the same order."""
    documented = rows(section("docs/reference/settings.md", declared.__name__))
    stated = {name: cells[0].strip("`") for name, cells in documented.items()}

    assert stated == {
        setting.name: "" if setting.default is dataclasses.MISSING else str(setting.default)
        for setting in settings_of(declared)
    }
    assert list(stated) == [setting.name for setting in settings_of(declared)]


def test_every_variable_is_documented() -> None:
    """When the code names an environment variable of tft, then the page on settings names it too.
    The page names no other variable."""
    ours = re.compile(r"\bTFT_[A-Z_]+\b")
    sources = [
        path for root in ("tft", "adaptors", "plugins") for path in (ROOT / root).rglob("*.py")
    ]
    used = {name for path in sources for name in ours.findall(path.read_text())}

    assert used == set(ours.findall((ROOT / "docs/reference/settings.md").read_text()))


def test_every_module_is_listed_in_contributing() -> None:
    """When there is a module or package in `tft`, then CONTRIBUTING.md says what it owns."""
    rooms = set(rows(section("CONTRIBUTING.md", "The rooms")))
    found = {
        f"tft/{path.name}" + ("/" if path.is_dir() else "")
        for path in (ROOT / "tft").iterdir()
        if not path.name.startswith("__")
    }

    assert rooms == found | {"adaptors/", "plugins/"}


def test_every_make_target_is_documented() -> None:
    """When the Makefile has a target, then CONTRIBUTING.md says what it does."""
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    table = section("CONTRIBUTING.md", "The commands")

    assert set(re.findall(r"^\| `make ([\w-]+)` ", table, re.MULTILINE)) == set(phony[1].split())


def without_code(text: str) -> str:
    """
    Return a page without its fenced blocks of code.
    """
    return re.sub(r"(?ms)^```.*?^```$", "", text)


def anchors(page: Path) -> set[str]:
    """
    Return the anchors of the headings of a page, as GitHub makes them.
    """
    found: list[str] = []
    for heading in re.findall(r"(?m)^#+ (.*)$", without_code(page.read_text())):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        again = found.count(anchor)
        found.append(f"{anchor}-{again}" if again else anchor)
    return set(found)


def sentences(text: str) -> list[str]:
    """
    Return the sentences of a page's paragraphs and list items, without code blocks, tables and
    headings.

    A link counts as its text, and a span of code counts as one word. A sentence ends at `.`, `!` or
    `?` before a space and a new beginning, at the end of a list item, and at the end of a
    paragraph.
    """
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", without_code(text))
    text = re.sub(r"``.+?``|`[^`]+`", "Code", text, flags=re.DOTALL)
    blocks, current, indented = list[str](), list[str](), False
    for line in [*text.splitlines(), ""]:
        # four spaces after an empty line begin a code block, unless they continue a list item
        indented = line.startswith("    ") and (indented or not current)
        item = re.match(r" *(?:[-*]|\d+\.) (.*)", line)
        if item or indented or not line.strip() or line.startswith(("#", "|", ">")):
            blocks.append(" ".join(current))
            current = [item[1]] if item and not indented else []
        else:
            current.append(line.strip())
    ended = [re.split(r"(?<=[.!?])[)*\"]* +(?=[*(\"\w])", block) for block in blocks]
    return [sentence for block in ended for sentence in block if re.search(r"\w", sentence)]


def length(sentence: str) -> int:
    """
    Return the number of words of a sentence.
    """
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def visible(cell: str) -> int:
    """
    The characters of a cell that count: a link is its text, names in a list and patterns are as long as they are.
    """
    cell = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell)
    return len(re.sub(r"`` .*? ``|(?:`[^`]+`(?: \*soak\*)?(?:, (?:or )?|$))+", "", cell))


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_and_cells_are_short(page: Path) -> None:
    """
    When a page is read, then no sentence has more than 35 words, their average is at most 18, and no cell of a table is
    longer than 120 characters.
    """
    text = page.read_text()
    found = sentences(text)
    tables = [line for line in without_code(text).splitlines() if line.startswith("|")]
    cells = [cell.strip() for line in tables for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    long = [
        *[sentence for sentence in found if length(sentence) > 35],
        *[cell for cell in cells if visible(cell) > 120],
    ]
    average = sum(map(length, found)) / len(found)

    assert long == []
    assert average <= 18


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_an_existing_target(page: Path) -> None:
    """When a page links to a file of this repository, then the file exists, and so does the heading
    that the link names."""
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", without_code(page.read_text())):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_page_is_on_the_index() -> None:
    """When there is a page, then the index has one line with a link to it."""
    lines = (ROOT / "docs/index.md").read_text().splitlines()
    listed = [found[1] for line in lines if (found := re.match(r"- \[[^\]]+\]\(([^)]+)\): ", line))]
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}

    assert sorted(listed) == sorted(pages - {"index.md"})


def test_every_picture_is_drawn_by_a_script_and_known_to_a_test() -> None:
    """When there is a picture in docs, then CONTRIBUTING.md names the script that draws it from a
    real run, a page shows the picture, and a test knows it."""
    table = rows(section("CONTRIBUTING.md", "Pictures"))
    drawn = {
        str(picture.relative_to(ROOT))
        for picture in ROOT.glob("docs/pictures/*")
        if picture.suffix in (".svg", ".png", ".gif", ".jpg", ".webp")
    }
    tests = "".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    shown = "".join(path.read_text() for path in PAGES)

    assert set(table) == drawn
    for picture, (script, *_) in table.items():
        name = Path(picture).name
        assert (ROOT / script.strip("`").split()[0]).is_file(), picture
        assert f"pictures/{name})" in shown, picture
        assert name in tests, picture
