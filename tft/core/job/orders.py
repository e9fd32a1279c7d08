"""
The table of the orders to ranks. For each order, the table has the time limit, and the phase of the
incident report in which the time of the order is counted. The table also says what the job does
when ranks answer late or cannot carry out the order.

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
    What the job does when ranks have not answered an order within the time limit of the order.
    """

    HANG = "hang"
    """The late ranks count as hanging. Their processes are ended, and a fault of the kind `hang` is
    recorded."""
    LEFT = "did not leave"
    """The processes of the late ranks are ended, but no fault of the kind `hang` is recorded. The
    order was to leave the completed job, and a rank may be late to leave without hanging."""
    AGAIN = "new round"
    """The recovery strategy begins again in a new round. That round first asks every rank for its
    position, which shows which rank does not answer."""
    NETWORK = "network fault"
    """A network fault that names no rank is recorded. Then every rank is asked for its position,
    which shows which ranks cannot be reached."""
    NO_PAUSE = "no pause"
    """The ranks give up waiting at a common step boundary, where a pause or a takeover was to come.
    All ranks continue to train."""
    RENEW = "limit again"
    """The time limit is restarted, up to `Policy.patient` times, because the bus may be unreachable
    for a while. After that, the job does what `OrderRule.late` says."""
    DROP = "dropped"
    """The job stops waiting for the answer to the order, because it can go on without this answer.
    """


class Failed(StrEnum):
    """
    What the job does when a rank answers that it could not carry out an order.
    """

    END_PROCESS = "process ended"
    """The process of the rank is ended, so that another process replaces it."""
    AGAIN = "new round"
    """The recovery strategy begins again in a new round. After `Policy.attempts` failed attempts,
    another strategy is chosen."""
    EXCUSED = "excused"
    """The job continues as if this rank had answered."""
    NO_PAUSE = "no pause"
    """The ranks give up waiting at a common step boundary, where a pause or a takeover was to come.
    All ranks continue to train."""
    NETWORK = "network fault"
    """A network fault that names no rank is recorded."""
    PLAN_AGAIN = "planned again"
    """The last checkpoint of the job is planned again, without the part that this rank could not
    do."""
    IGNORED = "ignored"
    """Nothing is done about the failure, because the job is over and the rank is leaving it."""


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
    """The phase of the incident report in which the time of the order is counted."""
    returns: bool = False
    """True if the order brings ranks back towards the training loop. If a rank cannot carry out
    such an order because it has lost its device context, the process of the rank is replaced."""
    digests: bool = False
    """True if the answer of the rank contains digests of the state that the rank holds."""
    action: str = ""
    """What a rank could not do if the order failed, as the end of a sentence such as "rank 3 could
    not …". Empty: the name of the order is used for this."""

    def seconds(self, policy: Policy) -> float:
        """
        Return the time limit of this kind of order, in seconds.
        """
        limit: float = getattr(policy, self.limit)
        return limit


def _repairs(*, phase: str = "repair", digests: bool, action: str = "") -> OrderRule:
    """
    Return the rule for an order that makes ranks copy, load or restore state before they return to
    their training loops.
    """
    return OrderRule(
        limit="repair", late=Late.HANG, failed=Failed.AGAIN, phase=phase, returns=True,
        digests=digests, action=action,
    )  # fmt: skip


def _groups(limit: LimitName, phase: str) -> OrderRule:
    """
    Return the rule for an order that all ranks carry out together before they return to their
    training loops, such as forming process groups.
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
"""By name of an order to ranks: the time limit of the order, and what the job does if ranks answer
late or cannot carry out the order."""
