"""
Everything that the page shows of a job at one moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tft.dashboard.curve import Point
from tft.dashboard.grid import NodeRow
from tft.launcher.situation import Facts
from tft.report.goodput import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """
    A state of the job during an incident or its start.
    """

    state: str
    means: str
    seconds: float | None
    """How long it took. None: it is the present state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """
    An incident that is over.
    """

    number: int
    run: int
    """The run in which it was, from 1: `tft run --resume` begins another one."""
    when: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """
    How the time of the job was spent until now.
    """

    share: float
    """The goodput of all runs together."""
    wall: float
    """The time of all runs in seconds."""
    lately: float
    """The goodput of the last minutes."""
    parts: Sequence[Part]
    marks: Sequence[tuple[float, float, int]] = ()
    """The incidents of the last run: begin and end in seconds since the run began, and number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """
    The file system of the run directory.
    """

    free: int
    size: int
    """Both in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """
    The picture of the ranks.
    """

    codes: str
    """A letter for each rank, see `tft.dashboard.grid.STATES`."""
    rows: Sequence[NodeRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """
    The points of the curves. Another `version` means that earlier points have changed.
    """

    points: Sequence[Point]
    version: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """
    What the page shows.
    """

    name: str
    """The name of the run directory."""
    mood: str
    """`healthy`, `busy`, `trouble` or `over`."""
    title: str
    """The state of the job, in a few words."""
    trouble: str = ""
    """What is wrong with the job or with the look at it, as a sentence."""
    facts: Facts | None = None
    """What `tft status --json` says. None: nothing is known."""
    stages: Sequence[Stage] = ()
    past: Sequence[Past] = ()
    spent: Spent | None = None
    remarks: Sequence[str] = ()
    """Sentences about slow ranks, and about those that hold up the job."""
    disk: Disk | None = None
    ranks: Ranks = field(default_factory=lambda: Ranks(codes="", rows=()))
    curves: Curves = field(default_factory=lambda: Curves(points=(), version=(0, 0)))
    advice: Sequence[str] = ()
    """After the end of the job: what to do now."""
