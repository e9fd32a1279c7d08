"""
Leave out the comparison of copies in every second group of `TURN` incidents: ranks send no digests,
and the controller asks for none.

Python imports this module first in every process, because its directory is on PYTHONPATH. The
benchmark of what the comparison adds to incidents uses it.
"""

from collections.abc import Iterable

from turns import compares  # type: ignore[import-not-found]  # beside this file, on PYTHONPATH

from tft.core.job.comparison import Comparison
from tft.protocol.messages import RankOrder
from tft.worker.order_executor import Hands, Work

_holders, _will_hold = Comparison.holders, Comparison.will_hold
_carry_out, _compared = Hands.carry_out, Hands._compared
_incident = 0


def holders(self: Comparison) -> tuple[int, ...]:
    """
    Return no ranks in an incident without the comparison.
    """
    return _holders(self) if compares(self._job.incident.number) else ()


def will_hold(self: Comparison, ranks: Iterable[int], step: int) -> tuple[int, ...]:
    """
    Return no ranks in an incident without the comparison.
    """
    return _will_hold(self, ranks, step) if compares(self._job.incident.number) else ()


def carry_out(self: Hands, order: RankOrder) -> Work:
    """
    Record the incident of an order, and carry out the order.
    """
    global _incident
    _incident = order.incident
    return _carry_out(self, order)


def compared(self: Hands, *, alone: bool = False) -> Work:
    """
    Send no digests in an incident without the comparison.
    """
    return _compared(self, alone=alone) if compares(_incident) else Work()


Comparison.holders = holders  # type: ignore[method-assign]
Comparison.will_hold = will_hold  # type: ignore[method-assign]
Hands.carry_out = carry_out  # type: ignore[method-assign]
Hands._compared = compared  # type: ignore[method-assign]
