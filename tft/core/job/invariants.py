"""
Define the invariants of a job: conditions that are always true after the job machine has handled an
event. If a condition is not true, tft has a bug.
"""

from collections.abc import Iterator

from tft.core.job.rank_process import ProcessStage
from tft.core.job.state import Job
from tft.core.job.transitions import State

S = State

STANDING = frozenset({S.REPAIRING, S.REBUILDING, S.ROLLING_BACK, S.CONFIRMING, S.DUMPING})
"""The states of a job in which no rank may be in its training loop. In these states shards are
copied, process groups are formed, wrappers such as DDP are built, a rollback runs, finished ranks
compare their copies, or the last checkpoint is written."""


def broken(job: Job) -> Iterator[str]:
    """
    Yield one sentence for each invariant of the job that is broken.
    """
    training = [rank_state.rank for rank_state in job.ranks.states.values() if rank_state.training]
    if training and job.state in STANDING:
        yield f"ranks {training} train while the job is {job.state}"
    outside = [rank for rank in training if rank not in job.ranks.members]
    if outside:
        yield f"ranks {outside} train and are not members"
    if not job.ranks.members:
        yield "no rank is a member"
    strangers = [
        rank
        for rank, s in job.succession.successors.items()
        if s.process.stage is ProcessStage.ABSENT
    ]
    if strangers:
        yield f"the successors of ranks {strangers} were never requested"
    if job.state is S.HEALTHY and job.incident.tasks:
        yield (
            f"the job is healthy, and these orders are unanswered: {', '.join(job.incident.tasks)}"
        )
    if job.state is S.HEALTHY and job.incident.is_open:
        yield f"the job is healthy, and incident {job.incident.number} is open"
    if job.state is S.ENDED and job.end.outcome is None:
        yield "the job has ended without an outcome"
