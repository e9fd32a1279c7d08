"""
One run of a simulated cluster, from its schedule to the result of the job.
"""

from collections import Counter
from dataclasses import dataclass
from random import Random

from tft.core.job.events import Event
from tft.errors import InternalError
from tft.simulation.auditor import Auditor
from tft.simulation.clock import START, Clock
from tft.simulation.disk import Disk
from tft.simulation.group import Groups
from tft.simulation.invariants import Broken, Invariants
from tft.simulation.leader import start_controller
from tft.simulation.mail import Network
from tft.simulation.mishaps import Mishaps
from tft.simulation.node import Node
from tft.simulation.outside import Outside
from tft.simulation.schedule import Schedule
from tft.simulation.stage import Checks, Seen, Stage
from tft.simulation.story import EARLIER, SharedStory
from tft.simulation.truth import Truth

FAREWELL = 12.0
"""Virtual seconds after the end of the job within which every process must have exited."""


REPLAYED = 16
"""One of this many runs is replayed: a new job machine handles the recorded events (the story), and
its commands after every event are compared with the recorded commands. Not all runs are replayed,
because a replay takes as much time as the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """
    The result of one simulated run.
    """

    schedule: Schedule
    result: str
    """The result of the job. Empty if the job did not end."""
    broken: str
    """The name of the invariant that was broken. Empty if all invariants held."""
    how: str
    """A text that says how the invariant was broken. Empty if all invariants held."""
    faults: int
    """The number of faults that were injected and have happened."""
    seconds: float
    """The length of the run in virtual seconds."""
    seen: Seen
    events: tuple[Event, ...]
    """The recorded events of the job machine (the story). Empty unless an invariant was broken."""


def run(schedule: Schedule) -> Outcome:
    """
    Run a schedule to its end and return the result. `Outcome.broken` reports a broken invariant, an
    `InternalError`, an `AssertionError`, or a key, value, index or attribute error. None of these
    is raised.
    """
    stage = set_up(schedule)
    promise = how = ""
    try:
        until_over(stage)
    except Broken as error:
        promise, how = error.promise, str(error)
    except (
        InternalError,
        AssertionError,
        KeyError,
        ValueError,
        IndexError,
        AttributeError,
    ) as error:
        promise, how = f"no {type(error).__name__}", _where(error)
    return Outcome(
        schedule=schedule,
        result="" if stage.over is None else stage.over.result,
        broken=promise,
        how=how,
        faults=len(stage.mishaps.faults),
        seconds=stage.clock.now - START,
        seen=stage.checks.seen,
        events=tuple(stage.story.events) if promise else (),
    )


def set_up(schedule: Schedule) -> Stage:
    """
    Return a simulated cluster that is built from a schedule, and in which nothing has happened yet.
    """
    rng = Random(f"run {schedule.seed}")
    stage = Stage(
        schedule=schedule,
        clock=Clock(START),
        rng=rng,
        network=Network(schedule.trouble, rng),
        truth=Truth(schedule.seed, tails=schedule.tail > 0),
        disk=Disk(),
    )
    stage.groups = Groups(stage)
    stage.checks = Checks(Invariants(stage), Auditor(stage))
    stage.story = SharedStory(tells_all=not schedule.seed % REPLAYED)
    stage.outside = Outside(stage)
    stage.mishaps = Mishaps(stage, schedule)
    if schedule.resume:
        stage.disk.whole[EARLIER] = {
            **{name: stage.truth.value(schedule.resume, name) for name in schedule.groups()},
            **{f"local-state-{rank}": schedule.resume for rank in range(schedule.world)},
        }
    for number, ranks in schedule.placement().items():
        node = stage.cluster.nodes[number] = Node(
            stage, number, ranks, spare=schedule.spare(number)
        )
        if not any((m.what, m.target) == ("come", number) for m in schedule.mishaps):
            stage.clock.after(stage.takes(0.0, 0.1), node.start)
    start_controller(stage)
    for _ in range(schedule.standbys):
        start_controller(stage, stands_by=True)
    return stage


def until_over(stage: Stage) -> None:
    """
    Run events until the job is over. Then run until no agent is left, at most `FAREWELL` virtual
    seconds. Raises `Broken` when an invariant does not hold.
    """
    clock, ends = stage.clock, stage.checks.invariants.ends
    while stage.over is None and clock.tick():
        if not clock.happened % 64:
            ends()
    last = clock.now + FAREWELL
    while (
        clock.now < last
        and any(node.alive and node.started for node in stage.cluster.nodes.values())
        and clock.tick()
    ):
        pass
    if stage.over is None:
        raise Broken("every incident must end", "no event is left, and the job has not ended")
    stage.checks.invariants.nothing_left()
    differs = stage.story.differs(stage.schedule)
    if differs:
        raise Broken(
            "a replayed story must give the same commands", f"the replay differs: {differs}"
        )


def _where(error: BaseException) -> str:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = "" if frame is None else f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
    return f"{type(error).__name__}: {error} at {place}"


def total(outcomes: list[Outcome]) -> Seen:
    """
    Return the sum of the counts of several runs: how often each kind of event came in each state of
    the job machine.
    """
    seen: Seen = Counter()
    for outcome in outcomes:
        seen.update(outcome.seen)
    return seen
