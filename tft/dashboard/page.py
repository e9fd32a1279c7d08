"""
Makes the HTML of the parts of the page from a view, and finds the parts that have changed since the
view before. All texts are made on the server. The script in the browser only inserts them into the
page, and draws the pictures.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tft.dashboard.grid import STATES, changes, counts, reasons
from tft.dashboard.view import View
from tft.launcher.situation import Facts
from tft.report.html import with_code
from tft.report.sentences import part_name
from tft.sentences import ranks_of, seconds

if TYPE_CHECKING:
    from jinja2 import Environment

SECTIONS = ("head", "numbers", "incident", "ranks", "slow", "goodput", "past", "parts")
"""The names of the parts of the page that are sent again when they change. Each part has a template
of the same name."""
MANY = 50
"""The maximum number of entries of a list on the page. `tft report` shows all entries."""
_NAMED = 60  # the maximum number of ranks of one state that the page lists by number
LOW = 0.05
"""If less than this share of a disk is free, the page says that this is little."""
_SIGNS = {"healthy": "✓", "busy": "…", "trouble": "✗", "over": "■"}

_NOTHING: Facts = {"state": "", "command": (), "parts": None, "open_incident": None}
"""The values of the facts that the templates use, while nothing is known about the job."""

Message = dict[str, Any]  # Any: JSON


def environment() -> "Environment":
    """
    Return the templates of the page. They escape every text.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=PackageLoader("tft.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "duration": seconds,
        "share": lambda value: f"{100 * value:.1f} %",
        "size": size,
        "ranks": few,
        "part_name": part_name,
        "code": lambda text: Markup(with_code(text)),
    }
    made.globals |= {"STATES": STATES, "MANY": MANY, "LOW": LOW, "SIGNS": _SIGNS}
    return made


def size(count: int) -> str:
    """
    Return a number of bytes as people write it, such as `12.3 GB`.
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, _ = value / 1000, units.pop(0)
    return f"{value:.3g} {units[0]}"


def few(ranks: list[int]) -> str:
    """
    Return ranks as text. If there are more than `_NAMED`, name only the first `_NAMED`.
    """
    more = len(ranks) - _NAMED
    return f"{ranks_of(ranks[:_NAMED])}{f' and {more} more' if more > 0 else ''}"


class Page:
    """
    The page as it was last drawn.
    """

    def __init__(self) -> None:
        self._templates = environment()
        self._parts = {name: self._templates.get_template(f"{name}.html") for name in SECTIONS}
        self._sections: dict[str, str] = {}
        self._view: View | None = None
        self._points = 0
        """The number of points of the curves that were sent to browsers so far."""

    @property
    def view(self) -> View | None:
        """
        The last view. None: there was none yet.
        """
        return self._view

    def document(self) -> str:
        """
        Return the whole page as HTML, as it is now.
        """
        return self._templates.get_template("page.html").render(
            sections=self._sections, view=self._view
        )

    def update(self, view: View) -> Message:
        """
        Draw another view. Return a message with what has changed; the message is empty if nothing
        has changed that a browser shows.
        """
        told = _told(view)
        drawn = {name: part.render(told) for name, part in self._parts.items()}
        before, self._view = self._view, view
        message: Message = {}
        if changed := {name: t for name, t in drawn.items() if self._sections.get(name) != t}:
            message["sections"] = changed
        self._sections = drawn
        message |= self._ranks(before, view) | self._curves(before, view)
        return message

    def whole(self) -> Message:
        """
        Return a message with the whole content of the page, for a browser that has just connected.
        """
        if self._view is None:
            return {"sections": {}}
        points = list(self._view.curves.points[: self._points])
        return {
            "sections": self._sections,
            "nodes": _nodes(self._view),
            "codes": self._view.ranks.codes,
            "points": points,
            "marks": _marks(self._view),
        }

    def _ranks(self, before: View | None, view: View) -> Message:
        if before is None or _nodes(before) != _nodes(view):
            return {"nodes": _nodes(view), "codes": view.ranks.codes}
        if len(before.ranks.codes) != len(view.ranks.codes):
            return {"nodes": _nodes(view), "codes": view.ranks.codes}
        changed = changes(before.ranks.codes, view.ranks.codes)
        return {"ranks": changed} if changed else {}

    def _curves(self, before: View | None, view: View) -> Message:
        message: Message = {}
        points = view.curves.points
        if before is None or before.curves.version != view.curves.version:
            message["points"] = list(points)
        elif len(points) > self._points:
            message["more"] = list(points[self._points :])
        self._points = len(points)
        if before is None or _marks(before) != _marks(view):
            message["marks"] = _marks(view)
        return message

    def rank(self, rank: int) -> str:
        """
        Return what is known of one rank, as HTML.
        """
        found = None
        letter = ""
        if self._view is not None:
            codes = self._view.ranks.codes
            letter = codes[rank] if 0 <= rank < len(codes) else ""
            facts = self._view.facts or {}
            found = next((r for r in facts.get("ranks", ()) if r["rank"] == rank), None)
        return self._templates.get_template("rank.html").render(
            rank=rank, seen=found, letter=letter
        )


def encoded(message: Message) -> bytes:
    """
    Return a message in the form of server-sent events.
    """
    text = json.dumps(message, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return b"data: " + text.encode() + b"\n\n"


def _told(view: View) -> Mapping[str, object]:
    """
    Return the values that the templates use, by name.
    """
    return {
        "view": view,
        "facts": _NOTHING | (view.facts or {}),
        "counts": counts(view.ranks.codes),
        "by_state": _by_state(view.ranks.codes),
        "odd": _odd(view.facts),
    }


def _by_state(codes: str) -> dict[str, list[int]]:
    """
    Return the ranks in each state, by the letter of the state. Ranks that train are left out.
    """
    found: dict[str, list[int]] = {}
    for rank, letter in enumerate(codes):
        if letter != "t":
            found.setdefault(letter, []).append(rank)
    return found


def _odd(facts: Facts | None) -> list[tuple[int, str]]:
    if facts is None or facts["state"] == "over":
        return []
    return [(odd.rank, odd.reason) for odd in reasons(facts)]


def _nodes(view: View) -> list[tuple[int, str, str]]:
    return [(row.node, row.host, row.ranks) for row in view.ranks.rows]


def _marks(view: View) -> list[tuple[float, float, int]]:
    if view.spent is None:
        return []
    return [(round(start, 2), round(end, 2), number) for start, end, number in view.spent.marks]
