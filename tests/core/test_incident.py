"""
An incident: its faults, its step, the names of its parts, and its rounds.
"""

from typing import (
    Any,
)

import pytest

from tests.core.lives import (
    strategies,
    trained,
)
from tft.core.job.incident import (
    Exactness,
    Fault,
    Incident,
    Progress,
    Spread,
)
from tft.core.job.incident_report import (
    incident_report,
)
from tft.core.job.policy import (
    Policy,
)
from tft.protocol.messages import (
    FaultKind,
    Fetch,
    Position,
    Restore,
)
from tft.testing.scripted import (
    ScriptedJob,
)

# ---------------------------------------------------------------- faults and names


def fault(kind: FaultKind, rank: int | None = None, step: int = 4) -> Fault:
    """
    Return a fault of this kind.
    """
    return Fault(kind=kind, rank=rank, step=step, seen=1.0, evidence="it broke")


def open_one(**facts: Any) -> Incident:  # Any: the fields have different types
    """
    Return an incident that has just opened, with these fields.
    """
    return Incident(number=1, opened=1.0, **facts)


def test_new_incident_is_empty() -> None:
    """When an incident opens, then it has no faults, decisions or actions yet. The base of its
    first strategy is `retry`."""
    incident = open_one()
    assert incident.is_open
    assert (incident.decision.strategy, incident.decision.base, incident.round, incident.decision.attempts) == (
        "", "retry", 0, 0,
    )  # fmt: skip
    assert (
        incident.progress.furthest,
        incident.progress.reached,
        incident.progress.steps_lost,
    ) == (0, 0, 0)
    assert (incident.suspicion, incident.decision.forced, incident.turnover.started) == ("", "", 0)
    assert (incident.exactness.skip, incident.decision.awaited, incident.decision.waited) == (
        0,
        False,
        0.0,
    )
    assert (incident.spread.tentative, incident.spread.guessed) == (False, False)
    assert (incident.faulty(), incident.numeric_step()) == (set(), 0)


def test_start_of_the_job_is_no_open_incident() -> None:
    """When the job starts (number 0), or an incident is closed, then no incident is open."""
    assert not Incident(number=0, opened=1.0).is_open
    assert not open_one(closed=2.0).is_open
    assert open_one().is_open


def test_network_faults_are_causes_only_without_another_fault() -> None:
    """When connections break and there is no other fault, then the network faults are the causes.
    When another fault is added, they count as its consequences, and no rank is at fault because of
    them."""
    network = fault("network", 0)
    incident = open_one(faults=[network])
    assert incident.roots() == [network]
    assert incident.faulty() == {0}
    killed, nobody = fault("process", 2), fault("memory", None)
    incident.faults += [killed, nobody]
    assert incident.roots() == [killed, nobody]
    assert incident.faulty() == {2}


def test_numeric_step_is_the_last_step_with_a_numeric_fault() -> None:
    """When there were numeric faults at several steps, then the numeric step is the last of them.
    Other faults at later steps do not change it."""
    faults = [fault("numeric", 1, 6), fault("numeric", 2, 8), fault("memory", 3, 9)]
    assert open_one(faults=faults).numeric_step() == 8
    assert open_one(faults=faults[2:]).numeric_step() == 0


def test_ceiling_is_only_lowered() -> None:
    """When several faults set a ceiling, the last step with sound state, then the lowest ceiling
    applies. A ceiling is never below step 0."""
    incident = open_one()
    incident.spread.lower(5)
    assert incident == open_one(spread=Spread(ceiling=5, firm=5))
    incident.spread.lower(7)
    assert incident == open_one(spread=Spread(ceiling=5, firm=5))
    incident.spread.lower(3)
    assert incident == open_one(spread=Spread(ceiling=3, firm=3))
    incident.spread.lower(-1)
    assert incident == open_one(spread=Spread(ceiling=0, firm=0))
    incident.spread.lift()
    assert incident == open_one()


def test_preferred_ceiling_gives_way_to_the_ceiling_that_faults_demand() -> None:
    """When copies of earlier steps than the faults demand are preferred, and there are none, then
    the ceiling of the faults applies, however low the preferred one was."""
    incident = open_one()
    incident.spread.prefer(4)
    assert (incident.spread.ceiling, incident.spread.tentative) == (4, True)
    incident.spread.lower(8)
    incident.spread.prefer(6)
    assert (incident.spread.ceiling, incident.spread.tentative) == (4, True)
    incident.spread.yield_to_need()
    assert (incident.spread.ceiling, incident.spread.tentative) == (8, False)


def test_step_in_its_update_counts_as_reached_but_not_as_completed() -> None:
    """When a rank is in the update window of step 4, then step 3 is its furthest completed step,
    and step 4 is reached. A rank that is further behind changes neither number."""
    incident = open_one()
    incident.progress.saw(Position(step=3, window=True))
    incident.progress.saw(Position(step=2, window=True))
    assert (incident.progress.furthest, incident.progress.reached) == (3, 4)
    incident.progress.saw(Position(step=4, window=False))
    assert (incident.progress.furthest, incident.progress.reached) == (4, 4)


@pytest.mark.parametrize(("step", "lost"), [(None, 0), (9, 0), (8, 1), (3, 6), (12, 0)])
def test_steps_lost_are_the_completed_steps_computed_again(step: int | None, lost: int) -> None:
    """When some rank had completed 8 steps, then each of these steps that is computed again is
    lost. The interrupted step is not."""
    assert Progress(furthest=8, step=step).steps_lost == lost


def test_reservations_about_steps_computed_again_are_dropped() -> None:
    """When all members continue from the end of step 5, then reservations about steps up to 5 stay.
    Reservations about later steps are dropped."""
    exactness = Exactness(reservations=[(4, "four"), (5, "five"), (6, "six")])
    exactness.returns_to(5)
    assert exactness.sentences == ["four", "five"]


def phases(job: ScriptedJob) -> list[str]:
    """
    Return the names of the newest incident's phases in order. Consecutive equal names appear once.
    """
    words = [str(phase["name"]) for phase in job.reports()[-1]["phases"]]
    return [word for word, before in zip(words, ["", *words], strict=False) if word != before]


def test_report_names_the_process_of_each_fault() -> None:
    """When a rank has lost its process, and later its new process, then each fault has the pid of the
    process that held the rank then, and the host of its node."""
    job = trained()
    job.kill(2)
    job.settle()
    job.train()
    job.kill(2)
    job.settle()
    job.train()
    faults = [fault for report in job.reports() for fault in report["faults"]]
    assert [(f["rank"], f["pid"], f["host"]) for f in faults] == [(2, 1002, "h"), (2, 2002, "h")]


def test_report_names_no_process_where_none_is_known() -> None:
    """When a fault has no rank, then the report names no process."""
    incident = open_one(faults=[fault("network")])
    assert incident_report(incident, lambda _: None)["faults"] == [
        {
            "kind": "network", "rank": None, "step": 4, "at": 0.0, "pid": None, "host": "",
            "evidence": "it broke",
        }
    ]  # fmt: skip


def test_report_has_the_phases_of_a_replacement() -> None:
    """When a rank is replaced, then the report has the phases by name. All orders that bring state
    are the phase `repair`. Orders to form groups and to build wrappers are the phase `rebuild`."""
    job = trained()
    job.kill(1)
    job.settle()
    job.train()
    assert phases(job) == [
        "freeze", "await", "clear", "compare", "rebuild", "repair", "rebuild", "rollback", "resume",
    ]  # fmt: skip


@pytest.mark.parametrize("way", ["restore", "load"])
def test_restoring_and_loading_count_as_repair(way: str) -> None:
    """When all ranks restore their own copies or load a checkpoint, then this counts as the phase
    `repair`."""
    job = trained(steps=6, keeps=2 if way == "restore" else 0)
    if way == "load":
        job.checkpointed(4)
    job.fault(1, "numeric", polluted=True)
    job.settle()
    job.train()
    assert set(phases(job)) == {"freeze", "clear", "rebuild", "repair", "rollback", "resume"}


def test_writing_and_committing_are_one_phase() -> None:
    """When a last checkpoint is written, then writing and committing are together the phase `save`
    of the incident."""
    job = ScriptedJob(4, Policy(enable=frozenset({"dump"}))).start()
    job.train(3)
    job.fault(1, "network")
    job.settle()
    assert job.over is not None
    assert phases(job) == ["freeze", "clear", "compare", "save"]


# ---------------------------------------------------------------- a new round


def test_strategy_is_cleared_when_another_fault_joins() -> None:
    """When a fault comes while a strategy is followed, then the incident has no strategy until the
    next decision."""
    job = trained()
    job.script.muted = {(0, "regroup")}
    job.kill(1)
    job.settle()
    assert job.machine.incident.decision.strategy == "recover"
    job.fault(2, "memory")
    assert (job.doing, job.machine.incident.decision.strategy) == ("freezing", "")
    job.script.muted = set()
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]


def test_repeated_numeric_fault_rolls_all_ranks_back_to_step_0() -> None:
    """When step 2 has a numeric fault again after a retry, then all ranks restore their kept copy
    of step 0."""
    job = trained(steps=1, keeps=1)
    for _ in range(2):
        job.fault(2, "numeric")
        job.settle()
    job.train()
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((2,), 1)]
    assert [r.step for r in job.orders(Restore)] == [0]
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"]) == ("retry", 1)


def test_step_of_a_fault_comes_from_the_other_ranks_when_the_node_is_lost() -> None:
    """When a fault of a rank is noticed and its node is lost before the rank reports its step, then
    the fault has the step that the other ranks compute."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, steps=3)
    job.notice(3, "memory", "its memory is bad")
    job.lose_node(1)
    job.settle()
    faults = {(fault.kind, fault.rank): fault.step for fault in job.machine.incident.faults}
    assert faults["memory", 3] == 4
