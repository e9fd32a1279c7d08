"""
Nodes, stores and processes that come: who may speak for a rank, and from when on it is counted on.
"""

from tft.core.course import Course
from tft.core.ends import Ends
from tft.core.job import Job
from tft.core.seats import NOWHERE, Process, Seat
from tft.core.table import SETTLED, State
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
    Who comes to one job.
    """

    def __init__(self, job: Job, course: Course, ends: Ends) -> None:
        self._job = job
        self._course = course
        self._rounds = course.rounds
        self._ends = ends

    def node_joined(self, message: NodeJoined) -> None:
        """
        An agent is up, for the first time, again, or another one than before: its ranks can start.
        """
        job = self._job
        known = message.node in job.nodes and message.node not in job.lost_nodes
        agent = (message.host, message.pid)
        if message.node in job.isolated or (known and agent == job.agents[message.node]):
            return
        # what ran there has gone with the agent before this one
        left = self._ends.emptied(message.node, silent=False) if known else []
        if job.agents.get(message.node, agent) != agent:  # and its pages, too
            for seat in job.seats.values():
                seat.page = NOWHERE if seat.page == message.node else seat.page
        if job.state in SETTLED:
            return  # nothing is started any more
        job.agents[message.node], job.came[message.node] = agent, message.at
        job.gathered = job.now
        for rank in message.ranks:
            job.node_orders[rank] = [
                order for order in job.node_orders.get(rank, []) if order.node != message.node
            ]  # of processes that are gone with the agent that had them
        job.nodes[message.node] = message.ranks
        job.lost_nodes.discard(message.node)
        settled = sum(
            seat.node == message.node for seat in (*job.seats.values(), *job.successors.values())
        )
        job.room[message.node] = len(message.ranks) + message.spare - settled
        why = f"another agent has come up on node {message.node}"
        self._ends.bereaved(left, why, message.at)
        for rank in message.ranks:
            placed = job.seats.get(rank)
            if placed is not None and placed.process is Process.ABSENT:
                job.spawn(placed, message.node, "the job starts")
        self._course.recall()

    def store_opened(self, message: StoreOpened) -> None:
        """
        A rendezvous store listens, maybe in place of another.
        """
        job = self._job
        before = job.stores.pop(message.node, None)
        job.stores[message.node] = (message.host, message.port)
        if job.state is S.AWAITING:
            job.deadline = None  # what was waited for may be this
        if before == job.incident.store and not job.answered_all("regroup"):
            job.tell("store_replaced", port=message.port)
            self._rounds.again("the rendezvous store was lost while groups were formed")

    def spawned(self, message: Spawned) -> None:
        """
        An agent has started the process it was told to.
        """
        seat = self._job.find(message.rank, message.incarnation)
        if seat is not None and seat.process is Process.ORDERED:
            seat.process = Process.SPAWNED
            seat.pid = message.pid
            self._job.starts(seat)
            seat.began = message.at
            self._job.running.add((seat.rank, seat.incarnation))
            self._job.forget(message.rank, message.incarnation, Spawn)

    def joined(self, message: Joined, sender: str) -> None:
        """
        A process claims a rank: it gets it, if it is the one that was asked for.
        """
        job = self._job
        if message.rank not in job.seats or message.world != len(job.seats):
            return self._refuse(
                message,
                sender,
                f"rank {message.rank} of {message.world} has no place in a job of "
                f"{len(job.seats)} ranks",
            )
        seat = job.find(message.rank, message.incarnation)
        holder = job.seats[message.rank]
        there = (Process.JOINED, Process.READY)
        taken = seat if seat is not None and seat.process in there else None
        if taken is not None and (taken.pid, taken.started) == (message.pid, message.started):
            return None
        if seat is None or taken is not None or seat.process is Process.GONE:
            return self._refuse(
                message,
                sender,
                f"rank {message.rank} is held by process {holder.pid} (incarnation "
                f"{holder.incarnation}); process {message.pid} (incarnation "
                f"{message.incarnation}) came without being asked for",
            )
        job.forget(message.rank, message.incarnation, Spawn)
        job.joined = True
        job.running.add((seat.rank, seat.incarnation))
        seat.join(message, sender)
        if job.incident.number:
            job.phase("await", seat.rank, seat.began, message.at)
        return None

    def _refuse(self, message: Joined, sender: str, why: str) -> None:
        job = self._job
        refused = Refused(
            epoch=job.epoch, rank=message.rank, pid=message.pid, started=message.started, why=why
        )
        job.refused[sender] = (refused, job.now)
        job.say(refused)
        self._job.tell("claim_refused", rank=message.rank, pid=message.pid, why=why)

    def ready(self, seat: Seat, message: Ready) -> None:
        """
        A rank has adopted its state, and takes orders.
        """
        job = self._job
        seat.process = Process.READY
        job.starting.pop((seat.rank, seat.incarnation), None)
        seat.shards = {copies.shard: copies.ranks for copies in message.shards}
        seat.column, seat.reloads = message.column, message.reloads
        seat.strategies = frozenset(message.strategies) or seat.strategies
        seat.after = message.after
        seat.held = 0 if job.untrained and not job.resumed else None
        job.placed()
