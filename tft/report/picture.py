"""
Draws an incident of a report as a timeline of its ranks, in SVG.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

COLORS = {
    "detect": "#999999",
    "freeze": "#56b4e9",
    "clear": "#0072b2",
    "compare": "#cc79a7",
    "await": "#999933",
    "repair": "#d55e00",
    "rebuild": "#e69f00",
    "rollback": "#882255",
    "resume": "#009e73",
}
"""The colour of each phase. Colour-blind readers can tell the colours apart, on light and on dark
backgrounds."""
SAID = {
    "detect": "the fault is noticed",
    "freeze": "positions are asked for",
    "clear": "the loop is left, broken groups are dropped",
    "compare": "copies are compared",
    "await": "another process starts",
    "repair": "lost state is copied",
    "rebuild": "groups and wrappers are built",
    "rollback": "generators and data are set back",
    "resume": "the next step is trained",
}
TEXT = "#808080"
LEFT, WIDTH, ROW, TOP, LEAST = 70, 700, 30, 30, 2.0
"""In pixels: where the time axis begins, its length, the height of a rank's row, the space above
the ranks, and the width of the shortest bar."""
MOST = 32
"""The maximum number of ranks that a picture shows."""
MARKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
"""The distances in seconds that the marks of a time axis may have."""

Entry = dict[str, Any]  # Any: parsed JSON, described in `docs/reference/report.md`


def drawn(incident: Entry) -> str:
    """
    Return the picture of an incident, which has the form of an entry of `incidents` in a report. If
    there are more than `MOST` ranks, show the ranks with a fault, and then the ranks whose phases
    took longest.
    """
    phases = [phase for phase in incident["phases"] if phase["name"] in COLORS]
    victims = {fault["rank"] for fault in incident["faults"]} - {None}
    ranks, hidden = _shown(phases, victims)
    total = max(incident["seconds"]["total"], 0.001)
    scale = WIDTH / total
    bottom = TOP + ROW * len(ranks)
    lines: list[str] = []
    if hidden:
        lines.append(_text(LEFT, TOP - 10, f"{hidden} further ranks are not shown"))
    for row, rank in enumerate(ranks):
        y = TOP + ROW * row
        lines.append(_text(LEFT - 10, y + 19, f"rank {rank}", anchor="end"))
        lines.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y + 15}" y2="{y + 15}" stroke="{TEXT}" '
                     'stroke-width="1" stroke-dasharray="1 4"/>')  # fmt: skip
        for phase in phases:
            everywhere = phase["rank"] is None and (rank in victims or not victims)
            if phase["rank"] == rank or everywhere:
                lines.append(_bar(phase, y, scale))
        if rank in victims:
            lines.append(f'<path d="M {LEFT - 5} {y + 10} l 10 10 m 0 -10 l -10 10" stroke="#cc0000" '
                         f'stroke-width="2.5"><title>rank {rank} has a fault</title></path>')  # fmt: skip
    lines += _axis(total, scale, bottom)
    lines += _legend([name for name in COLORS if any(p["name"] == name for p in phases)], bottom)
    height = bottom + 50 + 20 * -(-len(COLORS) // 2)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 40} {height}" '
            'font-family="sans-serif" font-size="13">',
            f"<title>{escape(_title(incident))}</title>",
            *lines,
            "</svg>\n",
        ]
    )


def _shown(phases: Sequence[Entry], victims: set[int]) -> tuple[list[int], int]:
    """
    Return the ranks that the picture shows, and the number of ranks that it leaves out. `victims`
    are the ranks with a fault.
    """
    taken: dict[int, float] = {}
    for phase in phases:
        if phase["rank"] is not None:
            length = phase["end"] - phase["start"]
            taken[phase["rank"]] = taken.get(phase["rank"], 0.0) + length
    every = sorted({*taken, *victims}, key=lambda rank: (rank not in victims, -taken.get(rank, 0)))
    return sorted(every[:MOST]), len(every[MOST:])


def _title(incident: Entry) -> str:
    faults = incident["faults"]
    first = faults[0] if faults else {"rank": None, "step": incident["step"]}
    who = "a fault" if first["rank"] is None else f"a fault of rank {first['rank']}"
    what = f"{who} in step {first['step']}" if faults else "no fault"
    return f"{what}; {incident['strategy']}; {1000 * incident['seconds']['total']:.0f} ms"


def _bar(phase: Entry, y: int, scale: float) -> str:
    width = max(LEAST, scale * (phase["end"] - phase["start"]))
    seconds = 1000 * (phase["end"] - phase["start"])
    return (
        f'<rect x="{LEFT + scale * phase["start"]:.1f}" y="{y + 5}" width="{width:.1f}" height="20" '
        f'fill="{COLORS[phase["name"]]}"><title>{phase["name"]}: {seconds:.1f} ms</title></rect>'
    )


def _axis(total: float, scale: float, bottom: int) -> list[str]:
    """
    Return the time axis, with about eight marks.
    """
    step = next((each for each in MARKS if total / each <= 8), 7200.0)
    lines = [
        f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{bottom + 5}" y2="{bottom + 5}" stroke="{TEXT}"/>'
    ]
    for mark in range(int(total / step) + 1):
        x = LEFT + scale * step * mark
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom + 5}" y2="{bottom + 10}" stroke="{TEXT}"/>'
        )
        at = step * mark
        label = f"{1000 * at:.0f} ms" if total < 5 else f"{at:.0f} s"
        lines.append(_text(x, bottom + 25, label, anchor="middle"))
    return lines


def _legend(names: list[str], bottom: int) -> list[str]:
    """
    Return what each colour means, in two columns.
    """
    lines = []
    for place, name in enumerate(names):
        x, y = LEFT + 370 * (place % 2), bottom + 40 + 20 * (place // 2)
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLORS[name]}"/>')
        lines.append(_text(x + 18, y + 11, f"{name}: {SAID[name]}"))
    return lines


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="{TEXT}" text-anchor="{anchor}">{escape(text)}</text>'
