"""
The documentation page on the path of a fault, compared with the functions that a real job calls.

The job loses one rank by a kill, and all its calls are traced.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.jobs import ROOT, run

PAGE = ROOT / "docs" / "explanation" / "fault_path.md"
TRACED = ROOT / "tests" / "e2e" / "traced"
KILL = "kill:rank=2,step=20,phase=backward"
"""A kill in a phase in which the other ranks wait in a collective and must be interrupted."""
AGAIN = 0.001
"""Seconds. As `traced/sitecustomize.py` states, a function that is called again sooner is not
written again."""
INTERRUPTED = "TorchHooks.tft_quiesce"
RUNS = 3


@dataclass(frozen=True, slots=True)
class Call:
    """
    A call of a function of tft or its adaptors in a process of the job.
    """

    at: float
    file: str
    function: str


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Call]:
    """
    Return the calls of all processes, from the kill to the first step that all ranks have trained
    again.

    The page describes ranks that must be interrupted in their collective. If the broken connections
    freed all ranks before the order arrived, the job is run again.
    """
    for _ in range(RUNS):
        found = traced(tmp_path_factory.mktemp("way"))
        if any(call.function == INTERRUPTED for call in found):
            return found
    pytest.fail(f"no rank had to be interrupted in {RUNS} jobs")


def traced(where: Path) -> Sequence[Call]:
    """
    Return the calls of one job, from the kill to the first step that all ranks have trained again.
    """
    traces = where / "traces"
    traces.mkdir()
    paths = [str(TRACED), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"TRACED": str(traces), "PYTHONPATH": os.pathsep.join(paths)}
    outcome = run(
        where / "run", "--chaos", KILL, arguments=("--steps", "25"), environment=environment
    )
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    assert incident["strategy"] == "recover"
    (fault,) = outcome.chaos()
    found = sorted(calls(traces), key=lambda call: call.at)
    end = fault["at"] + incident["seconds"]["total"]
    return [call for call in found if fault["at"] <= call.at <= end]


def calls(traces: Path) -> Iterator[Call]:
    """
    Yield the calls in the trace files.

    The last line of a process that was killed may be incomplete and is then left out.
    """
    for trace in traces.iterdir():
        for line in trace.read_text().splitlines():
            words = line.split(" ", 2)
            if len(words) == 3:
                yield Call(float(words[0]), words[1], words[2])


def sections() -> dict[str, list[tuple[str, str]]]:
    """
    Return the files and functions that the page lists, by heading.
    """
    found = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        heading, _, text = part.partition("\n")
        rows = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", text, re.MULTILINE)
        if rows:
            found[heading] = rows
    return found


def left_out() -> set[str]:
    """
    Return the files and packages that the page leaves out with a reason.
    """
    _, _, text = PAGE.read_text().partition("\n## What is left out\n")
    return set(re.findall(r"^\| `([\w/.]+)` \|", text, re.MULTILINE))


def rooms() -> set[str]:
    """
    Return the packages that the page lists under its heading `The rooms`.
    """
    _, _, text = PAGE.read_text().partition("\n## The rooms\n")
    return set(re.findall(r"^\| `([\w/]+)` \|", text.partition("\n## ")[0], re.MULTILINE))


def missed(way: Sequence[Call], rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """
    Return the rows of the page that were not called after the row before them.
    """
    lacking, after = [], way[0].at
    for row in rows:
        times = (c.at for c in way if (c.file, c.function) == row and c.at >= after - AGAIN)
        if (at := next(times, None)) is None:
            lacking.append(row)
        else:
            after = at
    return lacking


def test_the_functions_of_each_section_run_in_the_order_of_the_page(way: Sequence[Call]) -> None:
    """When a rank is killed, then the functions of each section of the page are called in the order
    of the page."""
    lacking = {heading: missed(way, rows) for heading, rows in sections().items()}

    assert len(lacking) == 9
    assert {heading: rows for heading, rows in lacking.items() if rows} == {}


@pytest.mark.parametrize("numbers", ["156789", "2356789"])
def test_the_sections_run_in_the_order_of_the_page(way: Sequence[Call], numbers: str) -> None:
    """When a rank is killed, then the sections begin one after the other. Another rank may report
    its broken connection before the agent sees the end of the process (section 1). The ranks then
    freeze (sections 2 and 3) before section 1. The new process starts (section 4) meanwhile."""
    begins = {heading[0]: rows[0] for heading, rows in sections().items()}

    assert missed(way, [begins[number] for number in numbers]) == []


def test_the_page_names_every_executed_file(way: Sequence[Call]) -> None:
    """When a file of tft is executed on the way, then the page lists it, or gives the reason why it
    is left out."""
    listed = {file for rows in sections().values() for file, _ in rows}
    without = left_out()
    unnamed = {
        call.file
        for call in way
        if call.file.startswith("tft/")
        and call.file not in listed | without
        and f"{call.file.rpartition('/')[0]}/" not in without
    }

    assert unnamed == set()
    assert not listed & without


def test_the_packages_on_the_page_are_those_of_its_files() -> None:
    """When the page lists files, then its packages are those of the files, at most eight, and every
    listed name exists."""
    listed = {file for rows in sections().values() for file, _ in rows}

    assert {"/".join(file.split("/")[:2]) for file in listed} == rooms()
    assert len(rooms()) <= 8
    assert [name for name in listed | left_out() if not (ROOT / name).exists()] == []
