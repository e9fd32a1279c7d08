"""
How an incident opens and begins anew: faults join it, ranks are told to end, and with every new
round whatever was under way is given up and everyone says where they stand.
"""

from collections.abc import Iterable
from dataclasses import replace

from tft.core.incident import Fault, Incident
from tft.core.job import Job
from tft.core.rank_state import Process, RankState
from tft.core.table import FAULTS, Reaction, State
from tft.protocol.messages import FaultKind, Freeze

S = State

REPEATABLE = frozenset({"process", "node", "hang"})
"""Kinds that a strategy may meet again without having failed: the process is another one."""


ALONE = (
    "A rank that evaluates or writes for longer says so: session.evaluate, session.after_step or "
    "session.expect"
)
"""What a script can do about a hang that is none."""


class Attempts:
    """
    The rounds of one job's incidents.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def fault(
        self, kind: FaultKind, rank: int | None, step: int, seen: float, evidence: str
    ) -> None:
        """
        A new fault opens an incident or joins the one that is open.
        """
        job = self._job
        checking = "check" in job.incident.tasks
        self.open()
        incident = job.incident
        again = any((f.kind, f.rank, f.step) == (kind, rank, step) for f in incident.faults)
        if again and job.state is S.RESUMING and kind not in REPEATABLE:
            self._came_back(kind, step)
        incident.faults.append(Fault(kind=kind, rank=rank, step=step, seen=seen, evidence=evidence))
        job.tell("fault", incident=incident.number, kind=kind, rank=rank, step=step)
        if FAULTS[job.state] is Reaction.FREEZE:
            incident.attempts = 0
            self.freeze()
        if checking:
            self._cut_off()

    def step_of(self, rank_state: RankState) -> int:
        """
        The step that a rank computes; 0 while it trains and has not said where it is.
        """
        trains = rank_state.training and self._job.state in (S.HEALTHY, S.PAUSING, S.FREEZING)
        return 0 if trains else rank_state.position.step + 1

    def may_be_later(self, rank_state: RankState, step: int) -> bool:
        """
        Whether somebody may have completed a later step than this, as far as this rank knows: others are at most
        one ahead of it.
        """
        return self.step_of(rank_state) == 0 or rank_state.position.step >= step

    def pollute(self, rank_state: RankState) -> None:
        """
        What is wrong on a rank may have spread with its last update: no copy since then is sound.
        """
        if not rank_state.repaired:
            return  # it has contributed nothing yet
        if self.step_of(rank_state) == 0:
            self._job.incident.spread_by.add(rank_state.rank)
        else:
            self._job.incident.lower(rank_state.position.step - 1)

    def locate(self) -> None:
        """
        Everyone who can has said where they are: so much for what was seen of ranks that trained.
        Of one that cannot say it any more, the others know it within a step.
        """
        job, incident = self._job, self._job.incident
        said = {s.rank: s.position.step for s in job.rank_states.values() if s.ready and s.repaired}
        for rank in incident.spread_by:
            incident.lower(said.get(rank, incident.furthest - 1) - 1)
        incident.spread_by = set()
        incident.faults = [
            fault
            if fault.step or fault.rank is None
            else replace(fault, step=said.get(fault.rank, incident.furthest) + 1)
            for fault in incident.faults
        ]

    def _came_back(self, kind: FaultKind, step: int) -> None:
        """
        What was done about a fault has not helped. A numeric one may have been in the state that
        everyone was brought back to: the step before is tried, where somebody has it.
        """
        job, incident = self._job, self._job.incident
        ceiling = step - 2
        earlier = [kept for rank_state in job.rank_states.values() for kept in rank_state.kept]
        earlier += job.checkpoints
        if kind == "numeric" and not incident.guessed and any(s <= ceiling for s in earlier):
            incident.ceiling, incident.tentative, incident.guessed = ceiling, True, True
            return
        incident.failed[incident.base] = f"the {kind} fault at step {step} came back"

    def open(self) -> None:
        """
        Makes sure that an incident is open.
        """
        job = self._job
        if job.incident.is_open:
            return
        if job.incident.closed is None:  # the start itself has become an incident
            job.incident.number, job.incident.opened = job.next_number, job.now
        else:
            job.incident = Incident(number=job.next_number, opened=job.now)
        job.next_number += 1
        job.incident.processes = {
            s.rank: (s.pid, s.started) for s in job.rank_states.values() if s.ready
        }
        if job.incident.number > job.policy.max_incidents:
            job.incident.forced = (
                f"the job has had {job.policy.max_incidents} incidents, which is its limit"
            )

    def again(self, why: str) -> None:
        """
        A strategy is begun anew, a few times; then it has failed.
        """
        self.open()
        self.count(self._job.incident.attempts + 1, why)
        self.freeze()

    def count(self, attempts: int, why: str) -> None:
        """
        The present strategy was begun so many times; after a few it has failed.
        """
        incident = self._job.incident
        incident.attempts = attempts
        if attempts >= self._job.policy.attempts:
            incident.failed[incident.base] = why
            incident.attempts = 0

    def terminate(self, rank_state: RankState, why: str, blame: FaultKind) -> None:
        """
        The process of a rank is to be ended; its end will come in as `Exited`.
        """
        self.terminate_all([rank_state], why, blame)

    def terminate_all(self, rank_states: Iterable[RankState], why: str, blame: FaultKind) -> None:
        """
        The same of several at once: none of them is asked anything more.
        """
        job = self._job
        going = [
            rank_state
            for rank_state in rank_states
            if not rank_state.terminating and rank_state.process is not Process.GONE
        ]
        for rank_state in going:
            rank_state.terminating, rank_state.blame, rank_state.terminating_since = (
                why,
                blame,
                job.now,
            )
            if job.holds_rank(rank_state):
                job.displaced.append(rank_state)
                job.excuse(rank_state.rank)
        for rank_state in going:
            if blame == "hang" and rank_state.rank in job.members:
                suspicion = job.incident.suspicion
                evidence = f"{suspicion}. {ALONE}" if suspicion else why
                self.fault("hang", rank_state.rank, rank_state.position.step + 1, job.now, evidence)
            job.kill(rank_state, why, last_words=blame == "hang")

    def freeze(self, cause: str = "") -> None:
        """
        A new round: whatever was under way is given up, and everyone says where they stand.
        `cause` says why where nothing is wrong.
        """
        job, incident = self._job, self._job.incident
        incident.round += 1
        incident.tasks = {}
        incident.strategy = ""
        incident.reached = 0
        job.gathering = False
        job.move(S.FREEZING)
        causes = [f"{f.kind} at rank {f.rank}" for f in incident.roots()]
        self.ask(", ".join(causes) or incident.suspicion or incident.forced or cause)

    def ask(self, cause: str) -> None:
        """
        Asks every member where it stands, and holds it back from its next update.
        """
        job = self._job
        to = tuple(s.rank for s in job.member_states() if s.ready and not s.terminating)
        if to:
            job.issue(Freeze(**job.key(), to=to, cause=cause), limit=job.policy.freeze)

    # ---------------------------------------------------------------- checks

    def _cut_off(self) -> None:
        """
        A fault has come before all have come through a check. It would end in that again and is
        not begun anew; what some have found by then counts.
        """
        job = self._job
        job.pause = None
        found = self.findings()
        job.checked = "; ".join([*found, "a fault has cut it off"])
        job.tell("checked", what=job.checked)
        self.judge()

    def findings(self) -> list[str]:
        """
        What a check has found, once each, with the ranks it was found on: the gravest first.
        """
        found: dict[str, list[int]] = {}
        for verdict in ("end", "isolate", "pass"):
            for rank_state in self._job.member_states():
                if rank_state.verdict == verdict and (verdict != "pass" or rank_state.finding):
                    found.setdefault(rank_state.finding, []).append(rank_state.rank)
        return [f"{what} (rank {', '.join(map(str, r))})" for what, r in found.items()]

    def judge(self) -> bool:
        """
        Does what a check has found to be done: the job ends, or nodes are isolated. Whether there was
        anything of that kind.
        """
        rank_states = self._job.member_states()
        if any(rank_state.verdict == "end" for rank_state in rank_states):
            self.force(f"the check ends the job: {self.findings()[0]}")
            return True
        bad = [rank_state for rank_state in rank_states if rank_state.verdict == "isolate"]
        for rank_state in bad:
            self.isolate(
                rank_state, f"the check found: {rank_state.finding} (rank {rank_state.rank})"
            )
        return bool(bad)

    # ---------------------------------------------------------------- ends and isolations

    def force(self, why: str) -> None:
        """
        Nothing but a last checkpoint comes into question from here on.
        """
        job = self._job
        self.open()
        job.incident.forced = job.incident.forced or why
        if FAULTS[job.state] is Reaction.FREEZE:
            self.freeze()

    def isolate(self, rank_state: RankState, why: str) -> None:
        """
        The node of a rank is given up: its processes are ended, and none is started there again.
        Where nobody else has their shards, they are needed for a last checkpoint first.
        """
        job = self._job
        if rank_state.node is None:
            return
        job.isolated.add(rank_state.node)
        if rank_state.node in job.lost_nodes:
            return
        going = [s.rank for s in job.rank_states.values() if s.node == rank_state.node]
        alone = job.only_on(going)
        job.lost_nodes.add(rank_state.node)
        for rank in going:
            one = job.rank_states[rank]
            if rank in job.members and one.ready:
                self.fault("node", rank, self.step_of(one), job.now, why)
            if not alone:
                self.terminate(one, why, "node")
        for successor in job.successors.values():
            if successor.node == rank_state.node:
                self.terminate(successor, why, "node")
        if alone:
            self.force(f"{why}; nobody outside node {rank_state.node} has shard {alone[0]!r}")
