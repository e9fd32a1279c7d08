"""
Tests that docs/reference/mindio.md and mindio_differences.md list the existing functions and
variables.
"""

import re
from pathlib import Path
from types import ModuleType

import pytest
from mindio_ttp import controller_ttp, environment, framework_ttp
from mindio_ttp.framework_ttp import ttp_decorator

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGES = [(REFERENCE / name).read_text() for name in ("mindio.md", "mindio_differences.md")]


def section(heading: str) -> str:
    """
    Return the text under a heading of one of the two pages.
    """
    [text] = re.findall(rf"(?ms)^## {heading}\n(.*?)(?=^## |\Z)", "\n".join(PAGES))
    return str(text)


def listed(heading: str) -> list[str]:
    """
    Return the first word in backticks of each table row under the heading.
    """
    return re.findall(r"(?m)^\| `(\w+)`", section(heading))


def functions(module: ModuleType) -> set[str]:
    """
    Return the names of the public MindIO functions in a module.
    """
    return {name for name in vars(module) if re.match(r"tft_|set_mindio", name)}


def test_page_has_every_function_once() -> None:
    """When the package has a function, then the page has one row for it. The page has no other
    rows."""
    on_the_page = listed("Functions")
    assert len(on_the_page) == len(set(on_the_page))
    assert set(on_the_page) == functions(framework_ttp) | functions(controller_ttp)


@pytest.mark.parametrize("module", [environment])
def test_page_has_every_variable(module: ModuleType) -> None:
    """When the package reads a variable of MindIO, then the page says what it does."""
    read = set(
        re.findall(r"\"((?:TTP|MINDIO|MINDX|MS)_[A-Z_]+)\"", Path(str(module.__file__)).read_text())
    )
    assert set(listed("Variables")) == read


def test_functions_that_are_never_called_are_documented_so() -> None:
    """When the page says that a function is registered but never called, then the docstring of the
    function says so too. If the docstring says so, the page does too."""
    rows = dict(re.findall(r"(?m)^\| `(\w+)` \| (.*?) \|$", section("Functions")))
    for name, text in rows.items():
        words = getattr(framework_ttp, name, controller_ttp).__doc__ or ""
        assert ("not called" in text) == ("not called by this version" in words), name


def test_other_documented_names_exist() -> None:
    """When the page lists a name of `ttp_decorator` that is not a function of MindIO, then the name
    exists, with a docstring if it is callable."""
    cells = re.findall(r"(?m)^\| (`.*?) \|", section("Other names"))
    names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(names) == len(set(names)) > 0
    found = [getattr(ttp_decorator, name) for name in names]
    assert [each for each in found if callable(each) and not each.__doc__] == []
