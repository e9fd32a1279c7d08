"""
Write the table and the picture of docs/explanation/peers.md from docs/pictures/peers.jsonl, which `make
bench-peers` has written.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from math import log10
from typing import Any

from tests.benchmarks.peers.systems import ROOT

RESULTS = ROOT / "docs" / "pictures" / "peers.jsonl"
PICTURE = ROOT / "docs" / "pictures" / "peers.svg"
PAGE = ROOT / "docs" / "explanation" / "peers.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
HEAD = (
    "| system | pause | caught up | all ranks again | steps repeated | same parameters | step |",
    "|---|---|---|---|---|---|---|",
)
LEFT, WIDTH, ROW = 190, 640, 30
SCALE = (0.1, 1.0, 10.0, 100.0)
"""The seconds at the lines of the picture. Their distances are equal, because the axis is
logarithmic."""

Job = Mapping[str, Any]  # Any: one line of the results, which are JSON


def main() -> None:
    """
    Write the table into the page, and the picture beside it.
    """
    jobs: dict[str, list[Job]] = {}
    for line in RESULTS.read_text().splitlines():
        job = json.loads(line)
        jobs.setdefault(job["system"], []).append(job)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join([*HEAD, *(row(name, each) for name, each in jobs.items())])
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
    PICTURE.write_text(picture({name: _known(each, "pause") for name, each in jobs.items()}))


def row(name: str, jobs: Sequence[Job]) -> str:
    """
    Return the row of a system in the table.
    """
    whole = _known(jobs, "whole")
    ended = [job for job in jobs if job["finished"]]
    cells = [
        name if len(ended) == len(jobs) else f"{name} ({len(ended)} of {len(jobs)} jobs ended)",
        _spread(_known(jobs, "pause")),
        _spread(_known(jobs, "caught_up")),
        _spread(whole)
        + (f" ({len(whole)} of {len(ended)})" if 0 < len(whole) < len(ended) else ""),
        _numbers([int(job["repeated"]) for job in ended]),
        f"{sum(job['identical'] for job in ended)} of {len(ended)}",
        f"{1000 * statistics.median(_known(jobs, 'step')):.0f} ms" if ended else "none",
    ]
    return f"| {' | '.join(cells)} |"


def _known(jobs: Sequence[Job], measure: str) -> list[float]:
    return [job[measure] for job in jobs if job.get(measure) is not None]


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{middle:.2f} s ({low:.2f} to {high:.2f})"


def _numbers(counts: Sequence[int]) -> str:
    low, high = min(counts, default=0), max(counts, default=0)
    return f"{low}" if low == high else f"{low} to {high}"


def picture(pauses: Mapping[str, Sequence[float]]) -> str:
    """
    Return the picture: one dot for the pause of each job, one row for each system.
    """
    height = ROW * (len(pauses) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH} {height}" '
        'font-family="sans-serif" font-size="13" role="img" '
        'aria-label="Pause after the kill of one rank, by system">',
        f'<rect width="{LEFT + WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for seconds in SCALE:
        x = _x(seconds)
        parts.append(f'<line x1="{x}" y1="0" x2="{x}" y2="{height - ROW}" stroke="#cccccc"/>')
        parts.append(f'<text x="{x}" y="{height - 10}" text-anchor="middle">{seconds:g} s</text>')
    for number, (name, each) in enumerate(pauses.items()):
        y = ROW * number + ROW // 2
        color = "#0072b2" if name.startswith("tft") else "#d55e00"
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        parts += [
            f'<circle cx="{_x(seconds)}" cy="{y}" r="4" fill="{color}" fill-opacity="0.6"/>'
            for seconds in each
        ]
    return "\n".join([*parts, "</svg>", ""])


def _x(seconds: float) -> float:
    low, high = log10(SCALE[0] / 2), log10(SCALE[-1])
    share = (log10(max(seconds, SCALE[0] / 2)) - low) / (high - low)
    return round(LEFT + share * (WIDTH - 30), 1)


if __name__ == "__main__":
    main()
