"""
Define the plan: what is done about an incident.
"""

from dataclasses import dataclass

from tft.core.plan.offers import Offer
from tft.core.plan.repair import Repair


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    What is done about an incident, from the choice of the strategy until training continues. If
    another fault joins, the plan is dropped and a new one is made.
    """

    strategy: str
    """The built-in strategy."""
    name: str
    """The name under which a plugin has advised the strategy. Without advice it is the same as
    `strategy`."""
    why: str = ""
    """A sentence that says what the strategy does."""
    step: int | None = None
    """The step from whose end all members continue. None: the step of a checkpoint that the ranks
    find themselves."""
    leaving: tuple[int, ...] = ()
    """The ranks that leave the job."""
    joining: tuple[int, ...] = ()
    """The ranks that come back."""
    replaced: tuple[int, ...] = ()
    """The ranks with a living process that get another process."""
    repair: Repair | None = None
    """How every member gets its state. None until all members can receive orders: new processes may
    hold state too, and their addresses are not known earlier."""

    @classmethod
    def of(cls, offer: Offer, name: str) -> "Plan":
        """
        Return the plan that carries out an offer.
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
"""The plan with which a job begins: it is handled like a job that has lost all its processes."""
EXIT = Plan(strategy="exit", name="exit", why="nothing is saved")
"""The plan of a job that ends without a last checkpoint."""
