"""
Decides which faults a job must survive: a single fault, if other ranks still hold the state that is
needed.
"""

from tft.core.job.commands import JobOver
from tft.core.job.events import Received
from tft.core.job.transitions import SETTLED
from tft.protocol.messages import NodeJoined, NodeLost, Recalled, StoreOpened
from tft.simulation.schedule import Mishap, Schedule
from tft.simulation.stage import Stage

SHORT = 2.0
"""Seconds of silence after which the controller has certainly not given up a node or a process yet,
because its limits for silence are longer."""
ONE_RANK = ("kill", "hang", "stop", "memory", "corruption", "numeric", "network", "context")
"""The kinds of mishaps that harm the process or the state of one rank only."""
NOBODY = ("impostor", "controller", "deposed", "late", "slow")
"""The kinds of mishaps after which every rank still has its process and its state."""
NOTICED = ("straggler", "memory", "corruption", "network", "process", "hang", "numeric")
"""The kinds of faults that a job must survive when an observer outside the rank reports them."""


def lost_needlessly(stage: Stage, over: JobOver) -> str:
    """
    Return why a job that has ended should have continued. Return "" when the job could not
    continue, or has done all its steps.
    """
    faults = stage.mishaps.faults
    if over.result == "completed" or len(faults) != 1 or _asked_for(stage, over):
        return ""
    # a job may end before any rank has joined. If the job says that this was so, check that the
    # controllers have really handled no report that a rank has joined
    if over.why.endswith("before any rank had joined the job"):
        before = [
            n
            for (at, kind), n in stage.checks.seen.items()
            if kind == "Joined" and at not in SETTLED
        ]
        return "a rank had joined the job" if before else ""
    # a job may end without success after its last step, because the script may fail there
    if over.why.startswith("all steps are done"):
        return "not all steps are done" if stage.checks.invariants.short() else ""
    if stage.checks.invariants.given_up and stage.schedule.trouble.loss:
        # where messages are lost, the report that a process has ended may come too late. The job
        # then gives up this process, and may have no other place for its rank
        return ""
    return over.why if _survivable(stage, faults[0]) else ""


def _asked_for(stage: Stage, over: JobOver) -> bool:
    """
    Return whether a request, a check or a recovery plugin has brought about the end of the job, or
    may have prevented the recovery of the job. A requested switch of a rank opens an incident, so
    it counts towards the limit of incidents.
    """
    happened = stage.mishaps.happened
    limit = f"the job has had {stage.schedule.policy.max_incidents} incidents"
    return (
        stage.mishaps.harm.meddled
        or (over.why.startswith(limit) and any(m.what == "switch" for m in happened))
        or any(m.what == "request" for m in happened)
        or any(m.what == "pause" and m.kind in ("isolate", "end") for m in happened)
    )


def _survivable(stage: Stage, fault: Mishap) -> bool:
    schedule = stage.schedule
    twice = min(len(ranks) for ranks in schedule.groups().values()) >= 2
    able = {"retry", "recover"} <= schedule.policy.enable
    match fault.what:
        case "broker" | "partition" if fault.lasting <= SHORT:
            return able and twice
        case "node" | "partition":
            known = _known(stage, fault.target)
            kept = schedule.derives or _recalled(stage, fault.target)
            elsewhere = _elsewhere(schedule, fault.target, known)
            return able and fault.target in known and elsewhere and kept
        case "store":
            return able and twice and not _heard_late(stage, fault.target)
        case "fail":
            # with a longer `lasting`, the mishap makes the order fail at every attempt
            return able and twice and fault.lasting <= SHORT
        case "notice":
            spread = fault.kind in ("numeric", "corruption") and fault.lasting > 1
            return able and twice and fault.kind in NOTICED and not spread
        case what:
            return able and twice and what in (*ONE_RANK, *NOBODY)


def _known(stage: Stage, node: int) -> set[int]:
    """
    Return the nodes that had reported to the controllers before `node` was lost. Only these nodes
    count as replacements, because a job without a place for a rank does not wait for a node that
    may never come.
    """
    known: set[int] = set()
    agent = 0
    for event in stage.story.events:
        report = event.message if isinstance(event, Received) else None
        if isinstance(report, NodeLost) and report.node == node:
            break
        if isinstance(report, NodeJoined):
            if report.node == node and node in known and report.pid != agent:
                break  # another agent has joined: the node was lost without a report
            agent = report.pid if report.node == node else agent
            known.add(report.node)
    return known


def _elsewhere(schedule: Schedule, node: int, known: set[int]) -> bool:
    """
    Return whether the job can move the ranks of a lost node. Other known nodes must hold the state
    of the lost node and have room for its ranks.
    """
    gone = set(schedule.placement()[node])
    room = sum(schedule.spare(n) for n in schedule.placement() if n in known - {node})
    held = all(set(ranks) - gone for ranks in schedule.groups().values())
    return held and room >= len(gone) and schedule.nodes > 1


def _recalled(stage: Stage, node: int) -> bool:
    """
    Return True if other nodes have reported the rank-local state of all ranks of a lost node in
    time. It must be the state of the step in the last checkpoint of the job. Return False if the
    job has written no last checkpoint.
    """
    if stage.over is None or stage.over.result != "dumped":
        return False
    saved = max(leader.machine.last_step for leader in stage.cluster.leaders if leader.leads)
    lost = 0.0
    kept: set[int] = set()
    for event in stage.story.events:
        report = event.message if isinstance(event, Received) else None
        if isinstance(report, NodeLost) and report.node == node:
            lost = lost or event.at
        if isinstance(report, Recalled) and report.lost == node and event.at - lost < SHORT / 2:
            kept |= {report.rank} if saved in report.local_state else set()
    return kept >= set(stage.schedule.placement()[node])


def _heard_late(stage: Stage, target: int) -> bool:
    """
    Return whether the controllers heard the address of a node's new store too late: more than
    `SHORT` seconds after the store opened, or not at all. Earlier reports can delay this report,
    because reports are taken in the order in which they were sent.
    """
    node = stage.cluster.nodes[target % stage.schedule.nodes]
    heard = [
        event.at
        for event in stage.story.events
        if isinstance(event, Received)
        and isinstance(event.message, StoreOpened)
        and (event.message.host, event.message.port) == node.store.address
    ]
    return min(heard, default=stage.clock.now) - node.store.opened > SHORT
