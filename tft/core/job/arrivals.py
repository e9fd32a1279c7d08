"""
Handles nodes, rendezvous stores and processes that join the job. Decides whether a process may hold
the rank that it claims, and from when on the process gets orders.
"""

from tft.core.job.nodes import AgentProcess
from tft.core.job.process_exits import ProcessExits
from tft.core.job.rank_process import ProcessStage
from tft.core.job.rank_state import NOWHERE, RankState
from tft.core.job.recovery import Recovery
from tft.core.job.state import Job
from tft.core.job.transitions import SETTLED, State
from tft.protocol.messages import (
    Joined,
    NodeJoined,
    Ready,
    Refused,
    Spawn,
    Spawned,
    StoreOpened,
)

S = State


class Arrivals:
    """
    Handles the reports about nodes, rendezvous stores and processes that join one job.
    """

    def __init__(self, job: Job, recovery: Recovery, ends: ProcessExits) -> None:
        self._job = job
        self._recovery = recovery
        self._attempts = recovery.attempts
        self._process_exits = ends

    def node_joined(self, message: NodeJoined, sender: str) -> None:
        """
        Handle the report that the agent of a node has joined the job, and start the processes of
        the ranks of this node. The agent may be the first one of the node. It may also be an agent
        that returns although its node counted as lost, or a new agent that replaces an earlier one.
        """
        job = self._job
        known = message.node in job.nodes.ranks and message.node not in job.nodes.lost
        agent = AgentProcess(host=message.host, pid=message.pid, sender=sender)
        if message.node in job.nodes.isolated or (
            known and agent == job.nodes.agents[message.node]
        ):
            return
        # if the node had joined before, this agent is a new one. The processes that the previous
        # agent had started have ended with it, so record their end
        left = self._process_exits.emptied(message.node, silent=False) if known else []
        # a page is memory that an agent and a rank share. A new agent has new pages, so the
        # rank-local state on the pages of the previous agent is lost
        if job.nodes.agents.get(message.node, agent) != agent:
            for rank_state in job.ranks.states.values():
                rank_state.local_state.page = (
                    NOWHERE
                    if rank_state.local_state.page == message.node
                    else rank_state.local_state.page
                )
        if job.state in SETTLED:
            return  # the job is ending, so no process is started on this node
        job.nodes.agents[message.node], job.nodes.came[message.node] = agent, message.at
        job.nodes.gathered = job.timing.now
        for rank in message.ranks:
            job.nodes.orders[rank] = [
                order for order in job.nodes.orders.get(rank, []) if order.node != message.node
            ]  # the removed orders were for processes of the previous agent, which have ended
        job.nodes.ranks[message.node] = message.ranks
        job.nodes.lost.discard(message.node)
        job.nodes.silent.discard(message.node)
        settled = sum(
            rank_state.node == message.node
            for rank_state in (*job.ranks.states.values(), *job.succession.successors.values())
        )
        job.nodes.room[message.node] = len(message.ranks) + message.spare - settled
        why = f"another agent has come up on node {message.node}"
        self._process_exits.bereaved(left, why, message.at, message.step)
        for rank in message.ranks:
            placed = job.ranks.states.get(rank)
            if placed is not None and placed.process.stage is ProcessStage.ABSENT:
                job.spawn(placed, message.node, "the job starts")
        self._recovery.takeover.recall()

    def store_opened(self, message: StoreOpened) -> None:
        """
        Record that a rendezvous store listens on a node. If the store replaces an earlier store
        with which the ranks are forming process groups now, begin a new round of the incident.
        """
        job = self._job
        before = job.nodes.stores.pop(message.node, None)
        job.nodes.stores[message.node] = (message.host, message.port)
        if job.state is S.AWAITING:
            # the job may be waiting before its next attempt to form process groups. End the wait,
            # because the earlier attempts may have failed for lack of the rendezvous store that
            # this node has opened now
            job.timing.deadline = None
        if before == job.incident.store and not job.answered_all("regroup"):
            job.tell("store_replaced", port=message.port)
            self._attempts.groups_failed(
                "the rendezvous store was lost while process groups were formed"
            )

    def spawned(self, message: Spawned) -> None:
        """
        Record that an agent has started a process, as the controller had ordered.
        """
        rank_state = self._job.find(message.rank, message.incarnation)
        if rank_state is not None and rank_state.process.stage is ProcessStage.ORDERED:
            rank_state.process.stage = ProcessStage.SPAWNED
            rank_state.process.pid = message.pid
            self._job.processes.starts(rank_state, self._job.timing.now)
            rank_state.process.began = message.at
            self._job.processes.running.add((rank_state.rank, rank_state.incarnation))
            self._job.nodes.forget(message.rank, message.incarnation, Spawn)

    def joined(self, message: Joined, sender: str) -> None:
        """
        Handle the claim of a process to hold a rank. Accept the claim if the controller has ordered
        a process with this rank and incarnation, and no other process has claimed them. Refuse
        every other claim. Ignore the repetition of a claim that was accepted before.
        """
        job = self._job
        if message.rank not in job.ranks.states or message.world != len(job.ranks.states):
            return self._refuse(
                message,
                sender,
                f"rank {message.rank} of {message.world} has no place in a job of "
                f"{len(job.ranks.states)} ranks",
            )
        rank_state = job.find(message.rank, message.incarnation)
        holder = job.ranks.states[message.rank]
        there = (ProcessStage.JOINED, ProcessStage.READY)
        taken = rank_state if rank_state is not None and rank_state.process.stage in there else None
        if taken is not None and (taken.process.pid, taken.process.started) == (
            message.pid,
            message.started,
        ):
            return None
        if rank_state is None or taken is not None or rank_state.process.stage is ProcessStage.GONE:
            return self._refuse(
                message,
                sender,
                f"rank {message.rank} is held by process {holder.process.pid} (incarnation "
                f"{holder.incarnation}); process {message.pid} (incarnation "
                f"{message.incarnation}) was not ordered by the controller",
            )
        job.nodes.forget(message.rank, message.incarnation, Spawn)
        job.processes.joined = True
        job.processes.running.add((rank_state.rank, rank_state.incarnation))
        rank_state.join(message, sender)
        if job.incident.number:
            job.phase("await", rank_state.rank, rank_state.process.began, message.at)
        return self._recovery.shutdown.dismiss(rank_state.rank)

    def _refuse(self, message: Joined, sender: str, why: str) -> None:
        job = self._job
        refused = Refused(
            epoch=job.timing.epoch,
            rank=message.rank,
            pid=message.pid,
            started=message.started,
            why=why,
        )
        job.processes.refused[sender] = (refused, job.timing.now)
        job.say(refused)
        self._job.tell("claim_refused", rank=message.rank, pid=message.pid, why=why)

    def ready(self, rank_state: RankState, message: Ready) -> None:
        """
        Record that the process of a rank has called `Session.run`, so that the process can carry
        out orders. Also record what the process declares, for example which shards it holds.
        """
        job = self._job
        rank_state.process.stage = ProcessStage.READY
        job.processes.starting.pop((rank_state.rank, rank_state.incarnation), None)
        rank_state.declared.shards = {copies.shard: copies.ranks for copies in message.shards}
        rank_state.declared.column, rank_state.declared.reloads = message.column, message.reloads
        rank_state.declared.strategies = (
            frozenset(message.strategies) or rank_state.declared.strategies
        )
        rank_state.declared.after = message.after
        rank_state.holdings.held = (
            0 if job.training.untrained and not job.checkpoints.resumed else None
        )
        job.ranks.placed()
