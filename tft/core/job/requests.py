"""
Own the requests of people that are not completed yet: a pause, and the end of the job.
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
    """The pause that is under way, or that will begin when the job is healthy. None: no pause."""
    result: str = ""
    """The result of the last check: `passed`, or a sentence that says what was found. Empty: no
    check has ended yet."""


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
    """The orders to the nodes to end all their processes. Empty until the ranks have left."""
