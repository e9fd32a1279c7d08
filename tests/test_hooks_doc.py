"""
The page `docs/reference/hooks.md` agrees with `tft/spi`: the same hooks with the same arguments.
"""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from tft.spi import AdaptorSpecs, PluginSpecs, types

PAGE = (Path(__file__).parents[1] / "docs" / "reference" / "hooks.md").read_text()


def specified(specs: type) -> list[str]:
    """
    Return the hooks of a class of specifications in its order, in the form of headings.
    """
    return [
        f"{name}({', '.join(list(inspect.signature(function).parameters)[1:])})"
        for name, function in vars(specs).items()
        if name.startswith("tft_")
    ]


def documented(section: str) -> dict[str, str]:
    """
    Return the headings in a section of the page, and the text under each.
    """
    [text] = re.findall(rf"(?ms)^## {section}\n(.*?)(?=^## |\Z)", PAGE)
    return dict(re.findall(r"(?ms)^### (.*?)\n(.*?)(?=^### |\Z)", text))


@pytest.mark.parametrize(
    ("specs", "section"),
    [(AdaptorSpecs, "Hooks of an adaptor"), (PluginSpecs, "Hooks of a plugin")],
)
def test_every_hook_is_documented_with_its_arguments(specs: type, section: str) -> None:
    """When a hook is specified, then the page has its name and arguments, in the same order."""
    assert list(documented(section)) == specified(specs)
    assert all(text.strip() for text in documented(section).values())


def test_every_adaptor_hook_is_documented_with_its_thread() -> None:
    """When an adaptor's hook is documented, then the page names the thread that calls the hook."""
    silent = [
        hook
        for hook, text in documented("Hooks of an adaptor").items()
        if not re.search(r"(?i)(main|training|control|transfer)\s+thread", text)
    ]
    assert silent == []


def test_every_type_is_documented_with_its_fields() -> None:
    """When a type of `tft.spi` has a field, then its table has a row for the field, in the same
    order."""
    specified_types = {
        name: [field.name for field in dataclasses.fields(kind)]
        if dataclasses.is_dataclass(kind)
        else [each for each in vars(kind) if not each.startswith("_")]
        for name, kind in vars(types).items()
        if inspect.isclass(kind) and kind.__module__ == types.__name__
    }
    shown = {
        name: re.findall(r"(?m)^\| `(\w+)`", text) for name, text in documented("Types").items()
    }
    assert shown == specified_types
