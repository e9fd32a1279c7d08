"""
Scripted jobs that have trained for some steps, for the tests of the state machine.
"""

from typing import Any

from tft.core.job.policy import STRATEGIES, Policy
from tft.core.job.transitions import State
from tft.protocol.messages import Exited, Order
from tft.testing.scripted import ScriptedJob

POLICY = set(Policy.__dataclass_fields__)


def trained(world: int = 4, steps: int = 3, **facts: Any) -> ScriptedJob:  # Any: named fields
    """
    Return a healthy job with an adaptor that supports every strategy, after `steps` steps.

    `facts` are limits of the policy and fields of the job.
    """
    limits = {name: value for name, value in facts.items() if name in POLICY}
    rest = {name: value for name, value in facts.items() if name not in POLICY}
    job = ScriptedJob(world, Policy(**limits), **{"strategies": STRATEGIES, **rest}).start()
    job.train(steps)
    assert job.state is State.HEALTHY
    job.said.clear()
    job.tells.clear()
    return job


def names(orders: list[Order]) -> list[str]:
    """
    Return the type names of orders, one for each order.
    """
    return [type(order).__name__ for order in orders]


def strategies(job: ScriptedJob) -> list[str]:
    """
    Return the strategy of each closed incident, in order.
    """
    return [incident.decision.strategy for incident in job.machine.incidents]


def tried(job: ScriptedJob) -> dict[str, str]:
    """
    Return the strategies that the newest closed incident passed over, with the reason for each.
    """
    return dict(job.machine.incidents[-1].decision.tried)


def take_over(job: ScriptedJob, local_state: dict[int, str]) -> None:
    """
    Move rank 1 to a process on another node, and end its first process.

    The node of the first process reports the given rank-local state of that process.
    """
    job.script.deaf = {0}
    job.notice(1, "straggler", "its clock is throttled")
    job.settle()
    former = job.ranks[1]
    former.alive = former.training = False
    job.report(
        Exited(
            node=0, rank=1, incarnation=0, code=-9, position=former.position, stack="",
            stopped=False, local_state=local_state, at=job.now,
        )
    )  # fmt: skip
    job.settle()
