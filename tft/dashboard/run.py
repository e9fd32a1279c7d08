"""
Follows one run of a job while it runs: its messages, and the files of its run directory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tft.clock import SystemClock, unix_time
from tft.controller.progress import PROGRESS
from tft.controller.remarks import REMARKS
from tft.core.job.incident import Incident
from tft.dashboard.curve import Curve
from tft.dashboard.grid import NodeRow, codes, layout
from tft.dashboard.remarks import Remarks
from tft.dashboard.view import Curves, Disk, Past, Ranks, Spent, Stage, View
from tft.errors import UsageError
from tft.launcher.look import Watch
from tft.launcher.records import Records
from tft.launcher.run_directory import STORY
from tft.launcher.situation import MEANS, Facts, Situation, headline, running, silence
from tft.replay.following import StoryFollower
from tft.report.facts import Facts as Report
from tft.report.facts import gather, known_of
from tft.report.goodput import INCIDENT, Goodput, Known, goodput, lately, together
from tft.report.progress import ProgressReader, RunProgress
from tft.report.sentences import moment
from tft.sentences import incident_sentence, what_happened

LATELY = 300.0
"""The time in seconds over which the page computes the present goodput."""
_GOODPUT = 2.0
"""Seconds between two computations of the goodput. It changes slowly."""
_SHARE = 50.0
"""The pause between two computations of the goodput, as a multiple of the time that one computation
takes. For a run of weeks, a computation takes a second."""

Entry = dict[str, Any]  # Any: JSON


@dataclass(slots=True, kw_only=True)
class _Told:
    """
    What is known about closed incidents. It is kept here, so that it is computed only once for each
    incident.
    """

    known: dict[int, Known] = field(default_factory=dict)
    past: list[Past] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)


class RunFollower:
    """
    Follows one run, and makes views of it.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self._clock = SystemClock()
        self._story = StoryFollower(records.run_dir / STORY)
        self._progress = ProgressReader(records.run_dir / PROGRESS)
        self._remarks = Remarks(path=records.run_dir / REMARKS)
        self._curve = Curve()
        self._earlier: tuple[list[Goodput], list[Past]] = ([], [])
        self._told = _Told()
        self._spent: Spent | None = None
        self._next = 0.0
        self._places: dict[int, int] = {}
        # what the present rows of nodes were made from: they are made again only when this has
        # changed, because making them takes long in a large job
        self._placed: tuple[dict[int, int], dict[int, str], int] = ({}, {}, 0)
        self._rows: tuple[NodeRow, ...] = ()
        self._reached = 0.0
        self._behind_at = -1

    # ------------------------------------------------------------ files

    def read_past(self) -> None:
        """
        Read the records of earlier runs in the directory. Call this method once.
        """
        try:
            report = gather(self.records.run_dir)
        except UsageError:  # the directory has no records of a run yet
            return
        ours = self._is_ours(report.runs[-1].progress.run) if report.runs else False
        earlier = report.runs[:-1] if ours else report.runs
        past = [each for each in past_of(report) if each.run <= len(earlier)]
        self._earlier = ([run.goodput for run in earlier], past)

    def read(self) -> None:
        """
        Read what was added to the files of the run.
        """
        self._story.read()
        self._remarks.read(self._story.run)
        try:
            self._progress.read()
        except OSError:
            return
        run = self._run()
        if run is not None:
            self._curve.take(run)
        for incident in self._story.closed if self._is_ours(self._story.run) else ():
            if incident.number not in self._told.known:
                self._close(incident, run)
        now = self._clock.now()
        if run is not None and now >= self._next:
            self._spent = self._spend(run)
            self._next = now + max(_GOODPUT, _SHARE * (self._clock.now() - now))

    def _is_ours(self, run: str) -> bool:
        return run == str(self.records.settings.get("run", run))

    def _run(self) -> RunProgress | None:
        runs = self._progress.runs
        return runs[-1] if runs and self._is_ours(runs[-1].run) else None

    def _close(self, incident: Incident, run: RunProgress | None) -> None:
        entry: Entry = self._story.described(incident)
        self._told.known[incident.number] = known_of(entry)
        self._told.lost[incident.number] = int(entry["steps_lost"])
        # the story and the progress file have times of the same clock, unless another machine's
        # controller has continued the run: then the time of day of the incident is not known
        at = run.unix + incident.opened - run.opened if run is not None and not run.shift else None
        self._told.past.insert(
            0,
            Past(
                number=incident.number,
                run=len(self._earlier[0]) + 1,
                when=moment(at),
                sentence=incident_sentence(entry),
            ),
        )
        self._next = 0.0

    def _spend(self, run: RunProgress) -> Spent:
        open_ = self._story.open if self._is_ours(self._story.run) else None
        known: Mapping[int, Known] = self._told.known
        if open_ is not None:
            entry = {**self._story.described(open_), "open": True}
            known = {**known, open_.number: known_of(entry)}
        until = run.last + max(0.0, unix_time() - run.last_unix)
        present = goodput(run, known, until)
        every = together([*self._earlier[0], present])
        return Spent(
            share=every.share,
            wall=every.wall,
            lately=lately(present, self._told.lost, LATELY),
            parts=every.parts,
            marks=[(s.start, s.end, s.incident) for s in present.spans if s.kind == INCIDENT],
        )

    # ------------------------------------------------------------ the view

    def view(self, watch: Watch, disk: Disk | None) -> View:
        """
        Return the present content of the page.
        """
        situation = Situation(
            records=self.records, watch=watch, story=self._story, now=self._clock.now()
        )
        facts = {**running(situation), "odd": watch.odd}
        if facts["open_incident"] is not None:
            if facts["state"] == "healthy":
                # take the state from the story, which is newer: the controller writes an event to
                # the story before it sends the messages about it
                facts["state"] = self._story.stages[-1][0]
            facts["open_incident"]["what"] = what_happened({**facts["open_incident"], "open": True})
        quiet = silence(self.records, facts)
        self._forget(facts)
        mood = "healthy" if facts["state"] == "healthy" and not facts["open_incident"] else "busy"
        troubles = [quiet] if quiet else []
        if self._story.failure:
            troubles.append(f"Incidents are not followed any more: {self._story.failure}")
        return View(
            name=self.records.run_dir.resolve().name,
            mood="trouble" if quiet else mood,
            title=headline(facts),
            trouble="; ".join(troubles),
            facts=facts,
            stages=self._stages(facts),
            past=[*self._told.past, *self._earlier[1]],
            spent=self._spent,
            remarks=[*self._remarks.behind.values(), *self._remarks.slow.values()],
            disk=disk,
            ranks=self._ranks(facts, watch),
            curves=Curves(
                points=self._curve.points,
                version=(self._curve.version, len(self._progress.runs)),
            ),
        )

    def _forget(self, facts: Facts) -> None:
        """
        If the job has completed a further step, drop the remarks about ranks that hold up the job.
        """
        step = -1 if facts["slowest"] is None else int(facts["slowest"]["step"])
        if not self._remarks.behind or facts["open_incident"] is not None:
            self._behind_at = step
        elif step != self._behind_at:
            self._remarks.behind.clear()

    def _stages(self, facts: Facts) -> list[Stage]:
        """
        Return the states through which the job has gone in the open incident, or since its start.
        The present state is the last. Return nothing while the job simply trains.
        """
        stages = self._story.stages
        if is_calm(facts, stages[-1][0] if stages else ""):
            return []
        ends: list[float | None] = [*(at for _, at in stages[1:]), *([None] if stages else [])]
        return [
            Stage(
                state=state,
                means=MEANS.get(state, ""),
                seconds=None if end is None else end - at,
            )
            for (state, at), end in zip(stages, ends, strict=True)
        ]

    def _ranks(self, facts: Facts, watch: Watch) -> Ranks:
        nodes = facts["parts"]["nodes"]
        world = max(self.records.world, 1 + max((r["rank"] for r in facts["ranks"]), default=-1))
        if not self._places:
            each = int(self.records.settings["nproc_per_node"])
            self._places = {rank: rank // each for rank in range(world)}
        for joined in self._story.nodes.values():
            for rank in joined.ranks:
                self._places.setdefault(rank, joined.node)
        for seen in facts["ranks"]:
            self._places[seen["rank"]] = seen["node"]
        # each agent sends ten heartbeats in a second: a node that has sent none in the first second
        # of the connection is silent
        now = self._clock.now()
        if not watch.broker:
            self._reached = 0.0
        elif not self._reached:
            self._reached = now
        letters = codes(
            facts,
            world,
            self._remarks.slow,
            self._remarks.behind,
            heard=bool(self._reached) and now - self._reached > 1.0,
        )
        hosts = {node["node"]: node["host"] or "" for node in nodes}
        if self._placed != (self._places, hosts, world):
            self._placed = dict(self._places), hosts, world
            self._rows = layout(self._places, hosts, world)
        return Ranks(codes=letters, rows=self._rows)


def past_of(report: Report) -> list[Past]:
    """
    Return the incidents of a report, the newest first.
    """
    return [
        Past(
            number=int(each["id"]),
            run=int(each.get("run", 1)),
            when=moment(each.get("began_unix")),
            sentence=incident_sentence(each),
        )
        for each in reversed(report.incidents)
        if not each.get("open")
    ]


def is_calm(facts: Facts, last: str) -> bool:
    """
    Return True if neither an incident nor the start of the job is going on. `last` is the last
    state in the story of the job. It is used while no controller reports the state of the job.
    """
    state = facts["state"] if facts["parts"]["controller"]["answers"] else last
    return facts["open_incident"] is None and "healthy" in (facts["state"], state)
