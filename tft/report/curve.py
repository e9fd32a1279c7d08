"""
Draws a curve with marks of incidents, in SVG.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

LEFT, TOP, WIDTH, HEIGHT = 70, 30, 700, 200
"""The upper left corner of the plot, its width and its height, in pixels."""
POINTS = 350
"""The maximum number of points of a curve: one for every two pixels. If there are more values, each
point stands for a group of values: their median, with a band from the smallest to the largest."""
LABELS = 40
"""The maximum number of marks that are drawn with their numbers. If there are more marks, all are
drawn without numbers, because the numbers would cover each other."""
LINE, BAND, MARK = "#0072b2", "#56b4e9", "#d55e00"
"""Colours that colour-blind readers can tell apart."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """
    The mark of an incident in a curve. `start` and `end` are values on the x axis, and `number` is
    the number of the incident. A click on the mark leads to the element of the page with the id
    `anchor`. `text` is the sentence about the incident.
    """

    start: float
    end: float
    number: int
    anchor: str
    text: str


def drawn(
    pieces: Sequence[Sequence[Point]],
    marks: Sequence[Mark],
    *,
    title: str,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
) -> str:
    """
    Return the picture of a curve that consists of `pieces`, with a gap between each two. Return ""
    if there are fewer than two points. `x_text` and `y_text` return the labels of the axes.
    """
    points = [point for piece in pieces for point in piece]
    if len(points) < 2:
        return ""
    left, right = 0.0, max(points[-1][0], *(mark.end for mark in marks), 1e-3)
    low, high = min(0.0, *(y for _, y in points)), max(y for _, y in points)
    high = high if high > low else low + 1.0

    def x(value: float) -> float:
        return LEFT + WIDTH * (min(max(value, left), right) - left) / (right - left)

    def y(value: float) -> float:
        return TOP + HEIGHT * (high - value) / (high - low)

    lines = [_mark(mark, x(mark.start), x(mark.end), few=len(marks) <= LABELS) for mark in marks]
    for part in range(5):
        value = low + (high - low) * part / 4
        lines.append(_rule(LEFT, LEFT + WIDTH, y(value)))
        lines.append(_text(LEFT - 8, y(value) + 4, y_text(value), anchor="end"))
        at = left + (right - left) * part / 4
        lines.append(_text(x(at), TOP + HEIGHT + 20, x_text(at), anchor="middle"))
    size = -(-len(points) // POINTS)
    for piece in pieces:
        groups = [(x(at), y(a), y(b), y(c)) for at, a, b, c in _grouped(piece, size)]
        lines += _piece(groups)
    box = f"{LEFT + WIDTH + 40} {TOP + HEIGHT + 35}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {box}" role="img" '
        f'font-family="sans-serif" font-size="13"><title>{escape(title)}</title>\n'
        + "\n".join(lines)
        + "\n</svg>"
    )


def _grouped(points: Sequence[Point], size: int) -> list[tuple[float, float, float, float]]:
    """
    Divide the points into groups of `size` neighbours. Return for each group the x value of its
    first point, and the least, median and greatest y value.
    """
    groups = [points[place : place + size] for place in range(0, len(points), size)]
    return [
        (group[0][0], min(ys), median(ys), max(ys))
        for group in groups
        if (ys := [y for _, y in group])
    ]


def _piece(groups: Sequence[tuple[float, float, float, float]]) -> list[str]:
    if len(groups) == 1:
        [(x, _, y, _)] = groups
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{LINE}"/>']
    upper = [f"{x:.1f},{most:.1f}" for x, _, _, most in groups]
    lower = [f"{x:.1f},{least:.1f}" for x, least, _, _ in reversed(groups)]
    middle = [f"{x:.1f},{y:.1f}" for x, _, y, _ in groups]
    return [
        f'<polygon points="{" ".join(upper + lower)}" fill="{BAND}" opacity="0.4"/>',
        f'<polyline points="{" ".join(middle)}" fill="none" stroke="{LINE}" stroke-width="1.5"/>',
    ]


def _mark(mark: Mark, start: float, end: float, *, few: bool) -> str:
    label = (
        f'<text x="{start:.1f}" y="{TOP - 8}" text-anchor="middle">{mark.number}</text>'
        if few
        else ""
    )
    return (
        f'<a href="#{mark.anchor}"><title>{escape(mark.text)}</title>'
        f'<rect x="{start:.1f}" y="{TOP}" width="{max(2.0, end - start):.1f}" height="{HEIGHT}" '
        f'fill="{MARK}" opacity="0.6"/>{label}</a>'
    )


def _rule(left: float, right: float, y: float) -> str:
    return (
        f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#808080" '
        'stroke-width="1" stroke-dasharray="1 4"/>'
    )


def _text(x: float, y: float, text: str, *, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
