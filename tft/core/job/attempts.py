"""
Opens incidents, adds faults to incidents, begins new rounds, and orders processes to end. A round
is one attempt within an incident. A new round gives up the work of the round before, and asks every
rank for its position in the training loop.
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
"""The kinds of fault that may occur a second time in an incident without showing that the recovery
strategy has failed. The process with the first fault was replaced, so the second fault is in
another process."""


ALONE = (
    "A rank that evaluates or writes for longer says so: session.evaluate, session.after_step or "
    "session.expect"
)
"""A sentence for the user that names the functions with which a script announces a long pause
between steps. When a process is ended because it seems to hang, this sentence is added to the
evidence of the fault: perhaps the process was only busy."""


class Attempts:
    """
    Opens the incidents of one job, and begins the rounds of each incident.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def fault(
        self, kind: FaultKind, rank: int | None, step: int, seen: float, evidence: str,
        *, refused: bool = False,
    ) -> None:  # fmt: skip
        """
        Add a fault to the open incident. If no incident is open, open one. `rank` is the rank at
        fault, or None if no single rank is known. `step` is the step that was being computed, or 0
        if it is not known yet. `seen` is the time of the evidence in seconds (CLOCK_MONOTONIC).
        `refused` is True if the ranks have refused the update of the step because of its numbers
        (NaN, Inf or a spike).
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
            self._note_process(fault)
        job.tell("fault", incident=incident.number, kind=kind, rank=rank, step=step)
        if job.fault_reaction is Reaction.FREEZE:
            incident.decision.attempts = 0
            self.freeze()
        if checking:
            self._cut_off()

    def _note_process(self, fault: Fault) -> None:
        """
        Record for the report which process held the rank when a fault of the rank was seen.
        """
        job = self._job
        if fault.rank is None:
            return
        rank_state = job.ranks.states[fault.rank]
        if rank_state.node is not None:
            at_fault = rank_state.process.pid, job.nodes.agents[rank_state.node].host
            job.incident.turnover.at_fault[fault.rank, fault.seen] = at_fault

    def step_of(self, rank_state: RankState) -> int:
        """
        Return the step that a rank is computing. Return 0 if the step is unknown, because the rank
        is training and has not reported its position yet.
        """
        trains = rank_state.training and self._job.state in (S.HEALTHY, S.PAUSING, S.FREEZING)
        return 0 if trains else rank_state.position.step + 1

    def may_be_later(self, rank_state: RankState, step: int) -> bool:
        """
        Return True if any rank of the job may have completed a step later than `step`. Only the
        position of the given rank is looked at. Other ranks are at most one step ahead of this
        rank, so none of them is later than `step` if this rank has not completed `step`. If the
        position of this rank is unknown, return True.
        """
        known = rank_state.repaired and self.step_of(rank_state) != 0
        return not known or rank_state.position.step >= step

    def pollute(self, rank_state: RankState) -> None:
        """
        Record that this rank may have sent wrong gradients to all ranks in its last update. Copies
        of the training state may be wrong from that update on, so they must not be used. If the
        step of that update is not known yet, the method `locate` records it later.

        If the present process of the rank has not entered the training loop, it has sent no
        gradients. Then the update is the last one of an earlier process, if there was one.
        """
        spread = self._job.incident.spread
        if not rank_state.repaired:
            if rank_state.left is not None:
                spread.lower(rank_state.left - 1)
        elif self.step_of(rank_state) == 0:
            spread.by.add(rank_state.rank)
        else:
            spread.lower(rank_state.position.step - 1)

    def locate(self) -> None:
        """
        Fill in the steps that were not known before: the step of each fault, and the step of each
        update with which wrong numbers may have spread. Call this when all ranks that can answer
        have reported their positions. For a rank that cannot answer, estimate the step from the
        furthest position of the other ranks. This estimate is wrong by at most one step.
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
        Handle a fault that has occurred again although a recovery strategy was followed: count the
        strategy as failed. The first repetition of a numeric fault is an exception. The state that
        all ranks returned to may already have contained wrong numbers. So try an earlier state
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
        incident.decision.fail(
            f"the {kind} fault at step {step} occurred again", network=kind == "network"
        )

    def open(self) -> None:
        """
        Open an incident, unless an incident is open already.
        """
        job = self._job
        if job.incident.is_open:
            return
        # an incident that is not open and not closed is the start of the job, with the number 0.
        # A fault during the start turns the start itself into a numbered incident
        if job.incident.closed is None:
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
        Begin the present recovery strategy again in a new round, because the strategy has failed
        for the reason `why`. After `policy.attempts` failures the strategy is not tried again in
        this incident.
        """
        self.open()
        self.count(self._job.incident.decision.attempts + 1, why)
        self.freeze()

    def groups_failed(self, why: str) -> None:
        """
        Begin the present recovery strategy again in a new round, because the ranks could not form
        process groups, for the reason `why`. But if the ranks may still be digesting their copies
        (in the state CLEARING), only record the reason: the new round begins when the ranks have
        finished digesting.
        """
        if self._job.state is S.CLEARING:
            self._job.incident.progress.groups_failed = why
        else:
            self.again(why)

    def count(self, attempts: int, why: str) -> None:
        """
        Record that the present recovery strategy has failed `attempts` times. After
        `policy.attempts` failures the strategy is not tried again in this incident. `why` is the
        reason of the last failure.
        """
        incident = self._job.incident
        incident.decision.attempts = attempts
        incident.decision.repeated.append(f"{incident.decision.base}: {why}")
        if attempts >= self._job.policy.attempts:
            incident.decision.failed[incident.decision.base] = why

    def terminate(self, rank_state: RankState, why: str, blame: FaultKind = "process") -> None:
        """
        Order the agent of the node to end the process of a rank. The agent reports the end of the
        process with an `Exited` message. `why` is the reason for the log. `blame` is the kind of
        the fault for which the process is ended.
        """
        self.terminate_all([rank_state], why, blame)

    def terminate_all(self, rank_states: Iterable[RankState], why: str, blame: FaultKind) -> None:
        """
        Order the agents to end the processes of several ranks, as `terminate` does for one rank.
        First remove all of these ranks from the orders that are still unanswered. Only then record
        a fault: it begins a new round, and that round must not wait for any of these ranks.
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
                seen = job.incident.opened if suspicion else job.timing.now
                self.fault("hang", rank_state.rank, self.step_of(rank_state), seen, evidence)
            job.kill(rank_state, why, last_words=blame == "hang")

    def freeze(self, cause: str = "") -> None:
        """
        Begin a new round: give up the recovery plan and the unanswered orders. Order every rank
        that takes part in training to begin no further update and to report its position. The order
        contains the first of these reasons that is known: the faults of the incident, the stall
        that was noticed, why the job must end, `cause`.
        """
        job, incident = self._job, self._job.incident
        incident.progress.digesting |= not job.answered_all("compare")
        incident.round += 1
        incident.tasks = {}
        incident.decision.plan = None
        incident.progress.reached, incident.progress.groups_failed = 0, ""
        job.succession.gathering = False
        job.move(S.FREEZING)
        causes = [f"{f.kind} at rank {f.rank}" for f in incident.roots()]
        self.ask(", ".join(causes) or incident.suspicion or incident.decision.forced or cause)

    def ask(self, cause: str) -> None:
        """
        Send the freeze order to every rank that takes part in training: begin no further update,
        and report the position in the loop. `cause` is the reason that the ranks are told.
        """
        job = self._job
        to = tuple(
            s.rank for s in job.ranks.member_states() if s.ready and not s.process.terminating
        )
        if to:
            job.issue(Freeze(**job.key(), to=to, cause=cause))

    # ---------------------------------------------------------------- checks of links and devices

    def _cut_off(self) -> None:
        """
        End a check of links and devices that a fault has interrupted. Use the findings of the ranks
        that had finished the check. Do not repeat the check, because a second check could lead to
        the same fault again.
        """
        job = self._job
        job.pausing.request = None
        found = self.findings()
        job.pausing.result = "; ".join([*found, "a fault has interrupted the check"])
        job.tell("checked", what=job.pausing.result)
        self.judge()

    def findings(self) -> list[str]:
        """
        Return the findings of the last check of links and devices, the most serious first. A
        finding that several ranks report is listed once, with the numbers of these ranks.
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
        Act on the verdicts that the ranks have reached in a check of links and devices. If the
        verdict of any rank is `end`, end the job. If it is `isolate`, give up the node of that
        rank. Return True if a rank had one of these verdicts.
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

    # ---------------------------------------------------------------- ending jobs, giving up nodes

    def salvage(self, lost: int) -> bool:
        """
        Begin to save a last checkpoint, because `lost` events of the story (the recorded events of
        the job) could not be read. Return False if the present state of the job does not allow a
        new round. In that case nothing can be saved.

        Ranks ignore orders with an old incident number. Each lost event may have begun an incident.
        So the new order gets a number that is higher than any number that the ranks can have
        received.
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
        Let the job end for the reason `why`: allow only the strategies `dump` (save a last
        checkpoint, then end) and `exit` (end without a checkpoint).
        """
        job = self._job
        self.open()
        job.incident.decision.forced = job.incident.decision.forced or why
        if job.fault_reaction is Reaction.FREEZE:
            self.freeze()

    def isolate(self, rank_state: RankState, why: str) -> None:
        """
        Give up the node of a rank for the reason `why`: end all processes on the node, and never
        start a process there again. But if only this node holds some shard, do not end the
        processes: let the job save a last checkpoint and end.
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
