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
    A state of the job during an incident, or during the start of the job.
    """

    state: str
    means: str
    seconds: float | None
    """How long the job was in this state. None: the job is still in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """
    An incident that is over.
    """

    number: int
    run: int
    """The number of the run in which the incident happened, from 1. Each `tft run --resume` begins
    a new run."""
    when: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """
    How the time of the job was spent until now.
    """

    share: float
    """The goodput (share of the time in which steps were trained) of all runs together."""
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
    """`free` and `size` of the disk in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """
    What the picture of the ranks shows.
    """

    codes: str
    """The state of each rank as one letter (see `tft.dashboard.grid.STATES`), in the order of the
    ranks."""
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
    """How the job is: `healthy`, `busy`, `trouble` or `over`. This selects the color and the
    sign."""
    title: str
    """The state of the job, in a few words."""
    trouble: str = ""
    """A sentence that says what is wrong with the job, or why the page cannot see the job. Empty:
    nothing is wrong."""
    facts: Facts | None = None
    """The facts that `tft status --json` prints. None: nothing is known about the job."""
    stages: Sequence[Stage] = ()
    past: Sequence[Past] = ()
    spent: Spent | None = None
    remarks: Sequence[str] = ()
    """Sentences about slow ranks, and about those that hold up the job."""
    disk: Disk | None = None
    ranks: Ranks = field(default_factory=lambda: Ranks(codes="", rows=()))
    curves: Curves = field(default_factory=lambda: Curves(points=(), version=(0, 0)))
    advice: Sequence[str] = ()
    """Sentences that say what to do after the end of the job. Empty while the job runs."""
