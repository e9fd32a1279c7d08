"""
Define the plan: how one incident is handled, from the chosen strategy to the repair of the state.
"""

from dataclasses import dataclass

from tft.core.plan.offers import Offer
from tft.core.plan.repair import Repair


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    The plan for one incident. The plan is made when a strategy is chosen, and holds until training
    continues. If another fault joins the incident, the plan is dropped and a new plan is made.
    """

    strategy: str
    """The built-in strategy that is followed, such as `retry` or `recover`."""
    name: str
    """The name under which a recovery plugin has advised the strategy. Without such advice, the
    name is that of `strategy`."""
    why: str = ""
    """A sentence that says what the strategy does, for the log and the report."""
    step: int | None = None
    """The step from whose end all members continue. None: it is the step of a checkpoint that the
    ranks will find themselves, so it is not known yet."""
    leaving: tuple[int, ...] = ()
    """The ranks that leave the job (strategy `scale_in`)."""
    joining: tuple[int, ...] = ()
    """The ranks that come back to the job (strategy `scale_out`)."""
    replaced: tuple[int, ...] = ()
    """The ranks whose living process is replaced by another process."""
    repair: Repair | None = None
    """How every member gets its state. None: this is not planned yet. It is planned when all
    members can receive orders, because only then the addresses of new processes are known, and the
    states that these processes hold."""

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
"""The plan with which a job begins. The start is handled like an incident in which all ranks have
lost their processes."""
EXIT = Plan(strategy="exit", name="exit", why="nothing is saved")
"""The plan of a job that ends without a last checkpoint."""
