"""
The job machine under random sequences of events.

In every sequence the machine raises nothing and keeps its invariants, and every incident ends.
"""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tft.core.job.policy import Policy
from tft.core.job.transitions import State
from tft.protocol.messages import Fetch, OrderName, Stop
from tft.testing.scripted import ScriptedJob

ACTIONS = st.sampled_from(
    ["kill", "memory", "network", "software", "numeric", "hang", "stall", "obey", "obey", "train",
     "window", "close", "store", "repeat", "node", "stop", "wait", "fail"]
)  # fmt: skip
SCHEDULES = st.lists(st.tuples(ACTIONS, st.integers(0, 7)), max_size=40)


def act(job: ScriptedJob, action: str, number: int) -> None:
    """
    Apply one random action to the job. `number` chooses the rank.
    """
    one = job.ranks[number % job.world]
    match action:
        case "kill" if one.alive:
            job.kill(one.rank)
        case "memory" | "network" | "software" | "numeric" if one.training and not one.hung:
            job.fault(one.rank, action)
        case "hang" if one.alive and one.training:
            one.hung, one.loop.waiting = True, False
        case "stall":
            job.stall()
        case "obey":
            for _ in range(number + 1):
                if job._queue:
                    job._obey(job._queue.popleft())
        case "train":
            job.train()
        case "window" if one.training and not one.loop.window:
            job.window(one.rank)
        case "close" if one.training and one.loop.window and _all_have_reduced(job, one.rank):
            job.close(one.rank)
        case "store":
            job.reopen_store(number)
        case "repeat":
            job.repeat()
        case "stop" if number == 0:
            job.stop()
        case "wait" if job.machine.next_deadline() is not None and number < 2:
            job.wait()
        case "fail":
            names: tuple[OrderName, ...] = ("fetch", "regroup", "rebuild", "save", "stop")
            job.script.failures[one.rank, names[number % 5]] = ["it broke"]
        case _:
            pass


def _resuming(job: ScriptedJob) -> bool:
    return job.state is State.RESUMING


def _all_have_reduced(job: ScriptedJob, rank: int) -> bool:
    """
    Return whether all training ranks have reached the step of `rank`.

    A rank closes its update window only after the all-reduce with all other ranks.
    """
    step = job.ranks[rank].step
    return all(other.step >= step for other in job.ranks.values() if other.training)


@settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(world=st.integers(1, 6), schedule=SCHEDULES, respawns=st.integers(0, 3))
def test_random_events_keep_the_invariants_and_every_incident_ends(
    world: int, schedule: list[tuple[str, int]], respawns: int
) -> None:
    """When random events come, then every transition is in the table of transitions, no rank trains
    during a repair, and no rank resumes with a wrong state. In the end the job is healthy or over.
    """
    job = ScriptedJob(world, Policy(respawns=respawns)).start()
    for action, number in schedule:
        if job.over is not None:
            break
        act(job, action, number)
    job.script.failures.clear()
    for _ in range(60):
        job.settle()
        if job.over is not None or job.state is State.HEALTHY:
            break
        if job.state is State.RESUMING:
            job.train()
            if _resuming(job) and any(r.hung for r in job.ranks.values()):
                job.stall()
        elif job.machine.next_deadline() is not None:
            job.wait()
    assert job.over is not None or job.state is State.HEALTHY
    check_story(job)


def check_story(job: ScriptedJob) -> None:
    """
    Check that all orders of the job together are consistent.
    """
    rounds: dict[tuple[int, int], int] = {}
    for order in job.said:
        if isinstance(order, Fetch):
            assert rounds.setdefault((order.incident, order.round), order.step) == order.step
            for transfer in order.transfers:
                assert transfer.sources
                assert not {s.rank for s in transfer.sources} & set(order.to)
        if isinstance(order, Stop):
            assert order.finish >= 0
