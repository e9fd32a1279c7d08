"""
Schedules written down for moments that chance seldom meets: for every state of the job machine, in
which somebody asks for something, a node comes or goes, another controller takes over, and what was
said long ago is heard at last.
"""

from collections.abc import Iterator
from dataclasses import replace

from tft.core.table import State
from tft.testing.cluster.schedule import ANY, QUICK, Mishap, Schedule, Trouble

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
LAST = replace(QUICK, enable=frozenset({"dump"}))
SPARE = 3
"""The node that nobody needs."""


def rare() -> tuple[Schedule, ...]:
    """
    All of them, each with a seed of its own.
    """
    written = [
        *_visits(), *_old_news(), *_news_of_a_start(), *_old_ends(), *_waits(), *_searches(),
    ]  # fmt: skip
    return tuple(replace(each, seed=-1 - number) for number, each in enumerate(written))


def _visits() -> Iterator[Schedule]:
    """
    In every state, once: each thing that may be said or happen at any time.
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
            if (state, visitor.what) != (S.ENDED, "controller"):  # nobody follows one then
                visit = replace(visitor, when="state", name=state, lasting=0.1)
                yield replace(base, mishaps=(*base.mishaps, visit))


def _on_the_way_to(state: State) -> Schedule:
    """
    A job that comes to a state, and stays there for a moment.
    """
    kill = Mishap(what="kill", target=1, when="phase", name="sums", number=3)
    match state:
        case S.CHOOSING:
            return replace(CALM, policy=replace(QUICK, advised=True), mishaps=(kill,))
        case S.DUMPING:
            return replace(CALM, policy=LAST, mishaps=(kill,))
        case S.PAUSING | S.PAUSED:
            pause = Mishap(what="pause", when="state", name="healthy", delay=0.1, lasting=0.6)
            return replace(CALM, mishaps=(pause,))
        case _:
            return replace(CALM, mishaps=(kill,))


def _old_news() -> Iterator[Schedule]:
    """
    A node cannot be reached while its ranks train, finish, or lose their peers. It is given up, and
    what they had to say is heard when it can be reached again: in every state.
    """
    for state in State:
        base = _on_the_way_to(state)
        if state is S.DUMPING:
            base = replace(base, mishaps=())
        pauses = tuple(mishap for mishap in base.mishaps if mishap.what == "pause")
        cut = Mishap(
            what="partition", target=1, when="state", name="resuming", lasting=12.0, until=state
        )
        kill = Mishap(what="kill", target=0, when="phase", name="sums", number=2)
        for steps in (30,) if pauses else (8, 9):  # that rank 1 writes, and that it cannot write
            yield replace(base, steps=steps, checkpoints=1, mishaps=(cut, *pauses))
        yield replace(base, steps=30, mishaps=(cut, kill, *pauses))


def _news_of_a_start() -> Iterator[Schedule]:
    """
    The same while the ranks of that node start: how far they had come is heard when others have
    long been started in their place.
    """
    for state in State:
        base = _on_the_way_to(state)
        for delay in (0.08, 0.3, 0.5, 0.7):
            cut = Mishap(what="partition", target=1, delay=delay, lasting=25.0, until=state)
            yield replace(base, steps=30, mishaps=(cut, *base.mishaps))


def _old_ends() -> Iterator[Schedule]:
    """
    Some had finished, which nobody has heard, when all others were lost and everyone went back to a
    checkpoint; it is heard while the last steps are trained for the second time.
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
    Limits that pass, and silences, in states that are seldom so long.
    """
    notice = Mishap(what="notice", target=3, when="state", name="healthy", kind="straggler")
    late = Mishap(what="late", target=3, when="state", name="healthy", lasting=6.0)
    yield replace(CALM, steps=60, mishaps=(late, notice))  # nobody is ready to take over in time
    kill = Mishap(what="kill", target=1, when="phase", name="sums", number=8)
    late = Mishap(what="late", target=1, when="state", name="freezing", lasting=6.0)
    yield replace(CALM, steps=12, mishaps=(kill, late))
    hang = Mishap(what="hang", target=2, when="state", name="resuming", number=1, delay=0.1)
    yield replace(CALM, steps=12, mishaps=(kill, hang))
    pause = Mishap(what="pause", delay=4.0, lasting=20.0)
    yield replace(CALM, steps=30, mishaps=(pause,))  # nobody ends it
    for what in ("hang", "stop"):
        still = Mishap(what=what, target=2, when="state", name="pausing")
        yield replace(CALM, steps=30, mishaps=(pause, still))
    still = Mishap(what="hang", target=2, when="state", name="pausing")
    away = Mishap(what="node", target=SPARE, when="state", name="pausing", delay=0.1, lasting=0.1)
    yield replace(CALM, steps=30, mishaps=(pause, still, away))


def _searches() -> Iterator[Schedule]:
    """
    All search for a checkpoint of their own, since a rank is lost with what no other has; and each thing
    that may go wrong goes wrong then, when the first of them begins, or the last.
    """
    lost = Mishap(what="kill", target=1, when="phase", name="sums", number=4)
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
