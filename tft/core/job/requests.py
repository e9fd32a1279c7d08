"""
Define the requests of operators and programs that are not completed yet: a pause, and the end of
the job.
"""

from dataclasses import dataclass, field

from tft.core.job.commands import JobOver
from tft.protocol.messages import Order, PauseRequested, StopRequested


@dataclass(slots=True, kw_only=True)
class Pause:
    """
    The pause of the job that was requested last, and the result of the check in the pause.
    """

    request: PauseRequested | None = None
    """The request for the pause that is under way, or that will begin when the job is healthy.
    None: there is no pause."""
    result: str = ""
    """The result of the last check of links and devices: `passed`, or a sentence that says what was
    found. Empty: no check has ended yet, or a new pause has begun since."""


@dataclass(slots=True, kw_only=True)
class JobEnd:
    """
    The end of a job: the request to end it, the outcome of the job, and the last orders to the
    nodes.
    """

    stop: StopRequested | None = None
    """The first request to end the job. None: nobody has requested the end."""
    outcome: JobOver | None = None
    """The outcome of the job: how the job ends, and why. None: the outcome is not decided yet."""
    orders: list[Order] = field(default_factory=list)
    """The orders to the nodes to end all their processes. If the job is completed, these orders are
    given only when the ranks have left. If the job ends in another way, they are given as soon as
    the outcome is decided."""
