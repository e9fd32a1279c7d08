"""
Replaces processes that still train. For each of them a second process of the same rank is started,
the successor, which later takes the rank over. This is done for stragglers (slow ranks) and for
ranks that an operator or a program wants to move. Also lets nodes leave the job, and brings back
ranks that have left it.
"""

from collections.abc import Callable

from tft.core.job.attempts import Attempts
from tft.core.job.rank_process import ProcessStage
from tft.core.job.rank_state import RankState
from tft.core.job.state import Job
from tft.core.job.transitions import Reaction, State
from tft.protocol.messages import Noticed, SwitchRequested

S = State


class Takeover:
    """
    Replaces processes of one job that still train. A successor (a second process of the same rank)
    takes over the rank of such a process.
    """

    def __init__(self, job: Job, attempts: Attempts, replan: Callable[[], None]) -> None:
        self._job = job
        self._attempts = attempts
        self._replan = replan

    def straggles(self, message: Noticed) -> None:
        """
        Start a successor on another node for a rank that slows the other ranks down. A successor is
        a second process, which later takes the rank over. If no successor can be started, log the
        reason.
        """
        job = self._job
        rank_state = job.ranks.states[message.rank]
        why_not = self._why_no_successor(rank_state)
        node = None if why_not else job.elsewhere(rank_state, job.nodes.room)
        if node is None:
            why_not = why_not or "no other node has room"
        job.tell("rank_straggles", rank=rank_state.rank, why=message.evidence, why_not=why_not)
        if node is not None:
            cause = f"rank {rank_state.rank} holds the others up: {message.evidence}"
            self._bring_up(rank_state, node, message.evidence, cause)

    def _bring_up(self, rank_state: RankState, node: int, why: str, cause: str) -> None:
        """
        Start a successor (a second process) on `node` for a rank, while the present process of the
        rank continues to train. `why` says why the present process is to be replaced. `cause` is
        the reason that the agent of `node` gets with the order to start the successor.
        """
        successor = RankState(rank=rank_state.rank)
        rank_state.process.straggles = why
        self._job.succession.successors[rank_state.rank] = successor
        self._job.spawn(successor, node, cause)

    def _why_no_successor(self, rank_state: RankState) -> str:
        """
        Return a sentence that says why no successor (second process) can be started for this rank
        now, or "" if one can be started. Whether another node has room is not checked here.
        """
        job = self._job
        if job.fault_reaction is not Reaction.FREEZE:
            return "all ranks are stopped already"
        known = (
            "a second process of the rank was started already"
            if rank_state.rank in job.succession.successors
            else ""
        )
        return self._why_no_migration() or known

    def _why_no_migration(self) -> str:
        """
        Return a sentence that says why no process of this job can take over a rank from another
        process (the strategy `migrate`). Return "" if a process can do this. If none can, it is
        useless to start successors.
        """
        job = self._job
        unable = [
            s.rank for s in job.ranks.member_states() if "migrate" not in s.declared.strategies
        ]
        if "migrate" not in job.policy.enable:
            return "migrate is not enabled"
        why = f"the adaptor of ranks {unable} does not support the strategy migrate"
        return why if unable else ""

    def switch(self, message: SwitchRequested) -> None:
        """
        Handle the request to move ranks to other processes. The request replaces an earlier
        request of this kind: a rank that only the earlier request has named keeps its process. If
        the requested move is not possible, log the reason and keep the earlier request.
        """
        job, wanted = self._job, frozenset(message.ranks)
        why_not = self._why_no_switch(wanted)
        if why_not:
            job.tell("switch_called_off", ranks=sorted(wanted), why=why_not)
            return
        before = job.succession.switch
        self.call_off(message.why, before - wanted)
        job.succession.switch, job.succession.why = wanted, message.why
        if wanted - before:
            job.tell("switch_asked", ranks=sorted(wanted), why=message.why)

    def _why_no_switch(self, ranks: frozenset[int]) -> str:
        job = self._job
        outside = sorted(ranks - job.ranks.members)
        if outside:
            return f"ranks {outside} do not take part in training"
        absent = any(
            s.process.stage not in (ProcessStage.JOINED, ProcessStage.READY)
            for s in job.ranks.member_states()
        )
        # a process tells only when it joins whether it supports the strategy `migrate`. So while
        # some member has no joined process, do not refuse the request for lack of this support
        return self._why_no_migration() if ranks and not absent else ""

    def is_left(self, node: int) -> bool:
        """
        Return True if the job does not need this node any more. Either every rank that trains on
        the node is to be moved to another process, or no rank trains on the node. Return False for
        a node that has never joined.
        """
        job = self._job
        there = {
            rank_state.rank for rank_state in job.ranks.member_states() if rank_state.node == node
        }
        return node in job.nodes.ranks and there <= job.succession.switch

    def leave(self, node: int, why: str) -> None:
        """
        Give up a node for the reason `why`: order its agent to end the processes on this node that
        train, and the successors. The agent still runs, so it can report the rank-local state of
        these processes.
        """
        job = self._job
        there = [rank_state for rank_state in job.ranks.member_states() if rank_state.node == node]
        job.nodes.lost.add(node)
        job.tell("node_left", node=node, ranks=[rank_state.rank for rank_state in there], why=why)
        for rank_state in there:
            self._attempts.fault(
                "node", rank_state.rank, self._attempts.step_of(rank_state), job.timing.now, why
            )
        successors = [
            successor for successor in job.succession.successors.values() if successor.node == node
        ]
        self._attempts.terminate_all([*there, *successors], why, "node")

    def call_off(self, why: str, ranks: frozenset[int]) -> None:
        """
        Cancel the request to move these ranks to other processes, for the reason `why`. The ranks
        keep their present processes. The successors that were started for them are ended.
        """
        job = self._job
        if not ranks:
            return
        job.succession.switch -= ranks
        job.tell("switch_called_off", ranks=sorted(ranks), why=why)
        successors = [
            successor for rank, successor in job.succession.successors.items() if rank in ranks
        ]
        for successor in successors:
            self._attempts.terminate(successor, why)
        if job.state is S.CHOOSING and any(successor.process.invited for successor in successors):
            # choose the recovery strategy again, because these successors cannot take over any more
            self._replan()

    def seek(self) -> None:
        """
        Start a successor for each rank that is to be moved to another process and has no successor
        yet, if a node has room. Do not use nodes on which ranks that are to be moved run now.
        """
        job = self._job
        going = {job.ranks.states[rank].node for rank in job.succession.switch}
        for rank in sorted(job.succession.switch - job.succession.successors.keys()):
            rank_state = job.ranks.states[rank]
            room = {node: left for node, left in job.nodes.room.items() if node not in going}
            node = job.elsewhere(rank_state, room)
            if node is not None:
                self._bring_up(
                    rank_state,
                    node,
                    job.succession.why,
                    f"rank {rank} is to be switched: {job.succession.why}",
                )

    def recall(self) -> None:
        """
        Start another process for each rank that has left the job (strategy `scale_in`) and has no
        process. Do so only if a node has room and the rank has not caused too many incidents
        lately. When the process is ready, the rank can come back to the job.
        """
        job = self._job
        if job.ranks.whole or "scale_out" not in job.policy.enable:
            return
        for rank_state in job.ranks.states.values():
            outside = (
                rank_state.rank not in job.ranks.members
                and rank_state.process.stage is ProcessStage.GONE
            )
            node = job.home(rank_state)
            if outside and node is not None and not job.flapping(rank_state.rank):
                job.spawn(rank_state, node, f"rank {rank_state.rank} is to come back")

    def dismiss(self) -> None:
        """
        End the successors that have failed to take their ranks over. The job has stopped once for
        each of these processes, and does not stop for it a second time.
        """
        for successor in self._job.succession.successors.values():
            if successor.process.invited:
                self._attempts.terminate(successor, "the successor could not take over its rank")
