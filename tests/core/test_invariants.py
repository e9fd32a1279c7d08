"""
The invariants that the job machine checks after every event. A violation is a bug of tft and is
reported at once.
"""

from collections.abc import Callable

import pytest

from tests.core.lives import trained
from tft.core.job.commands import JobOver
from tft.core.job.incident import Task
from tft.core.job.invariants import broken
from tft.core.job.origin import Origin
from tft.core.job.policy import Policy
from tft.core.job.rank_process import ProcessStage, RankProcess
from tft.core.job.rank_state import RankState
from tft.core.job.state import Job
from tft.core.job.transitions import State
from tft.errors import InternalError
from tft.protocol.messages import Rebuild, Rollback


def somewhere(state: State) -> Job:
    """
    Return a job of three ranks that is in this state and satisfies all invariants.
    """
    job = Job(3, Policy(), Origin(job="job", checkpoints="/c"), at=0.0)
    job.state = state
    if state is State.ENDED:
        job.end.outcome = JobOver(result="completed", code=0, why="all steps are done")
    return job


def trains(job: Job) -> None:
    job.ranks.states[1].training = job.ranks.states[2].training = True


def trains_outside(job: Job) -> None:
    trains(job)
    job.ranks.members = frozenset({0, 2})


def leaves_nobody(job: Job) -> None:
    job.ranks.members = frozenset()


def is_replaced_by_nobody(job: Job) -> None:
    job.succession.successors[0] = RankState(rank=0, process=RankProcess(stage=ProcessStage.READY))
    job.succession.successors[1] = RankState(rank=1)


def has_asked(job: Job) -> None:
    job.issue(job.to_all(Rollback, step=3))
    job.issue(job.to_all(Rebuild))


def has_an_incident(job: Job) -> None:
    job.incident.number = 4


def has_no_outcome(job: Job) -> None:
    job.end.outcome = None


ALWAYS = tuple(State)


@pytest.mark.parametrize(
    ("deed", "where", "sentence"),
    [
        (
            trains,
            (
                State.REPAIRING,
                State.REBUILDING,
                State.ROLLING_BACK,
                State.CONFIRMING,
                State.DUMPING,
            ),
            "ranks [1, 2] train while the job is {state}",
        ),
        (leaves_nobody, ALWAYS, "no rank is a member"),
        (is_replaced_by_nobody, ALWAYS, "the successors of ranks [1] were never requested"),
        (
            has_asked,
            (State.HEALTHY,),
            "the job is healthy, and these orders are unanswered: rollback, rebuild",
        ),
        (has_an_incident, (State.HEALTHY,), "the job is healthy, and incident 4 is open"),
        (has_no_outcome, (State.ENDED,), "the job has ended without an outcome"),
    ],
)
def test_invariant_is_checked_in_its_states(
    deed: Callable[[Job], None], where: tuple[State, ...], sentence: str
) -> None:
    """When a job violates an invariant, then a sentence names the violation and the ranks. The
    sentence appears in exactly the states in which the invariant applies."""
    for state in State:
        job = somewhere(state)
        assert list(broken(job)) == []
        deed(job)
        expected = [sentence.format(state=state)] if state in where else []
        assert list(broken(job)) == expected


def test_rank_outside_the_job_must_not_train() -> None:
    """When a rank that is no member trains, then the check names this rank in every state, and no
    other rank."""
    for state in State:
        job = somewhere(state)
        trains_outside(job)
        assert "ranks [1] train and are not members" in broken(job)


def test_machine_raises_when_an_invariant_is_broken() -> None:
    """When the closed incident of a healthy job is opened again with an unanswered order, then
    `check` raises an error that names both violations. Before that, `check` raises nothing."""
    job = trained()
    job.fault(1, "network")
    job.settle()
    job.train()
    job.machine.check()
    incident = job.machine.incident
    incident.closed = None
    incident.tasks["hold"] = Task(
        orders=(), waiting=set(), issued=job.now, limit=1.0, deadline=job.now
    )  # fmt: skip
    with pytest.raises(InternalError) as broken_promise:
        job.machine.check()
    assert str(broken_promise.value) == (
        "the job is healthy, and these orders are unanswered: hold; the job is healthy, and "
        "incident 1 is open"
    )
