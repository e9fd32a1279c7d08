"""
The comparison of slices in the simulated cluster: what follows from silent corruptions, and which
breaches of the judgement the simulation notices.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest

from tft.core.job.comparison import Comparison
from tft.core.job.events import CorruptionTraced, SlicesAgreed, SlicesDiffered, SliceVerdict
from tft.core.job.integrity import Integrity
from tft.core.job.machine import Machine
from tft.core.job.recovery import Recovery
from tft.core.link.slice_comparison import SliceComparison
from tft.simulation.run import run, set_up, until_over
from tft.simulation.schedule import QUICK, Mishap, Schedule, What
from tft.simulation.stage import Stage

SEEDS = 3

Patch = pytest.MonkeyPatch

JOB = Schedule(seed=0, world=4, nodes=2, steps=24, slices=3, backups=8)


def flip(step: int, rank: int = 1) -> Mishap:
    return Mishap(what="flip", target=rank, when="phase", name="between", number=step, kind="model")


CORRUPTED = replace(JOB, mishaps=(flip(7),))
KILL = Mishap(what="kill", target=1, when="phase", name="all-reduce", number=11)
"""The rank with the corrupted copy dies after it has posted digests that show it."""


def done(schedule: Schedule) -> Stage:
    """
    Return the cluster after the run of a schedule.
    """
    stage = set_up(schedule)
    until_over(stage)
    return stage


def verdicts(stage: Stage) -> list[type]:
    kinds = (SlicesDiffered, CorruptionTraced)
    return [type(event) for event in stage.story.events if isinstance(event, kinds)]


def wrong(stage: Stage) -> dict[int, dict[str, object]]:
    """
    Return the content that differs from the undisturbed run at the end of the job, by rank.
    """
    last: dict[int, dict[str, object]] = {}
    for process in stage.cluster.processes:
        if process.steps.completed == stage.schedule.steps:
            last[process.rank] = {
                name: content
                for name, content in process.memory.content.items()
                if content != stage.truth.value(stage.schedule.steps, name)
            }
    assert sorted(last) == list(range(stage.schedule.world))
    return {rank: differs for rank, differs in last.items() if differs}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("slices", [2, 3])
def test_job_ends_with_the_content_of_the_undisturbed_run(world: int, slices: int) -> None:
    """When a copy is corrupted without an exception and early copies are kept, then the job returns
    to before the corruption, and every shard ends as without it. With two copies the rank is named
    once the steps were computed again."""
    stage = done(replace(CORRUPTED, world=world, slices=slices))
    assert stage.over is not None
    assert (stage.over.result, wrong(stage)) == ("completed", {})
    assert verdicts(stage) == [SlicesDiffered, CorruptionTraced][: 3 - world // 2]
    traced = [event.ranks for event in stage.story.events if isinstance(event, CorruptionTraced)]
    assert traced == [(1,)][: 2 - world // 2]


def test_wrong_gradients_stay_in_the_content_when_no_early_copy_is_kept() -> None:
    """When no copy from before the corruption is left, then the job goes on with the majority's
    copy, which contains the wrong gradients. So the check of the final content can fail."""
    stage = done(replace(CORRUPTED, backups=0))
    assert stage.over is not None
    assert stage.over.result == "completed"
    assert sorted(wrong(stage)) == [0, 1, 2, 3]


@pytest.mark.parametrize("before", ["pause", "controller"])
def test_corruption_is_found_after_a_pause_and_under_another_controller(before: What) -> None:
    """When a job was paused, or another controller has taken over while the ranks train, then a
    later corruption is found."""
    earlier = Mishap(what=before, when="state", name="healthy", lasting=0.5)
    stage = done(replace(JOB, steps=40, mishaps=(earlier, flip(25))))
    assert verdicts(stage) == [SlicesDiffered]
    assert wrong(stage) == {}


def test_node_is_left_at_the_second_corruption_of_a_rank() -> None:
    """When a rank is corrupted twice on one node and another node has room, then the processes of
    that node are ended at the second time and not before."""
    once = done(replace(JOB, spares=(4,), mishaps=(flip(4),)))
    twice = done(replace(JOB, spares=(4,), mishaps=(flip(4), flip(16))))
    places = [
        {p.rank: p.node.number for p in stage.cluster.processes if p.steps.completed == JOB.steps}
        for stage in (once, twice)
    ]
    assert places == [{0: 0, 1: 0, 2: 1, 3: 1}, {0: 2, 1: 2, 2: 1, 3: 1}]
    assert wrong(twice) == {}


# ---------------------------------------------------------------- breaches of the promises


def verdicts_become(
    change: Callable[[SliceVerdict], SliceVerdict | None],
) -> Callable[[Patch], None]:
    def breaks(patch: Patch) -> None:
        verdict = SliceComparison.verdict

        def changed(self: SliceComparison, at: float, *, calm: bool) -> SliceVerdict | None:
            found = verdict(self, at, calm=calm)
            return None if found is None else change(found)

        patch.setattr(SliceComparison, "verdict", changed)

    return breaks


def nothing_differs(found: SliceVerdict) -> SliceVerdict | None:
    return None if isinstance(found, SlicesDiffered) else found


def everything_differs(found: SliceVerdict) -> SliceVerdict:
    if not isinstance(found, SlicesAgreed):
        return found
    return SlicesDiffered(
        at=found.at, shard="dense", step=found.step, right=(0, 2, 3), wrong=(1,), sound=0
    )


def a_step_too_late(found: SliceVerdict) -> SliceVerdict:
    return replace(found, sound=found.step - 1) if isinstance(found, SlicesDiffered) else found


def as_if_all_was_compared(found: SliceVerdict) -> SliceVerdict:
    return replace(found, step=found.step + 3) if isinstance(found, SlicesAgreed) else found


def the_others_are_right(found: SliceVerdict) -> SliceVerdict:
    if not isinstance(found, SlicesDiffered):
        return found
    return replace(found, right=found.wrong, wrong=found.right)


def the_other_rank_is_named(found: SliceVerdict) -> SliceVerdict:
    return replace(found, ranks=(0,)) if isinstance(found, CorruptionTraced) else found


def the_newest_copy_is_used(patch: Patch) -> None:
    patch.setattr(Comparison, "_limit", lambda *_: None)


def a_reservation_is_forgotten(patch: Patch) -> None:
    differed = Integrity.differed

    def forgets(self: Integrity, event: SlicesDiffered) -> None:
        differed(self, event)
        self._job.incident.exactness.reservations.clear()

    patch.setattr(Integrity, "differed", forgets)


def a_node_is_left_at_once(patch: Patch) -> None:
    def leaves(self: Comparison, ranks: Iterable[int], incident: int = 0) -> None:
        for rank in ranks:
            self._leave(self._job.ranks.states[rank], 1)

    patch.setattr(Comparison, "blame", leaves)


def an_incident_overtakes_verdicts(patch: Patch) -> None:
    verdict = SliceComparison.verdict

    def drops(self: SliceComparison, at: float, *, calm: bool) -> SliceVerdict | None:
        return verdict(self, at, calm=True) if calm else None

    patch.setattr(SliceComparison, "verdict", drops)


def copies_are_not_compared_at_the_end(patch: Patch) -> None:
    patch.setattr(Recovery, "_finish", lambda self: self.shutdown.complete())


def a_pause_is_another_attempt(patch: Patch) -> None:
    attempt = property(lambda self: (self.incident.number, self.incident.round))
    patch.setattr(Machine, "attempt", attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """
    One way in which the judgement could be wrong, and the promise that is then broken.
    """

    name: str
    breaks: Callable[[Patch], None]
    promise: str
    schedule: Schedule = CORRUPTED
    seeds: int = SEEDS
    """How many runs of the schedule are tried. More, if it depends on the moment of a message."""


BREACHES = (
    Breach(
        name="overtaken",
        breaks=an_incident_overtakes_verdicts,
        promise="copies that differ must be found",
        schedule=replace(JOB, mishaps=(flip(7), KILL)),
        seeds=24,
    ),
    Breach(
        name="not compared at the end",
        breaks=copies_are_not_compared_at_the_end,
        promise="a job may complete only with equal copies",
        schedule=replace(JOB, steps=8, mishaps=(flip(7),)),
    ),
    Breach(
        name="nothing differs",
        breaks=verdicts_become(nothing_differs),
        promise="copies that differ must be found",
    ),
    Breach(
        name="false alarm",
        breaks=verdicts_become(everything_differs),
        promise="copies may be reported as different only if they differ",
        schedule=JOB,
    ),
    Breach(
        name="sound too late",
        breaks=verdicts_become(a_step_too_late),
        promise="copies may count as sound only if they were equal",
    ),
    Breach(
        name="compared too late",
        breaks=verdicts_become(as_if_all_was_compared),
        promise="copies that count as compared must be equal",
    ),
    Breach(
        name="minority",
        breaks=verdicts_become(the_others_are_right),
        promise="the content that most ranks hold must count as right",
    ),
    Breach(
        name="another rank",
        breaks=verdicts_become(the_other_rank_is_named),
        promise="only ranks with wrong copies may be named",
        schedule=replace(CORRUPTED, world=2),
    ),
    Breach(
        name="newest copy",
        breaks=the_newest_copy_is_used,
        promise="all ranks must return to a copy from before the difference",
    ),
    Breach(
        name="no reservation",
        breaks=a_reservation_is_forgotten,
        promise="an inexact recovery must be reported",
        schedule=replace(CORRUPTED, backups=0),
    ),
    Breach(
        name="node left at once",
        breaks=a_node_is_left_at_once,
        promise="a node may be given up only after a second corruption",
        schedule=replace(CORRUPTED, spares=(4,)),
    ),
    Breach(
        name="pause",
        breaks=a_pause_is_another_attempt,
        promise="copies that differ must be found",
        schedule=replace(
            JOB,
            steps=40,
            mishaps=(
                Mishap(what="pause", when="state", name="healthy", lasting=0.5),
                flip(20),
            ),
        ),
    ),
)


@pytest.mark.parametrize("breach", BREACHES, ids=lambda breach: breach.name)
def test_simulation_finds_each_breach(breach: Breach, monkeypatch: Patch) -> None:
    """When the judgement is broken in one way, then the simulation reports the promise that this
    breaks. The same schedules break no promise before."""
    schedules = [replace(breach.schedule, seed=seed) for seed in range(breach.seeds)]
    assert not any(run(schedule).broken for schedule in schedules)
    breach.breaks(monkeypatch)
    assert breach.promise in {run(schedule).broken for schedule in schedules}


def test_policy_to_end_does_not_use_later_copies(monkeypatch: Patch) -> None:
    """When the policy is to end the job and the machine goes on with later copies, then the
    simulation reports that."""
    policy = replace(QUICK, corruption="end")
    schedule = replace(CORRUPTED, backups=0, policy=policy)
    assert run(schedule).result == "failed"
    the_newest_copy_is_used(monkeypatch)
    assert run(schedule).broken == "a copy of unknown correctness must not be used"
