"""
Own the requests of people that are not finished: a pause, and the end of the job.
"""

from dataclasses import dataclass, field

from tft.core.job.commands import JobOver
from tft.protocol.messages import Order, PauseRequested, StopRequested


@dataclass(slots=True, kw_only=True)
class Pause:
    """
    The pause that was requested last.
    """

    request: PauseRequested | None = None
    """A pause that is under way, or that is pending until the job is healthy."""
    result: str = ""
    """The result of the last check: `passed`, or a sentence that says what was found."""


@dataclass(slots=True, kw_only=True)
class JobEnd:
    """
    The outcome of a job and its reason.
    """

    stop: StopRequested | None = None
    """The request to end the job."""
    outcome: JobOver | None = None
    """How the job ends. None: not decided yet."""
    orders: list[Order] = field(default_factory=list)
    """The orders to the nodes to end all their processes."""
