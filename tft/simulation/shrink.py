"""
Reduces a schedule that breaks an invariant to the smallest schedule that still breaks the same
invariant.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from tft.core.job.policy import Policy
from tft.simulation.run import Outcome, run
from tft.simulation.schedule import QUICK, Mishap, Schedule, Trouble
from tft.simulation.story import write_story

TRIES = 400
"""The largest number of runs that are spent on shrinking one schedule."""


def shrink(schedule: Schedule) -> Outcome:
    """
    Return the outcome of the smallest schedule found that breaks the same invariant as `schedule`.
    """
    smallest = run(schedule)
    promise, tries = smallest.broken, TRIES
    again = bool(promise)
    while again and tries:
        again = False
        for smaller in _smaller(smallest.schedule):
            tries -= 1
            outcome = run(smaller)
            if outcome.broken == promise:
                smallest, again = outcome, True
                break
            if not tries:
                break
    return smallest


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    for place in range(len(schedule.mishaps)):
        yield replace(schedule, mishaps=schedule.mishaps[:place] + schedule.mishaps[place + 1 :])
    calm = Trouble()
    if schedule.trouble != calm:
        yield replace(schedule, trouble=calm)
        for name in ("loss", "double", "reorder"):
            if getattr(schedule.trouble, name):
                yield replace(schedule, trouble=replace(schedule.trouble, **{name: 0.0}))
    if schedule.standbys:
        yield replace(schedule, standbys=0)
    if schedule.spares or schedule.room:
        yield replace(schedule, spares=(), room=0)
    if schedule.backups or schedule.checkpoints:
        yield replace(schedule, backups=0, checkpoints=0)
    if schedule.slices:
        yield replace(schedule, slices=0)
    if schedule.own:
        yield replace(schedule, own=0)
    if schedule.tail:
        yield replace(schedule, tail=0.0, averages=False)
    if schedule.averages:
        yield replace(schedule, averages=False)
    if schedule.broadcasts:
        yield replace(schedule, broadcasts=False)
    if schedule.resume:
        yield replace(schedule, resume=0)
    if schedule.nodes > 1:
        yield replace(schedule, nodes=1)
    reach = max((m.target for m in schedule.mishaps if m.what != "request"), default=0) + 1
    for world in (2, 3, 4, schedule.world // 2, schedule.world - 1):
        if max(2, reach, schedule.nodes) <= world < schedule.world:
            yield replace(schedule, world=world)
    for place, mishap in enumerate(schedule.mishaps):
        if mishap.target > 1 and mishap.what not in ("request", "node", "partition"):
            lower = replace(mishap, target=mishap.target // 2)
            yield replace(
                schedule,
                mishaps=(*schedule.mishaps[:place], lower, *schedule.mishaps[place + 1 :]),
            )
    if schedule.topology != "replicated":
        yield replace(schedule, topology="replicated")
    for seed in range(3):
        if schedule.seed > seed:
            yield replace(schedule, seed=seed)
            break


def explain(schedule: Schedule, stories: Path) -> str:
    """
    Return a text about a schedule that breaks an invariant. The text names the broken invariant and
    the story files of the full run and of the smallest run. It ends with the smallest schedule as
    code.
    """
    outcome = run(schedule)
    smallest = shrink(schedule)
    lines = []
    for name, each in (("whole", outcome), ("small", smallest)):
        path = stories / f"seed-{schedule.seed}-{name}.jsonl"
        try:
            write_story(path, each.schedule, each.events)
        except Exception as error:  # noqa: BLE001 (the job machine may contain the bug)
            lines.append(f"the machine fails at the story: {error!r}")
        lines.append(f"{name}: {each.how}\n  story: {path}")
    return "\n".join([*lines, f"  {code(smallest.schedule)}", ""])


def code(thing: object) -> str:
    """
    Return a schedule, or a part of a schedule, as Python code. Fields that have their default value
    are left out.
    """
    if isinstance(thing, tuple):
        inside = ", ".join(code(each) for each in thing)
        return f"({inside},)" if len(thing) == 1 else f"({inside})"
    if isinstance(thing, frozenset):
        return f"frozenset({sorted(thing)!r})"
    if isinstance(thing, Policy):
        told = [
            f"{f.name}={code(value)}"
            for f in fields(thing)
            if (value := getattr(thing, f.name)) != getattr(QUICK, f.name)
        ]
        return f"replace(QUICK, {', '.join(told)})"
    if not isinstance(thing, Schedule | Trouble | Mishap):
        return repr(thing)
    told = [
        f"{field.name}={code(value)}"
        for field in fields(thing)
        if (value := getattr(thing, field.name)) != field.default
    ]
    return f"{type(thing).__name__}({', '.join(told)})"
