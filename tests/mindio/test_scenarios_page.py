"""
Tests that docs/reference/mindio_scenarios.md names an existing test for every scenario.
"""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reference" / "mindio_scenarios.md").read_text()
VERDICTS = ("the same", "better", "worse", "not there", "other")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("| scenario |", "|---"))
]


@cache
def functions_in(path: str) -> set[str]:
    """
    Return the names of the functions at the top level of a test file.
    """
    tree = ast.parse((TESTS / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


def test_tests_that_rows_name_exist() -> None:
    """When a test is renamed or removed, then the rows that name it fail this test."""
    for scenario, *_, named in ROWS:
        found = re.findall(r"`([^`]+)::(test_\w+)`", named)
        assert found, f"{scenario}: no test"
        assert len(found) == named.count("`") // 2, f"{scenario}: {named}"
        for path, test in found:
            assert test in functions_in(path), f"{scenario}: {path}::{test} is not there"


@cache
def soaked(path: str) -> set[str]:
    """
    Return the tests of a file that run only in `make soak`.
    """
    tree = ast.parse((TESTS / path).read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(ast.unparse(each) == "pytest.mark.soak" for each in node.decorator_list)
    }


def test_rows_mark_the_tests_of_make_soak() -> None:
    """When a test runs only in `make soak`, then every row that names it says so."""
    for path, test, mark in re.findall(r"`([^`]+)::(test_\w+)`( \*soak\*)?", PAGE):
        assert mark or test not in soaked(path), f"{path}::{test} runs in `make soak` only"


def test_rows_have_four_cells_and_a_verdict() -> None:
    """Every row has four cells, and its third cell begins with the comparison to MindIO. No row
    occurs twice in a section."""
    for row in ROWS:
        assert len(row) == 4, row
        assert row[2].startswith(VERDICTS), row[:3]
        assert row[1], row
    for section in PAGE.split("\n## "):
        names = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
        assert len(names) == len(set(names)), section.splitlines()[0]


def test_every_scenario_test_is_named_by_a_row() -> None:
    """When a test of the scenarios is written, then a row names it."""
    for path in Path(__file__).parent.glob("test_scenarios_*.py"):
        if path != Path(__file__):
            name = str(path.relative_to(TESTS))
            for test in functions_in(name):
                assert not test.startswith("test_") or f"`{name}::{test}`" in PAGE, (
                    f"{name}::{test}"
                )
