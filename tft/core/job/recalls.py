"""
Recalls the rank-local state (generators, data position) of the ranks of a lost node. Another node
has kept a copy of this state, and is ordered to report it.

The node that keeps the copy is called the keeper (`Nodes.keeper`): the next node in the ring of all
nodes. The choice of a recovery strategy waits for the answer of the keeper, because the answer
decides from which step training can continue.
"""

from collections.abc import Sequence

from tft.core.job.nodes import Recalling
from tft.core.job.state import Job
from tft.protocol.messages import Recall, Recalled


class Recalls:
    """
    Orders the recalls of one job. A recall is an order to a node to report the rank-local state
    that this node has kept for a lost node. Also handles the answers.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def lose(self, node: int, incarnations: dict[int, int]) -> None:
        """
        Order the keeper of a lost node to report the rank-local state that it has kept for the
        ranks of that node. The keeper is the node next to the lost one. `incarnations` has the
        incarnation of each rank before the loss. If the lost node was itself a keeper that had to
        report such state, do not wait for its answer any more.
        """
        job = self._job
        for lost, recalling in list(job.nodes.recalls.items()):
            if recalling.order.node == node:
                self._give_up(lost, f"node {node}, which kept a copy, was lost too")
        ranks = tuple(s.rank for s in job.ranks.states.values() if s.local_state.page == node)
        keeper = job.nodes.keeper(node)
        if not ranks or keeper is None:
            return
        order = Recall(epoch=job.timing.epoch, node=keeper, lost=node, ranks=ranks)
        job.nodes.recalls[node] = Recalling(
            order=order,
            waiting=set(ranks),
            incarnations={rank: incarnations.get(rank, -1) for rank in ranks},
            issued=job.timing.now,
        )
        job.say(order)

    def take(self, message: Recalled) -> None:
        """
        Handle the report of a keeper (the node that has kept state for a lost node): store the
        rank-local state of one rank of the lost node. Ignore the state of a step that a later
        rollback has undone. Also ignore the state of a process that did not hold the rank when the
        node was lost.
        """
        job = self._job
        nodes = job.nodes
        recalling = nodes.recalls.get(message.lost) or nodes.overdue.get(message.lost)
        if (
            recalling is None
            or message.node != recalling.order.node
            or message.rank not in recalling.waiting
        ):
            return
        recalling.waiting.discard(message.rank)
        if message.incarnation == recalling.incarnations[message.rank]:
            attempt = (message.incident, message.round)
            local_state = job.ranks.states[message.rank].local_state
            valid = [
                step
                for step in message.local_state
                if job.training.rollbacks.kept(attempt, step) and local_state.counts(step)
            ]
            local_state.reported = {
                **local_state.reported,
                **{step: message.local_state[step] for step in valid},
            }
            local_state.early = frozenset(message.early).intersection(valid)
        if not recalling.waiting:
            nodes.recalls.pop(message.lost, None)
            nodes.overdue.pop(message.lost, None)

    def deadlines(self) -> list[float]:
        """
        Return the times until which the job waits for answers to recalls (orders to report the
        rank-local state of a lost node). There is one time for each unanswered recall.
        """
        return [self._until(recalling) for recalling in self._job.nodes.recalls.values()]

    def expire(self) -> None:
        """
        Stop waiting for each recall (order to report the rank-local state of a lost node) that was
        not answered in time. A late answer is still used until the ranks roll back.
        """
        job = self._job
        for lost, recalling in list(job.nodes.recalls.items()):
            if self._until(recalling) <= job.timing.now:
                self._give_up(
                    lost,
                    f"node {recalling.order.node}, which kept a copy, has not reported it in time",
                )

    def _until(self, recalling: Recalling) -> float:
        return max(recalling.issued, self._job.timing.led) + self._job.policy.freeze

    def _give_up(self, lost: int, why: str) -> None:
        job = self._job
        job.nodes.overdue[lost] = recalling = job.nodes.recalls.pop(lost)
        ranks: Sequence[int] = sorted(recalling.waiting)
        job.tell("local_state_not_recalled", node=lost, ranks=list(ranks), why=why)
        if job.incident.is_open:
            job.incident.turnover.unprotected.append(
                f"the RNG and data position of ranks {list(ranks)} were lost with node {lost}: {why}"
            )
