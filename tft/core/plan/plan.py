"""
Define the plan: the decided reaction to an incident.
"""

from dataclasses import dataclass

from tft.core.plan.offers import Offer
from tft.core.plan.repair import Repair


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    The decided reaction to an incident, from the choice of the strategy until training continues.
    If another fault joins, the plan is void and another plan is made.
    """

    strategy: str
    """The built-in strategy."""
    name: str
    """The name under which the strategy was advised. The same as `strategy` without advice."""
    why: str = ""
    """What the strategy does."""
    step: int | None = None
    """The step to whose end all members are brought. None: the step of a checkpoint that the ranks
    find themselves."""
    leaving: tuple[int, ...] = ()
    """The ranks that leave the job."""
    joining: tuple[int, ...] = ()
    """The ranks that come back."""
    replaced: tuple[int, ...] = ()
    """The living ranks that get another process."""
    repair: Repair | None = None
    """How every member gets its state. None until all members take orders: new processes can hold
    state, too, and only then are their addresses known."""

    @classmethod
    def of(cls, offer: Offer, name: str) -> "Plan":
        """
        Return the plan that follows an offer.
        """
        return cls(
            strategy=offer.strategy,
            name=name,
            why=offer.why,
            step=offer.step,
            leaving=offer.leaving,
            joining=offer.joining,
            replaced=offer.replace,
        )


START = Plan(strategy="retry", name="start", why="the job starts")
"""The plan that a job begins with, as if it had lost all its processes."""
EXIT = Plan(strategy="exit", name="exit", why="nothing is saved")
"""The plan of a job that ends without a last checkpoint."""
