"""
Watches the time limits of a job, and acts when a limit has passed. There are limits for answers to
orders, for the start and the end of processes, for nodes to join, and for the state of the job.
"""

from typing import assert_never

from tft.core.job.attempts import ALONE
from tft.core.job.orders import ORDERS, Late
from tft.core.job.process_exits import ProcessExits
from tft.core.job.rank_state import RankState
from tft.core.job.recovery import Recovery
from tft.core.job.state import Job
from tft.core.job.transitions import SETTLED, State
from tft.protocol.messages import OrderName

S = State


class Deadlines:
    """
    Watches the time limits of one job, for example for answers to orders, and acts when a limit has
    passed.
    """

    def __init__(self, job: Job, recovery: Recovery, ends: ProcessExits) -> None:
        self._job = job
        self._recovery = recovery
        self._attempts = recovery.attempts
        self._ends = ends

    def next(self) -> float | None:
        """
        Return the time at which the next time limit ends. At this time the job machine must get the
        event `DeadlinePassed`. Return None if no time limit is running.
        """
        job = self._job
        moments = [t.deadline for t in job.incident.tasks.values() if t.waiting]
        if job.state not in SETTLED and job.processes.joined:
            oldest = next(iter(job.processes.starting.values()), None)
            moments += [] if oldest is None else [self._started_by(oldest)]
        if job.awaits_ends():
            moments += [
                self._unkillable_at(rank_state) for rank_state in job.processes.terminating()
            ]
        moments += self._ends.recalls.deadlines()
        gathered = self._gathered_by()
        moments += [] if gathered is None else [gathered]
        if job.timing.deadline is not None and (job.state is not S.CHOOSING or not job.unsettled()):
            moments.append(job.timing.deadline)
        return min(moments, default=None)

    def expire(self) -> None:
        """
        Act on every time limit that has passed: for answers to orders, for starts and ends of
        processes, for nodes that must join, and for the present state of the job.
        """
        job = self._job
        for name, task in list(job.incident.tasks.items()):
            if task.waiting and task.deadline <= job.timing.now:
                self._overdue(name, sorted(task.waiting))
                return
        if job.state not in SETTLED and job.processes.joined:
            self._end_late_starters()
        if job.awaits_ends():
            for rank_state in job.processes.terminating():
                if self._unkillable_at(rank_state) <= job.timing.now:
                    self._ends.could_not_end(rank_state)
        self._ends.recalls.expire()
        self._end_ungathered()
        if not job.timing.expired:
            return
        if job.state is S.EXITING:
            self._recovery.shutdown.time_is_up()
        elif job.state is S.PAUSED:
            job.tell("pause_over", seconds=job.policy.pause)
            self._recovery.pausing.release()
        elif job.state in (S.HEALTHY, S.RESUMING):
            attempts = self._attempts
            attempts.open()
            late = sorted(job.ranks.members - job.training.finished)
            attempts.freeze(
                f"ranks {late} have not finished training {job.timing.allowed:.0f} s after the "
                "first rank"
            )

    def _started_by(self, rank_state: RankState) -> float:
        return max(rank_state.process.spawned, self._job.timing.led) + self._job.policy.join

    def _gathered_by(self) -> float | None:
        """
        Return the time by which the next node must join. Return None if there is no such limit:
        before the first node has joined, when every rank has a node, and while the job is not
        waiting for processes.
        """
        job = self._job
        if job.state is not S.AWAITING or job.nodes.gathered is None or not job.ranks.placeless():
            return None
        return max(job.nodes.gathered, job.timing.led) + job.policy.gather

    def _end_ungathered(self) -> None:
        job, until = self._job, self._gathered_by()
        if until is not None and until <= job.timing.now:
            why = (
                f"ranks {job.ranks.placeless()} have no node: no other node has joined the job "
                f"within {job.policy.gather:.0f} s after the last one"
            )
            self._recovery.shutdown.exit("failed", 4, why)

    def _unkillable_at(self, rank_state: RankState) -> float:
        return (
            max(rank_state.process.terminating_since, self._job.timing.led) + self._job.policy.kill
        )

    def _end_late_starters(self) -> None:
        job = self._job
        for rank_state in [
            s for s in job.processes.starting.values() if self._started_by(s) <= job.timing.now
        ]:
            job.processes.starts(rank_state, job.timing.now)
            why = f"the process has not called session.run {job.policy.join:.0f} s after its start"
            self._attempts.terminate(rank_state, why, "process")

    def _overdue(self, order: OrderName, ranks: list[int]) -> None:
        """
        Act when `ranks` have not answered the order with the name `order` within its time limit.
        The table `ORDERS` says what to do.
        """
        job, rule = self._job, ORDERS[order]
        if order == "stop":
            ranks = self._not_called_after(ranks)
        if not ranks:
            return
        most = self._are_most(order, ranks)
        reaction = rule.most_late if most and rule.most_late is not None else rule.late
        if reaction is Late.RENEW and self._renewed(order):
            return
        if order == "stop" and not most and self._spared(ranks):
            return
        job.tell("order_overdue", order=order, ranks=ranks)
        if order == "compare" and (
            job.incident.progress.groups_failed or job.forms_groups_in_vain()
        ):
            # the late ranks may be waiting for process groups that can never be formed, so do not
            # end their processes yet. The new round shows which of them hang
            reaction = Late.AGAIN
        self._react(reaction, order, ranks)

    def _react(self, reaction: Late, order: OrderName, ranks: list[int]) -> None:
        job, attempts, why = self._job, self._attempts, f"no answer to the order {order} in time"
        match reaction:
            case Late.NO_PAUSE:
                self._recovery.pausing.give_up(f"ranks {ranks}: {why}")
            case Late.AGAIN:
                attempts.again(f"ranks {ranks}: {why}")
            case Late.NETWORK:
                self._unheard(ranks, why)
            case Late.HANG:
                why = f"{why}. {ALONE}" if order == "stop" else why
                attempts.terminate_all((job.ranks.states[rank] for rank in ranks), why, "hang")
            case Late.LEFT:
                attempts.terminate_all((job.ranks.states[rank] for rank in ranks), why, "process")
            case Late.DROP:
                job.incident.tasks.pop(order)
            # the time limit was restarted as often as allowed: react as the rule's field `late`
            # says
            case Late.RENEW:
                self._react(ORDERS[order].late, order, ranks)
            case _:
                assert_never(reaction)

    def _unheard(self, ranks: list[int], why: str) -> None:
        """
        Add a `network` fault that names no rank, because `ranks` have not answered in time. Call
        this for a missing answer to `release` (train on after a pause), which does not prove that
        the rank is at fault. Also call it if most ranks have not answered `check`, because then no
        single rank is to blame. The freeze that follows shows which ranks cannot be reached.
        """
        # `ranks` all wait between the same two steps, so the step of the first rank holds for all
        step = self._job.ranks.states[ranks[0]].position.step + 1
        self._attempts.fault("network", None, step, self._job.timing.now, f"ranks {ranks}: {why}")

    def _are_most(self, order: OrderName, ranks: list[int]) -> bool:
        """
        Return True if `ranks` has at least two ranks and more than half of the ranks that got
        `order`.
        """
        asked = sum(len(each.to) for each in self._job.incident.tasks[order].orders)
        return len(ranks) > 1 and 2 * len(ranks) > asked

    def _renewed(self, order: OrderName) -> bool:
        """
        Restart the time limit of an order that most ranks have not answered. The cause may be that
        the bus or this controller could not be reached for a while. Return True if the limit was
        restarted. Return False if it was already restarted `policy.patient` times.
        """
        task = self._job.incident.tasks[order]
        if task.renewed >= self._job.policy.patient:
            return False
        task.renewed += 1
        task.deadline = self._job.timing.now + task.limit
        return True

    def _not_called_after(self, ranks: list[int]) -> list[int]:
        """
        Return those of `ranks` that have no excuse for a late answer to `stop` (leave the training
        loop). A rank may be running a function after a step, such as an evaluation. Such a rank
        gets the time that it has announced for these functions, and is not returned before this
        time is over.
        """
        job, task = self._job, self._job.incident.tasks["stop"]
        until = {
            rank: task.issued + job.ranks.states[rank].declared.after
            for rank in ranks
            if job.ranks.states[rank].position.after
            and task.issued + job.ranks.states[rank].declared.after > job.timing.now
        }
        if until:
            task.deadline = max(until.values())
            job.tell(
                "stop_waits", ranks=list(until), why="a function after a step is still running"
            )
        return [rank for rank in ranks if rank not in until]

    def _spared(self, ranks: list[int]) -> bool:
        """
        Give `ranks`, which have not left their training loops in time, `policy.repair` more
        seconds, once. Do so only if ending these ranks would lose the last copy of a shard and
        there is no checkpoint to return to. Waiting can help, because such a rank may be in a
        function of the script that ends after a timeout of its own. Return True if the ranks got
        more time.
        """
        job, task = self._job, self._job.incident.tasks["stop"]
        lost = not job.training.untrained and not job.checkpoints.known and job.ranks.only_on(ranks)
        if task.spared or not lost:
            return False
        task.spared, task.deadline = True, job.timing.now + job.policy.repair
        job.tell("stop_waits", ranks=ranks, shards=lost)
        return True
