"""
Schedules written by hand, for moments that random schedules rarely reach. Each state of the job
machine gets requests, nodes that come or go, and new controllers. Reports that are delayed by a
lost connection also reach the machine in each state.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from tft.core.job.transitions import State
from tft.simulation.schedule import ANY, QUICK, Mishap, Schedule, Trouble

S = State
CALM = Schedule(
    seed=0,
    world=4,
    nodes=2,
    topology="replicated",
    steps=6,
    spares=(4, 4),
    trouble=Trouble(delay=0.001),
)
"""A schedule without mishaps, to which the functions in this file add mishaps."""
LAST = replace(QUICK, enable=frozenset({"dump"}))
"""A policy with only one strategy: write a last checkpoint, and end the job."""
SPARE = 3
"""The number of a node without ranks. The job goes on if this node is lost."""


def rare() -> tuple[Schedule, ...]:
    """
    Return all schedules that this file writes, each with its own negative seed.
    """
    written = [
        *_visits(), *_old_news(), *_news_of_a_start(), *_old_ends(), *_waits(), *_searches(),
        *_corruptions(), *_late_digests(), *_late_traces(), *_late_recalls(),
    ]  # fmt: skip
    return tuple(replace(each, seed=-1 - number) for number, each in enumerate(written))


def _visits() -> Iterator[Schedule]:
    """
    Yield, for every state of the job machine, one schedule for each request or mishap that can come
    at any time. The request or mishap comes in that state.
    """
    visitors = (
        Mishap(what="come", target=SPARE), Mishap(what="node", target=SPARE), Mishap(what="store"),
        Mishap(what="request"), Mishap(what="pause"), Mishap(what="resume"), Mishap(what="advise"),
        Mishap(what="switch", target=2),
        Mishap(what="notice", target=3, kind="network"), Mishap(what="controller"),
        Mishap(what="notice", target=3, kind="straggler"), Mishap(what="kill", target=0),
        Mishap(what="stop", target=2),
    )  # fmt: skip
    for state in State:
        base = _on_the_way_to(state)
        for visitor in visitors:
            # do not end a controller after the end of the job: no other controller would take over
            if (state, visitor.what) != (S.ENDED, "controller"):
                visit = replace(visitor, when="state", name=state, lasting=0.1)
                yield replace(base, mishaps=(*base.mishaps, visit))


def _on_the_way_to(state: State) -> Schedule:
    """
    Return a schedule whose job comes to `state` and stays in this state for a moment.
    """
    kill = Mishap(what="kill", target=1, when="phase", name="all-reduce", number=3)
    match state:
        case S.CHOOSING:
            return replace(CALM, policy=replace(QUICK, advised=True), mishaps=(kill,))
        case S.DUMPING:
            return replace(CALM, policy=LAST, mishaps=(kill,))
        case S.PAUSING | S.PAUSED:
            pause = Mishap(what="pause", when="state", name="healthy", delay=0.1, lasting=0.6)
            return replace(CALM, mishaps=(pause,))
        case S.CONFIRMING:
            return replace(CALM, slices=3)
        case _:
            return replace(CALM, mishaps=(kill,))


def _old_news() -> Iterator[Schedule]:
    """
    Yield schedules in which a node cannot be reached while its ranks train, finish, or lose their
    peers. The controller gives the node up. The reports of its ranks arrive later, when the job
    machine enters a certain state. There are schedules for each state of the job machine.
    """
    for state in State:
        base = _on_the_way_to(state)
        if state is S.DUMPING:
            base = replace(base, mishaps=())
        pauses = tuple(mishap for mishap in base.mishaps if mishap.what == "pause")
        cut = Mishap(
            what="partition", target=1, when="state", name="resuming", lasting=12.0, until=state
        )
        kill = Mishap(what="kill", target=0, when="phase", name="all-reduce", number=2)
        # try both results of the periodic checkpoint of the last step: it fails at step 8, and
        # succeeds at step 9 or 30
        for steps in (30,) if pauses else (8, 9):
            yield replace(base, steps=steps, checkpoints=1, mishaps=(cut, *pauses))
        yield replace(base, steps=30, mishaps=(cut, kill, *pauses))


def _news_of_a_start() -> Iterator[Schedule]:
    """
    Yield schedules in which a node cannot be reached while processes start on it. The reports of
    these starts arrive when other processes have long taken over the ranks.
    """
    for state in State:
        base = _on_the_way_to(state)
        for delay in (0.06, 0.08, 0.1, 0.2, 0.3, 0.5, 0.7):
            cut = Mishap(what="partition", target=1, delay=delay, lasting=25.0, until=state)
            yield replace(base, steps=30, mishaps=(cut, *base.mishaps))


def _old_ends() -> Iterator[Schedule]:
    """
    Yield schedules with late reports that a rank has finished. The ranks of an unreachable node had
    finished when all other ranks were lost and the job went back to a checkpoint. The reports of
    the unreachable node arrive while the last steps are trained again.
    """
    for state in (S.PAUSING, S.PAUSED):
        pause = Mishap(what="pause", when="state", name="resuming", number=1, lasting=1.0)
        cut = Mishap(
            what="partition",
            target=1,
            when="phase",
            name="between",
            number=5,
            lasting=25.0,
            until=state,
        )
        kills = (Mishap(what="kill", target=rank, delay=4.0) for rank in (0, 1))
        yield replace(CALM, checkpoints=4, mishaps=(cut, *kills, pause))


def _waits() -> Iterator[Schedule]:
    """
    Yield schedules in which time limits of the policy pass, or ranks hang, in states of the job
    machine that rarely last long enough for that.
    """
    notice = Mishap(what="notice", target=3, when="state", name="healthy", kind="straggler")
    late = Mishap(what="late", target=3, when="state", name="healthy", lasting=6.0)
    # the process that is to take over rank 3 joins later than the policy allows
    yield replace(CALM, steps=60, mishaps=(late, notice))
    kill = Mishap(what="kill", target=1, when="phase", name="all-reduce", number=8)
    late = Mishap(what="late", target=1, when="state", name="freezing", lasting=6.0)
    yield replace(CALM, steps=12, mishaps=(kill, late))
    hang = Mishap(what="hang", target=2, when="state", name="resuming", number=1, delay=0.1)
    yield replace(CALM, steps=12, mishaps=(kill, hang))
    pause = Mishap(what="pause", delay=4.0, lasting=20.0)
    # the time limit of the policy ends this pause before the request to resume comes
    yield replace(CALM, steps=30, mishaps=(pause,))
    for what in ("hang", "stop"):
        still = Mishap(what=what, target=2, when="state", name="pausing")
        yield replace(CALM, steps=30, mishaps=(pause, still))
    still = Mishap(what="hang", target=2, when="state", name="pausing")
    away = Mishap(what="node", target=SPARE, when="state", name="pausing", delay=0.1, lasting=0.1)
    yield replace(CALM, steps=30, mishaps=(pause, still, away))


def _searches() -> Iterator[Schedule]:
    """
    Yield schedules in which all ranks search for a checkpoint of their own, because a lost rank
    held state that no other rank holds. Each schedule adds one mishap during the search. The mishap
    comes when the first or the last rank begins the search.
    """
    lost = Mishap(what="kill", target=1, when="phase", name="all-reduce", number=4)
    base = replace(CALM, topology="strided", copies=1, own=2)
    others = (
        Mishap(what="kill", target=ANY), Mishap(what="fail", target=ANY),
        Mishap(what="slow", target=ANY, lasting=5.0), Mishap(what="hang", target=ANY),
        Mishap(what="stop", target=ANY), Mishap(what="controller", target=ANY),
        Mishap(what="store", target=ANY), Mishap(what="request", target=ANY),
        Mishap(what="pause", target=ANY), Mishap(what="notice", target=ANY, kind="memory"),
    )  # fmt: skip
    yield replace(base, mishaps=(lost,))
    for other in others:
        for number in (0, 3):
            then = replace(other, when="order", name="reload", number=number)
            yield replace(base, mishaps=(lost, then))


def _corruptions() -> Iterator[Schedule]:
    """
    Yield schedules in which ranks compare slices and a copy is corrupted silently, once or twice.
    With two copies it is unknown which copy is wrong; with four copies the majority is right.
    """
    flips = tuple(
        Mishap(what="flip", target=1, when="phase", name="between", number=step, kind="model")
        for step in (5, 15)
    )
    others = (
        (), (Mishap(what="pause", when="state", name="healthy", lasting=0.5),),
        (Mishap(what="controller", when="state", name="healthy"),),
        (Mishap(what="kill", target=0, when="phase", name="all-reduce", number=9),),
    )  # fmt: skip
    base = replace(CALM, steps=24, slices=3)
    for world in (2, 4):
        for backups in (0, 8):
            for some in (flips[:1], flips):
                for other in others:
                    yield replace(base, world=world, backups=backups, mishaps=(*some, *other))


def _late_digests() -> Iterator[Schedule]:
    """
    Yield schedules in which a copy is corrupted silently and the heartbeats of its node are lost,
    while a rank of another node is killed or the job pauses. Heartbeats arrive again when the job
    machine enters a certain state. There are schedules for each state.
    """
    flip = Mishap(what="flip", target=1, when="phase", name="between", number=6, kind="model")
    for state in State:
        base = _on_the_way_to(S.PAUSED if state is S.RESUMING else state)
        lost = Mishap(
            what="beats",
            target=0,
            when="phase",
            name="between",
            number=5,
            lasting=12.0,
            until=state,
        )
        harms = tuple(
            replace(each, target=2, when="phase", name="all-reduce", number=8, delay=0.0)
            for each in base.mishaps
        )
        steps = 8 if state is S.CONFIRMING else 24
        for backups in (0, 4):
            yield replace(
                base, steps=steps, slices=3, backups=backups, mishaps=(flip, lost, *harms)
            )


def _late_traces() -> Iterator[Schedule]:
    """
    Yield schedules in which one of the two copies of a shard is corrupted silently in one of the
    last steps. The controller learns which of the two copies is wrong when these steps are computed
    again after a fault. Without a fault, it learns this when all ranks have finished.
    """
    for steps, before in product((10, 11), (2, 3)):
        flip = Mishap(
            what="flip", target=1, when="phase", name="between", number=steps - before, kind="model"
        )
        late = Mishap(
            what="beats", target=0, when="state", name="resuming", number=1, lasting=12.0,
            until=S.CONFIRMING,
        )  # fmt: skip
        for mishaps in ((flip,), (flip, late)):
            yield replace(CALM, world=2, steps=steps, slices=3, backups=4, mishaps=mishaps)


def _late_recalls() -> Iterator[Schedule]:
    """
    Yield schedules in which node 1 is lost. Node 2, which keeps the rank-local state of the lost
    ranks and has no room for ranks, cannot send messages at that time. Its report of the kept state
    arrives when the job machine enters a certain state. There are schedules for each state.
    """
    for state in State:
        base = _on_the_way_to(state)
        pauses = tuple(
            replace(mishap, name="resuming", number=1)
            for mishap in base.mishaps
            if mishap.what == "pause"
        )
        lost = Mishap(what="node", target=1, when="phase", name="all-reduce", number=3)
        for lasting in (2.0, 12.0):
            cut = Mishap(
                what="partition", target=2, when="state", name="freezing", kind="mute",
                lasting=lasting, until=state,
            )  # fmt: skip
            for steps in (6, 24):
                yield replace(base, steps=steps, spares=(0, 4), mishaps=(lost, cut, *pauses))
