"""
Collects the facts about a job that commands such as `tft status` show, and finds the ranks that
stand out. The facts come from the records of the run, from its story (the record of all events),
and from messages of the running job.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tft.launcher.look import RankSeen, Watch, pace
from tft.launcher.records import Records
from tft.stopped import is_stopped

if TYPE_CHECKING:  # `tft run` imports this module, and must not import the job machine
    from tft.replay.following import StoryFollower

_BEHIND = 2
"""How many steps, at least, a rank must be behind the fastest rank to stand out. Nodes do not send
their heartbeats at the same moment, so a difference of one step means nothing."""
_STANDS = 1.0
"""A rank does not stand out if it has made no progress, or is behind the fastest rank, for less
than this many seconds."""
_STEPS = 3
"""If a rank has made no progress for the time of this many steps, while another rank has, the rank
is listed as one that stands out."""

MEANS = {
    "unknown": "no controller leads the job",
    "awaiting": "processes are starting",
    "repairing": "lost state is copied, groups are formed",
    "rebuilding": "wrappers are built",
    "rolling back": "generators and data go back to one step",
    "resuming": "the first step is trained",
    "pausing": "all ranks go on to one step",
    "paused": "`tft resume` lets it go on",
    "confirming": "all ranks have finished, copies are compared",
    "freezing": "the ranks are asked where they stand",
    "clearing": "the ranks leave their loops",
    "choosing": "a strategy is chosen",
    "dumping": "a last checkpoint is written",
    "exiting": "the ranks are leaving",
    "ended": "no rank is left",
}
"""The meaning of each state of a job in a few words. `docs/reference/machine.md` explains the
states."""

Facts = dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """
    Everything that is known of a running job.
    """

    records: Records
    watch: Watch
    story: "StoryFollower"
    now: float
    """The time in seconds (CLOCK_MONOTONIC)."""

    def expected_nodes(self) -> set[int]:
        """
        Return the nodes that take part, as far as this is known.
        """
        if self.story.nodes:
            return set(self.story.nodes)
        return set(range(int(self.records.settings["nnodes"])))


def running(situation: Situation) -> Facts:
    """
    Return the facts of a running job, as `tft status --json` prints them.
    """
    watch, story, records = situation.watch, situation.story, situation.records
    pids = {**story.pids, **watch.pids()}
    heard = watch.ranks()
    ranks = [_rank(seen, pids, records) for seen in heard.values()]
    members = story.members or frozenset(range(records.world))
    together = pace([each for rank, each in heard.items() if rank in members])
    incidents = story.count
    if story.failure and watch.lead is not None:
        incidents = watch.lead.incident
    return {
        "run_dir": str(records.run_dir),
        "job": records.there.job,
        "command": list(records.command),
        "began": records.began,
        "state": watch.state or "unknown",
        "slowest": _where(together.slowest),
        "fastest": _where(together.fastest),
        "step_seconds": together.step_seconds,
        "seconds_since_progress": together.standstill,
        "incidents": incidents,
        "open_incident": _open(situation),
        "last_incident": story.described(story.closed[-1]) if story.closed else None,
        "remarks": [each.text for each in watch.notices if not each.incident],
        "parts": _parts(situation, heard),
        "ranks": ranks,
        "missing_ranks": sorted(members - {each["rank"] for each in ranks}),
        "ranks_left_out": sorted(set(range(records.world)) - members),
        "story_failure": story.failure,
    }


def over(records: Records) -> Facts:
    """
    Return the facts of a run that has ended, as `tft status --json` prints them.
    """
    report = records.report or {}
    incidents = report.get("incidents", [])
    return {
        "run_dir": str(records.run_dir),
        "job": records.there.job,
        "command": list(records.command),
        "began": records.began,
        "state": "over",
        "result": records.result,
        "why": report.get("why", ""),
        "exit_code": report.get("exit_code"),
        "steps": report.get("steps"),
        "incidents": len(incidents),
        "last_incident": incidents[-1] if incidents else None,
        "advice": records.advice(),
    }


def headline(facts: Facts) -> str:
    """
    Return what a job does, in a few words.
    """
    if facts["state"] == "over":
        return str(facts["result"])
    state, incident = facts["state"], facts["open_incident"]
    means = f", {MEANS[state]}" if state in MEANS else ""
    if incident is None:
        return f"{state}{means}"
    since = f", {incident['seconds']:.1f} s" if incident["seconds"] is not None else ""
    return f"incident {incident['id']}{since}: {state}{means}"


def silence(records: Records, facts: Facts) -> str:
    """
    Return a sentence that says why a job does not answer, and what to check. It is empty if the
    job's controller answers.
    """
    parts, odd = facts["parts"], f" ({facts['odd']})" if facts.get("odd") else ""
    if parts["controller"]["answers"]:
        return ""
    address = records.there.broker
    if records.result != "running":
        silent = (
            f"no controller answers at {address}"
            if parts["broker"]["answers"]
            else f"its broker at {address} does not answer"
        )
        return (
            f"the job in {records.run_dir} has ended without a report, or runs on other machines: "
            f"none of its processes lives here, and {silent}{odd}; {records.advice()}"
        )
    lives = f"its processes live ({_named(records)})" if records.living else "its launcher lives"
    stopped = [part for part, pid in records.living.items() if is_stopped(pid)]
    held = f", but these are stopped (SIGSTOP): {', '.join(stopped)}" if stopped else ""
    alive = f"{lives}{held}; see {records.there.log}"
    if not parts["broker"]["answers"]:
        return f"the broker of the job at {address} does not answer{odd}; {alive}"
    return f"the broker answers, but no controller leads the job{odd}; {alive}"


def _named(records: Records) -> str:
    told = records.launchers or records.living
    first = [f"{part} {pid}" for part, pid in list(told.items())[:3]]
    return ", ".join([*first, *(["…"] if len(told) > len(first) else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Oddity:
    """
    A rank of a running job that an operator should look at.
    """

    rank: int
    kind: str
    """`silent`, `stopped`, `outside` (of the training loop), or `behind`."""
    reason: str


def standing_out(facts: Facts) -> list[tuple[int, str]]:
    """
    Return the ranks of a running job that an operator should look at, each with the reason.
    """
    return [(odd.rank, odd.reason) for odd in oddities(facts)]


def oddities(facts: Facts) -> list[Oddity]:
    """
    Return the ranks of a running job that an operator should look at, each with the reason as a
    word and as a sentence. No rank is listed twice.
    """
    found = [
        Oddity(rank=rank, kind="silent", reason="no heartbeat") for rank in facts["missing_ranks"]
    ]
    top = facts["fastest"]["step"] if facts["fastest"] else 0
    limit = max(_STANDS, _STEPS * (facts["step_seconds"] or 0.0))
    moves = (facts["seconds_since_progress"] or 0.0) < limit
    trains = any(each["training"] for each in facts["ranks"])
    left_out = frozenset(facts["ranks_left_out"])
    for each in facts["ranks"]:
        kind = reason = ""
        behind, stands = top - each["step"], each["seconds_since_progress"]
        if each["rank"] in left_out:
            continue
        if each["stopped"]:
            kind, reason = "stopped", "its process is stopped (SIGSTOP)"
        elif trains and not each["training"]:
            kind, reason = "outside", "is not in the training loop"
        elif _is_behind(behind, facts["step_seconds"]):
            kind, reason = "behind", f"is {behind} steps behind"
        elif moves and stands > limit:
            kind, reason = "behind", f"has made no progress for {stands:.1f} s"
        if kind:
            found.append(Oddity(rank=each["rank"], kind=kind, reason=reason))
    return sorted(found, key=lambda odd: odd.rank)


def _is_behind(steps: int, seconds: float | None) -> bool:
    # if steps are short, a rank completes many steps between two heartbeats, so look at the time
    return steps >= _BEHIND and (seconds is None or steps * seconds >= _STANDS)


def _where(seen: RankSeen | None) -> Facts | None:
    return None if seen is None else {"rank": seen.pulse.rank, "step": seen.pulse.position.step}


def _rank(seen: RankSeen, pids: Mapping[tuple[int, int], int], records: Records) -> Facts:
    pulse = seen.pulse
    pid = pids.get((pulse.rank, pulse.incarnation))
    here = f"agent-{seen.node}" in records.living
    return {
        "rank": pulse.rank,
        "node": seen.node,
        "pid": pid,
        "incarnation": pulse.incarnation,
        "step": pulse.position.step,
        "training": pulse.training,
        "update_window": pulse.position.window,
        "seconds_since_progress": seen.standstill,
        "step_seconds": seen.step_seconds,
        # a pid of another machine may be the pid of any process on this machine
        "stopped": here and pid is not None and is_stopped(pid),
    }


def _open(situation: Situation) -> Facts | None:
    incident = situation.story.open
    if incident is None:
        return None
    # the times in a story come from the clock of the controller's machine. So the age of the
    # incident is known only if the controller runs on this machine
    here = bool({"run", "lead"} & situation.records.launchers.keys())
    described: Mapping[str, Any] = situation.story.described(incident)
    return {
        "id": incident.number,
        "faults": described["faults"],
        "strategy": described["strategy"] if incident.decision.plan is not None else "",
        "seconds": situation.now - incident.opened if here else None,
    }


def _parts(situation: Situation, heard: Mapping[int, RankSeen]) -> Facts:
    watch, story = situation.watch, situation.story
    answering = watch.nodes()
    nodes = []
    ranks: dict[int, list[int]] = {}
    for rank, seen in heard.items():
        ranks.setdefault(seen.node, []).append(rank)
    for node in sorted(situation.expected_nodes() | answering):
        joined = story.nodes.get(node)
        nodes.append(
            {
                "node": node,
                "host": joined.host if joined else None,
                "pid": joined.pid if joined else None,
                "answers": node in answering,
                "ranks": ranks.get(node, []),
            }
        )
    return {
        "broker": {"address": situation.records.there.broker, "answers": watch.broker},
        "controller": {
            "answers": watch.leads,
            "epoch": None if watch.lead is None else watch.lead.epoch,
        },
        "nodes": nodes,
    }
