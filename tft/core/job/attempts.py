"""
Opens incidents and begins their rounds. Faults join an incident, and processes are ordered to end.
A new round gives up the work of the round before, and asks every rank for its position.
"""

from collections.abc import Iterable
from dataclasses import replace

from tft.core.job.incident import Fault, Incident
from tft.core.job.rank_process import ProcessStage
from tft.core.job.rank_state import RankState
from tft.core.job.state import Job
from tft.core.job.transitions import TRANSITIONS, Reaction, State
from tft.protocol.messages import FaultKind, Freeze

S = State

REPEATABLE = frozenset({"process", "node", "hang"})
"""The kinds of fault that may occur again without showing that the strategy failed, because each
occurrence is in a different process."""


ALONE = (
    "A rank that evaluates or writes for longer says so: session.evaluate, session.after_step or "
    "session.expect"
)
"""Advice to the user, for a rank that was ended because it seemed to hang although it was only
busy."""


class Attempts:
    """
    Opens the incidents of one job, and begins their rounds.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def fault(
        self, kind: FaultKind, rank: int | None, step: int, seen: float, evidence: str,
        *, refused: bool = False,
    ) -> None:  # fmt: skip
        """
        Add a fault to the open incident, or open an incident for it. `step` is the step that was
        being computed; 0 means not known yet. `seen` is the time of the evidence in seconds
        (CLOCK_MONOTONIC). `refused` is True if the ranks have refused the update of the step.
        """
        job = self._job
        checking = "check" in job.incident.tasks
        self.open()
        incident = job.incident
        again = any(
            (f.kind, f.rank, f.step, f.refused) == (kind, rank, step, False)
            for f in incident.faults
        )
        if again and job.state is S.RESUMING and kind not in REPEATABLE and not refused:
            self._came_back(kind, step)
        fault = Fault(
            kind=kind, rank=rank, step=step, seen=seen, evidence=evidence, refused=refused
        )
        if not (refused and any(f.refused and f.step == step for f in incident.faults)):
            incident.faults.append(fault)
        job.tell("fault", incident=incident.number, kind=kind, rank=rank, step=step)
        if job.fault_reaction is Reaction.FREEZE:
            incident.decision.attempts = 0
            self.freeze()
        if checking:
            self._cut_off()

    def step_of(self, rank_state: RankState) -> int:
        """
        Return the step that a rank computes, or 0 while it trains and its position is unknown.
        """
        trains = rank_state.training and self._job.state in (S.HEALTHY, S.PAUSING, S.FREEZING)
        return 0 if trains else rank_state.position.step + 1

    def may_be_later(self, rank_state: RankState, step: int) -> bool:
        """
        Return True if some rank may have completed a later step than `step`, judged by the position
        of this rank: other ranks are at most one step ahead of it. Return True also if its position
        is unknown.
        """
        return self.step_of(rank_state) == 0 or rank_state.position.step >= step

    def pollute(self, rank_state: RankState) -> None:
        """
        Record that wrong numbers of this rank may have reached all ranks with its last update, so
        no copy of the state since that update is sound. If the step of that update is not known
        yet, `locate` records it later.
        """
        if not rank_state.repaired:
            return  # this process has taken part in no update yet
        if self.step_of(rank_state) == 0:
            self._job.incident.spread.by.add(rank_state.rank)
        else:
            self._job.incident.spread.lower(rank_state.position.step - 1)

    def locate(self) -> None:
        """
        Fill in the steps that were unknown, of faults and of updates with wrong numbers, once all
        ranks that can answer have reported their positions. For a rank that cannot answer, estimate
        the step from the positions of the others; the error is at most one step.
        """
        job, incident = self._job, self._job.incident
        said = {
            s.rank: s.position.step for s in job.ranks.states.values() if s.ready and s.repaired
        }
        for rank in incident.spread.by:
            incident.spread.lower(said.get(rank, incident.progress.furthest - 1) - 1)
        incident.spread.by = set()
        incident.faults = [
            fault
            if fault.step or fault.rank is None
            else replace(fault, step=said.get(fault.rank, incident.progress.furthest) + 1)
            for fault in incident.faults
        ]

    def _came_back(self, kind: FaultKind, step: int) -> None:
        """
        Handle a fault that occurs again: the strategy has not helped. For a numeric fault, the
        state that all ranks returned to may already contain the cause. So an earlier step is tried
        once, if a rank or a checkpoint has one.
        """
        job, incident = self._job, self._job.incident
        ceiling = step - 2
        earlier = [
            kept for rank_state in job.ranks.states.values() for kept in rank_state.holdings.kept
        ]
        earlier += job.checkpoints.known
        if kind == "numeric" and not incident.spread.guessed and any(s <= ceiling for s in earlier):
            incident.spread.guess(ceiling)
            return
        incident.decision.failed[incident.decision.base] = (
            f"the {kind} fault at step {step} occurred again"
        )

    def open(self) -> None:
        """
        Open an incident, unless one is open.
        """
        job = self._job
        if job.incident.is_open:
            return
        if job.incident.closed is None:  # a fault during the start turns the start into an incident
            job.incident.number, job.incident.opened = job.history.next_number, job.timing.now
        else:
            job.incident = Incident(number=job.history.next_number, opened=job.timing.now)
        job.history.next_number += 1
        job.incident.turnover.began_with = {
            s.rank: (s.process.pid, s.process.started) for s in job.ranks.states.values() if s.ready
        }
        if job.incident.number > job.policy.max_incidents:
            job.incident.decision.forced = (
                f"the job has had {job.policy.max_incidents} incidents, which is its limit"
            )

    def again(self, why: str) -> None:
        """
        Begin the present strategy again, in a new round. After `policy.attempts` attempts the
        strategy counts as failed.
        """
        self.open()
        self.count(self._job.incident.decision.attempts + 1, why)
        self.freeze()

    def count(self, attempts: int, why: str) -> None:
        """
        Record that the present strategy has failed `attempts` times. After `policy.attempts`
        failures it is not tried again in this incident. `why` is the reason of the last failure.
        """
        incident = self._job.incident
        incident.decision.attempts = attempts
        if attempts >= self._job.policy.attempts:
            incident.decision.failed[incident.decision.base] = why

    def terminate(self, rank_state: RankState, why: str, blame: FaultKind = "process") -> None:
        """
        Order the agent to end the process of a rank. The agent reports the end as `Exited`. `blame`
        is the kind of fault that is recorded for the end.
        """
        self.terminate_all([rank_state], why, blame)

    def terminate_all(self, rank_states: Iterable[RankState], why: str, blame: FaultKind) -> None:
        """
        Order the agents to end the processes of several ranks, as `terminate` does for one. First
        remove all of these ranks from the open orders: the first fault already starts a new round.
        """
        job = self._job
        going = [
            rank_state
            for rank_state in rank_states
            if not rank_state.process.terminating
            and rank_state.process.stage is not ProcessStage.GONE
        ]
        for rank_state in going:
            (
                rank_state.process.terminating,
                rank_state.process.blame,
                rank_state.process.terminating_since,
            ) = (
                why,
                blame,
                job.timing.now,
            )
            if job.ranks.holds_rank(rank_state):
                job.processes.displaced.append(rank_state)
                job.excuse(rank_state.rank)
        for rank_state in going:
            if blame == "hang" and rank_state.rank in job.ranks.members:
                suspicion = job.incident.suspicion
                evidence = f"{suspicion}. {ALONE}" if suspicion else why
                self.fault(
                    "hang", rank_state.rank, rank_state.position.step + 1, job.timing.now, evidence
                )
            job.kill(rank_state, why, last_words=blame == "hang")

    def freeze(self, cause: str = "") -> None:
        """
        Begin a new round: give up what is under way, and ask every rank for its position. `cause`
        is the reason of the round if there is no fault.
        """
        job, incident = self._job, self._job.incident
        incident.round += 1
        incident.tasks = {}
        incident.decision.plan = None
        incident.progress.reached = 0
        job.succession.gathering = False
        job.move(S.FREEZING)
        causes = [f"{f.kind} at rank {f.rank}" for f in incident.roots()]
        self.ask(", ".join(causes) or incident.suspicion or incident.decision.forced or cause)

    def ask(self, cause: str) -> None:
        """
        Ask every member for its position. Members that answer begin no further update.
        """
        job = self._job
        to = tuple(
            s.rank for s in job.ranks.member_states() if s.ready and not s.process.terminating
        )
        if to:
            job.issue(Freeze(**job.key(), to=to, cause=cause))

    # ---------------------------------------------------------------- checks

    def _cut_off(self) -> None:
        """
        End a check of links and devices that a fault has interrupted. The check is not repeated,
        because it could end in the same fault. The findings of the ranks that had finished the
        check are used.
        """
        job = self._job
        job.pausing.request = None
        found = self.findings()
        job.pausing.result = "; ".join([*found, "a fault has interrupted it"])
        job.tell("checked", what=job.pausing.result)
        self.judge()

    def findings(self) -> list[str]:
        """
        Return the findings of the last check, the most serious first. A finding of several ranks is
        listed once, with the numbers of these ranks.
        """
        found: dict[str, list[int]] = {}
        for verdict in ("end", "isolate", "pass"):
            for rank_state in self._job.ranks.member_states():
                if rank_state.check.verdict == verdict and (
                    verdict != "pass" or rank_state.check.finding
                ):
                    found.setdefault(rank_state.check.finding, []).append(rank_state.rank)
        return [f"{what} (rank {', '.join(map(str, r))})" for what, r in found.items()]

    def judge(self) -> bool:
        """
        Do what the verdicts of a check demand: end the job, or give up nodes. Return True if a
        verdict demanded something.
        """
        rank_states = self._job.ranks.member_states()
        if any(rank_state.check.verdict == "end" for rank_state in rank_states):
            self.force(f"the check ends the job: {self.findings()[0]}")
            return True
        bad = [rank_state for rank_state in rank_states if rank_state.check.verdict == "isolate"]
        for rank_state in bad:
            self.isolate(
                rank_state, f"the check found: {rank_state.check.finding} (rank {rank_state.rank})"
            )
        return bool(bad)

    # ---------------------------------------------------------------- ends and isolations

    def salvage(self, lost: int) -> bool:
        """
        Let the survivors save a last checkpoint, although `lost` events are not known. Return False
        if that is not possible, because the positions of the ranks are not asked for any more.

        Each lost event may have begun an incident or a round. So the ranks get an order with a
        number that is higher than any that they can have heard.
        """
        job = self._job
        if S.FREEZING not in TRANSITIONS[job.state]:
            return False
        job.history.lost += lost
        job.history.next_number += lost
        if job.incident.is_open:
            job.incident.number = job.history.next_number
            job.history.next_number += 1
        self.open()
        job.incident.decision.forced = (
            f"the story of the run is damaged, and {lost} of its events could not be read"
        )
        self.freeze()
        return True

    def force(self, why: str) -> None:
        """
        Exclude every strategy except a last checkpoint, or the end of the job without one.
        """
        job = self._job
        self.open()
        job.incident.decision.forced = job.incident.decision.forced or why
        if job.fault_reaction is Reaction.FREEZE:
            self.freeze()

    def isolate(self, rank_state: RankState, why: str) -> None:
        """
        Give up the node of a rank: end its processes, and start no process there again. If some
        shard is on no other node, keep the processes and force a last checkpoint instead.
        """
        job = self._job
        if rank_state.node is None:
            return
        job.nodes.isolated.add(rank_state.node)
        if rank_state.node in job.nodes.lost:
            return
        going = [s.rank for s in job.ranks.states.values() if s.node == rank_state.node]
        alone = job.ranks.only_on(going)
        job.nodes.lost.add(rank_state.node)
        for rank in going:
            one = job.ranks.states[rank]
            if rank in job.ranks.members and one.ready:
                self.fault("node", rank, self.step_of(one), job.timing.now, why)
            if not alone:
                self.terminate(one, why, "node")
        for successor in job.succession.successors.values():
            if successor.node == rank_state.node:
                self.terminate(successor, why)
        if alone:
            self.force(f"{why}; no rank outside node {rank_state.node} has shard {alone[0]!r}")
