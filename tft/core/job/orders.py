"""
The table of the orders to ranks: the time limit of each order, the phase of the report in which its
time is counted, and what happens when ranks answer late or cannot carry the order out.

`deadlines.py` reacts to late answers, `acknowledgements.py` to failures.
`docs/reference/machine.md` shows the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from tft.core.job.policy import Policy
from tft.protocol.messages import OrderName

LimitName = Literal[
    "freeze", "stop", "repair", "regroup", "rebuild", "hold", "check", "save", "join", "leave"
]
"""The names of the time limits in `Policy` that orders use."""


class Late(StrEnum):
    """
    What the job does when ranks have not answered an order within its limit.
    """

    HANG = "hang"
    """The late ranks hang: their processes are ended and replaced, and the fault is a `hang`."""
    LEFT = "did not leave"
    """The processes of the late ranks are ended and replaced, but the fault is not a `hang`: a rank
    that does not leave its loop need not hang in it."""
    AGAIN = "new round"
    """The strategy begins again in a new round. The freeze of that round shows which rank is
    missing."""
    NETWORK = "network fault"
    """A network fault that names no rank is added to the incident. The freeze that follows shows
    which ranks cannot be reached."""
    NO_PAUSE = "no pause"
    """The pause, or the gathering at a boundary, is given up. All members continue to train."""
    RENEW = "limit again"
    """The limit is restarted, up to `Policy.patient` times, because the bus may be unreachable for
    a while. After that, the reaction in `OrderRule.late` applies."""
    DROP = "dropped"
    """The job waits for the answer no longer, because it does not need it."""


class Failed(StrEnum):
    """
    What the job does when a rank answers that it could not carry out an order.
    """

    END_PROCESS = "process ended"
    """The process of the rank is ended and replaced."""
    AGAIN = "new round"
    """The strategy begins again in a new round. After `Policy.attempts` attempts it counts as
    failed."""
    EXCUSED = "excused"
    """The job continues without the answer of this rank."""
    NO_PAUSE = "no pause"
    """The pause, or the gathering at a boundary, is given up. All members continue to train."""
    NETWORK = "network fault"
    """A network fault that names no rank is added to the incident."""
    PLAN_AGAIN = "planned again"
    """The last checkpoint is planned again, without what this rank could not do."""
    IGNORED = "ignored"
    """Nothing is done, because the rank is leaving the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRule:
    """
    One row of the table `ORDERS`: what applies to one kind of order.
    """

    limit: LimitName
    """The name of the limit in `Policy` within which every rank must answer."""
    late: Late
    """What the job does when ranks have not answered within the limit."""
    most_late: Late | None = None
    """What the job does instead if more than half of the ranks, and at least two, are late. None:
    the same as `late`."""
    failed: Failed
    phase: str
    """The phase of the incident report under which the time of the order is counted."""
    returns: bool = False
    """True if the order is a step on the way back to the training loop. If a rank cannot carry it
    out because it has lost its device context, the process of the rank is replaced."""
    digests: bool = False
    """True if the answer carries digests of the state that the rank holds."""
    action: str = ""
    """What a rank could not do if the order failed, as the end of a sentence such as "rank 3 could
    not …". Empty: the name of the order."""

    def seconds(self, policy: Policy) -> float:
        """
        Return the limit in seconds.
        """
        limit: float = getattr(policy, self.limit)
        return limit


def _repairs(*, phase: str = "repair", digests: bool, action: str = "") -> OrderRule:
    """
    Return the rule of an order that moves or loads state while the ranks return to their loops.
    """
    return OrderRule(
        limit="repair", late=Late.HANG, failed=Failed.AGAIN, phase=phase, returns=True,
        digests=digests, action=action,
    )  # fmt: skip


def _groups(limit: LimitName, phase: str) -> OrderRule:
    """
    Return the rule of an order that all ranks carry out together while they return to their loops.
    """
    return OrderRule(limit=limit, late=Late.AGAIN, failed=Failed.AGAIN, phase=phase, returns=True)


ORDERS: Mapping[OrderName, OrderRule] = {
    "freeze": OrderRule(
        limit="freeze", late=Late.HANG, most_late=Late.RENEW, failed=Failed.END_PROCESS,
        phase="freeze",
    ),
    "stop": OrderRule(
        limit="stop", late=Late.HANG, most_late=Late.RENEW, failed=Failed.END_PROCESS,
        phase="clear",
    ),
    "compare": OrderRule(
        limit="repair", late=Late.HANG, failed=Failed.EXCUSED, phase="compare", digests=True
    ),
    "load": _repairs(digests=False, action="load the checkpoint"),
    "fetch": _repairs(digests=True),
    "restore": _repairs(digests=True),
    "reload": _repairs(digests=True, action="load a checkpoint of its own"),
    "regroup": _groups("regroup", "rebuild"),
    "rebuild": _groups("rebuild", "rebuild"),
    "rollback": _repairs(phase="rollback", digests=False),
    "resume": _groups("regroup", "resume"),
    "hold": OrderRule(
        limit="hold", late=Late.NO_PAUSE, failed=Failed.NO_PAUSE, phase="hold"
    ),
    "check": OrderRule(
        limit="check", late=Late.HANG, most_late=Late.NETWORK, failed=Failed.EXCUSED, phase="check"
    ),
    "release": OrderRule(
        limit="freeze", late=Late.NETWORK, failed=Failed.NETWORK, phase="release"
    ),
    "save": OrderRule(limit="save", late=Late.HANG, failed=Failed.PLAN_AGAIN, phase="save"),
    "commit": OrderRule(limit="save", late=Late.HANG, failed=Failed.PLAN_AGAIN, phase="save"),
    "complete": OrderRule(
        limit="join", late=Late.LEFT, failed=Failed.IGNORED, phase="complete"
    ),
    "end": OrderRule(limit="leave", late=Late.DROP, failed=Failed.IGNORED, phase="end"),
}  # fmt: skip
"""The rule of each order."""
