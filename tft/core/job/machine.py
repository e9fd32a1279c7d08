"""
The state machine of a job: it takes events and returns commands.

    handle(event) -> commands     the only entry; late, repeated or foreign reports are absorbed
    outstanding() -> orders       orders that are not answered yet, to be sent again
    next_deadline()               the time at which the machine wants a `DeadlinePassed` event
    check()                       raises when an invariant is broken, which is a bug of tft

`transitions.py` says what every event leads to in every state. `dispatch.py` takes in reports,
`recovery.py` leads through an incident, and `state.py` holds what is known. `docs/reference/machine.md` tells
the same as a story.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from tft.core.job.attempts import ALONE
from tft.core.job.commands import Command, JobOver
from tft.core.job.dispatch import Dispatch
from tft.core.job.events import DeadlinePassed, Event, Led, Received, Stalled
from tft.core.job.incident import Incident
from tft.core.job.invariants import broken
from tft.core.job.policy import Policy
from tft.core.job.rank_state import RankState
from tft.core.job.recovery import Recovery
from tft.core.job.state import Job
from tft.core.job.transitions import REACTIONS, SETTLED, Reaction, State, kind_of
from tft.errors import InternalError
from tft.protocol.messages import Order, OrderName

S = State

AT_ONCE: frozenset[OrderName] = frozenset({"freeze", "stop"})
"""Orders that each rank answers alone and soon. If most ranks are late, the bus may be away: that
can last longer than the limit."""
REFUSED = 60.0
"""Seconds for which a refusal is repeated, since a refusal is not answered. A process that has not
heard it by then is gone, or will wait for an answer for ever."""


class Machine:
    """
    The state machine of one job of `world` ranks, from its start to its end.
    """

    def __init__(
        self,
        world: int,
        policy: Policy,
        *,
        job: str,
        checkpoints: str,
        checkpoint_name: str = "step-{step:08d}",
        at: float,
        resume: tuple[str, int] | None,
        older: Sequence[tuple[str, int]] = (),
        first_incident: int,
    ) -> None:
        """
        Create the machine. `checkpoints` is the directory for last checkpoints, `checkpoint_name`
        the pattern of their names. `resume` names the directory of a checkpoint to start from, and
        the step whose end it holds. `older` names checkpoints of earlier steps, to go back to. `at`
        is the present time in seconds (the clock of the controller). `first_incident` is the number
        of the next incident.
        """
        self._job = Job(
            world, policy, name=job, checkpoints=checkpoints, checkpoint_name=checkpoint_name, at=at,
            resume=resume, older=older,
            first_incident=first_incident,
        )  # fmt: skip
        self._recovery = Recovery(self._job)
        self._dispatch = Dispatch(self._job, self._recovery)

    @property
    def state(self) -> State:
        """
        The state of the job as a whole.
        """
        return self._job.state

    @property
    def missed(self) -> Mapping[tuple[int, str], Sequence[int]]:
        """
        The steps without a periodic checkpoint, by rank and reason.
        """
        return self._job.missed

    @property
    def epoch(self) -> int:
        """
        The epoch of the leader.
        """
        return self._job.epoch

    @property
    def members(self) -> frozenset[int]:
        """
        The ranks that take part. They are fewer than the world once the job has shrunk.
        """
        return self._job.members

    @property
    def switch(self) -> frozenset[int]:
        """
        The ranks that are to be switched to other processes on request.
        """
        return self._job.switch

    @property
    def nodes(self) -> Sequence[int]:
        """
        The nodes that have joined and are not lost.
        """
        return [node for node in self._job.nodes if node not in self._job.lost_nodes]

    def incarnation(self, rank: int) -> int:
        """
        Return the incarnation of the process that holds this rank, or -1 before the first process
        was asked for.
        """
        return self._job.rank_states[rank].incarnation

    @property
    def refused(self) -> Collection[str]:
        """
        The senders whose claim to a rank was refused. Their reports must not be acknowledged.
        """
        return self._job.refused.keys()

    @property
    def incident(self) -> Incident:
        """
        The open incident, or else the last one.
        """
        return self._job.incident

    @property
    def incidents(self) -> Sequence[Incident]:
        """
        The closed incidents.
        """
        return self._job.incidents

    @property
    def outcome(self) -> JobOver | None:
        """
        How the job ends, or None while that is not decided.
        """
        return self._job.outcome

    @property
    def last_step(self) -> int:
        """
        The highest completed step.
        """
        return self._job.last_step

    @property
    def checked(self) -> str:
        """
        The result of the last requested check: `passed`, a sentence, or "" while there is none.
        """
        return self._job.checked

    # ---------------------------------------------------------------- events

    def handle(self, event: Event) -> list[Command]:
        """
        Take one event. Return the commands that follow, each order for the first time.
        """
        job = self._job
        job.said = []
        job.now = event.at
        reaction = REACTIONS[kind_of(event)][job.state]
        if reaction is not Reaction.ABSORB:
            self._take(event, reaction)
            while self._recovery.advance():
                pass
        return job.said

    def _take(self, event: Event, reaction: Reaction) -> None:
        match event:
            case Received(message=message, sender=sender):
                self._dispatch.take(message, reaction, sender)
            case DeadlinePassed():
                self._expire()
            case Stalled():
                self._stalled(event)
            case Led():
                self._led(event)
            case _:
                assert_never(event)

    def _led(self, event: Led) -> None:
        """
        Begin every time limit again under a new leader: without a leader no answer could arrive.
        """
        job = self._job
        if job.deadline is not None:
            job.deadline = event.at + job.allowed
        job.epoch, job.led = event.epoch, event.at
        for task in job.incident.tasks.values():
            task.deadline = event.at + task.limit
        if job.state is S.CHOOSING:
            self._recovery.choice.ask()  # the question may have been lost with the last leader
        if job.state is S.ENDED and job.outcome is not None:
            ending = [replace(order, epoch=job.epoch) for order in job.ending]
            job.said = [*ending, job.outcome]  # the previous leader may not have sent it

    def _stalled(self, event: Stalled) -> None:
        job, attempts = self._job, self._recovery.attempts
        again = job.state is S.RESUMING
        attempts.open()
        why = (
            f"no rank has moved for {event.silence:.1f} s; the job's own step times allow "
            f"{event.limit:.1f} s"
        )
        job.tell("stalled", silence=event.silence, limit=event.limit)
        job.incident.suspicion = why
        if again:  # the last attempt has not helped
            attempts.again(why)
        else:
            attempts.freeze()

    # ---------------------------------------------------------------- open orders and limits

    def outstanding(self) -> list[Order]:
        """
        Return every unanswered order, addressed to the ranks that still owe the answer.
        """
        orders: list[Order] = [o for parts in self._job.node_orders.values() for o in parts]
        for task in self._job.incident.tasks.values():
            for order in task.orders:
                to = tuple(rank for rank in order.to if rank in task.waiting)
                if to:
                    orders.append(replace(order, to=to))
        orders += [o for o, at in self._job.refused.values() if self._job.now < at + REFUSED]
        return [replace(order, epoch=self._job.epoch) for order in (*orders, *self._job.ending)]

    def next_deadline(self) -> float | None:
        """
        Return the time at which `DeadlinePassed` is due, or None.
        """
        job = self._job
        moments = [t.deadline for t in job.incident.tasks.values() if t.waiting]
        if job.state not in SETTLED and job.anyone_joined():
            oldest = next(iter(job.starting.values()), None)
            moments += [] if oldest is None else [self._started_by(oldest)]
        if job.awaits_ends():
            moments += [self._unkillable_at(rank_state) for rank_state in job.terminating()]
        gathered = self._gathered_by()
        moments += [] if gathered is None else [gathered]
        if job.deadline is not None and (job.state is not S.CHOOSING or not job.terminating()):
            moments.append(job.deadline)
        return min(moments, default=None)

    def _expire(self) -> None:
        job = self._job
        for name, task in list(job.incident.tasks.items()):
            if task.waiting and task.deadline <= job.now:
                self._overdue(name, sorted(task.waiting))
                return
        if job.state not in SETTLED and job.anyone_joined():
            self._end_late_starters()
        if job.awaits_ends():
            for rank_state in job.terminating():
                if self._unkillable_at(rank_state) <= job.now:
                    self._dispatch.ends.could_not_end(rank_state)
        self._end_ungathered()
        if not job.expired():
            return
        if job.state is S.EXITING:
            self._recovery.ending.end()
        elif job.state is S.PAUSED:
            job.tell("pause_over", seconds=job.policy.pause)
            self._recovery.pausing.release()
        elif job.state in (S.HEALTHY, S.RESUMING):
            attempts = self._recovery.attempts
            attempts.open()
            late = sorted(job.members - job.finished)
            attempts.freeze(f"ranks {late} have not finished, others have for {job.allowed:.0f} s")

    def _started_by(self, rank_state: RankState) -> float:
        return max(rank_state.spawned, self._job.led) + self._job.policy.join

    def _gathered_by(self) -> float | None:
        """
        Return the time by which the next node has to join. None if no node has joined yet, or if
        all ranks have a place.
        """
        job = self._job
        if job.state is not S.AWAITING or job.gathered is None or not job.placeless():
            return None
        return max(job.gathered, job.led) + job.policy.gather

    def _end_ungathered(self) -> None:
        job, until = self._job, self._gathered_by()
        if until is not None and until <= job.now:
            why = (
                f"ranks {job.placeless()} have no place: {job.policy.gather:.0f} s after the last "
                "node no other has come"
            )
            self._recovery.ending.exit("failed", 4, why)

    def _unkillable_at(self, rank_state: RankState) -> float:
        return max(rank_state.terminating_since, self._job.led) + self._job.policy.kill

    def _end_late_starters(self) -> None:
        job = self._job
        for rank_state in [s for s in job.starting.values() if self._started_by(s) <= job.now]:
            job.starts(rank_state)
            why = f"not ready {job.policy.join:.0f} s after its start"
            self._recovery.attempts.terminate(rank_state, why, "process")

    def _overdue(self, order: OrderName, ranks: list[int]) -> None:
        job, attempts = self._job, self._recovery.attempts
        if order == "stop":
            ranks = self._not_called_after(ranks)
        if not ranks:
            return
        most = self._are_most(order, ranks)
        if most and order in AT_ONCE and self._renewed(order):
            return
        if order == "stop" and not most and self._spared(ranks):
            return
        why = f"no answer to {order} in time"
        job.tell("order_overdue", order=order, ranks=ranks)
        match order:
            case "hold":
                self._recovery.pausing.give_up(f"ranks {ranks}: {why}")
            case "regroup" | "rebuild" | "resume":
                # one missing rank holds up all of them, and the freeze shows which rank is missing
                attempts.again(f"ranks {ranks}: {why}")
            case "release":
                self._unheard(ranks, why)
            case "check" if most:  # one rank hangs in the check, and the others wait for it there
                self._unheard(ranks, why)
            case (
                "freeze" | "stop" | "compare" | "load" | "fetch" | "restore" | "reload" | "rollback" | "check"
                | "save" | "commit"
            ):  # fmt: skip
                why = f"{why}. {ALONE}" if order == "stop" else why
                attempts.terminate_all((job.rank_states[rank] for rank in ranks), why, "hang")
            case "complete":
                attempts.terminate_all((job.rank_states[rank] for rank in ranks), why, "process")
            case "end":
                job.incident.tasks.pop(order)
            case _:
                assert_never(order)

    def _unheard(self, ranks: list[int], why: str) -> None:
        """
        Open a `network` fault without a culprit: ranks that have not answered a `release`, or most
        ranks that have not answered a `check`, are not at fault for that alone. Ranks that train
        meanwhile are not either. The freeze shows which ranks hear nothing.
        """
        step = self._job.rank_states[ranks[0]].position.step + 1  # all ranks wait at one boundary
        self._recovery.attempts.fault("network", None, step, self._job.now, f"ranks {ranks}: {why}")

    def _are_most(self, order: OrderName, ranks: list[int]) -> bool:
        """
        Return whether `ranks` are more than half of the ranks that the order went to, and more than
        one.
        """
        asked = sum(len(each.to) for each in self._job.incident.tasks[order].orders)
        return len(ranks) > 1 and 2 * len(ranks) > asked

    def _renewed(self, order: OrderName) -> bool:
        """
        Give an order that most ranks have not answered its limit again, up to `policy.patient`
        times: the bus or this controller may be away, and no rank is at fault then. Return whether
        the limit was given again.
        """
        task = self._job.incident.tasks[order]
        if task.renewed >= self._job.policy.patient:
            return False
        task.renewed += 1
        task.deadline = self._job.now + task.limit
        return True

    def _not_called_after(self, ranks: list[int]) -> list[int]:
        """
        Return the ranks that are not busy with functions that are called after a step, such as an
        evaluation. The busy ranks get the time that they have announced for these functions.
        """
        job, task = self._job, self._job.incident.tasks["stop"]
        until = {
            rank: task.issued + job.rank_states[rank].after
            for rank in ranks
            if job.rank_states[rank].position.after
            and task.issued + job.rank_states[rank].after > job.now
        }
        if until:
            task.deadline = max(until.values())
            job.tell(
                "stop_waits", ranks=sorted(until), why="what is called after a step runs there"
            )
        return [rank for rank in ranks if rank not in until]

    def _spared(self, ranks: list[int]) -> bool:
        """
        Give ranks that do not leave their loop the time of a repair, once, if a shard would be lost
        with them and there is no checkpoint to go back to. Such a rank may wait for another one in
        a function of the script, and return when that function reaches its own limit. A rank that
        is taken for hanging gets no more time. Return whether the ranks were given time.
        """
        job, task = self._job, self._job.incident.tasks["stop"]
        hang = any(job.rank_states[rank].blame for rank in ranks)
        lost = not job.untrained and not job.checkpoints and job.only_on(ranks)
        if task.spared or hang or not lost:
            return False
        task.spared, task.deadline = True, job.now + job.policy.repair
        job.tell("stop_waits", ranks=ranks, shards=lost)
        return True

    # ---------------------------------------------------------------- invariants

    def check(self) -> None:
        """
        Check the invariants of the job. Raises `InternalError` when one is broken.
        """
        sentences = list(broken(self._job))
        if sentences:
            raise InternalError("; ".join(sentences))
