"""
Scripted jobs that have come so far, for the tests of the judgement.
"""

from typing import Any

from tft.core.policy import STRATEGIES, Policy
from tft.core.table import State
from tft.protocol.messages import Exited, Order
from tft.testing.scripted import ScriptedJob

POLICY = set(Policy.__dataclass_fields__)


def trained(world: int = 4, steps: int = 3, **facts: Any) -> ScriptedJob:  # Any: fields, by name
    """
    A job whose adaptor can do everything, after a few steps. `facts` are limits of the policy and
    fields of the job.
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
    What was ordered, one word each.
    """
    return [type(order).__name__ for order in orders]


def strategies(job: ScriptedJob) -> list[str]:
    """
    What was done about each incident that is over.
    """
    return [incident.strategy for incident in job.machine.incidents]


def tried(job: ScriptedJob) -> dict[str, str]:
    """
    What was passed over in the newest incident that is over, and why.
    """
    return dict(job.machine.incidents[-1].tried)


def take_over(job: ScriptedJob, private: dict[int, str]) -> None:
    """
    Another process takes over from rank 1, and the first one ends: with this private state, as its node tells.
    """
    job.deaf = {0}
    job.notice(1, "straggler", "its clock is throttled")
    job.settle()
    former = job.ranks[1]
    former.alive = former.training = False
    job.report(
        Exited(
            node=0, rank=1, incarnation=0, code=-9, position=former.position, stack="",
            stopped=False, private=private, at=job.now,
        )
    )  # fmt: skip
    job.settle()
