"""
The state machine of a job: it takes events and returns commands.

    handle(event) -> commands     the only input; late or repeated reports, and reports of
                                  processes that do not belong to the job, are ignored
    outstanding() -> orders       the orders that are not answered yet and must be sent again
    next_deadline()               the time at which the machine must get a `DeadlinePassed` event
    check()                       raises an error if an invariant is broken, which is a bug of tft

`transitions.py` has the table of the reactions to every event in every state. `dispatch.py`
receives reports, `recovery.py` leads the job through an incident, and `state.py` holds the facts
that are known about the job. `docs/reference/machine.md` describes the machine in prose.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from tft.core.job.commands import Command, JobOver
from tft.core.job.deadlines import Deadlines
from tft.core.job.dispatch import Dispatch
from tft.core.job.events import (
    CorruptionTraced,
    DeadlinePassed,
    Event,
    Led,
    Received,
    SlicesAgreed,
    SlicesDiffered,
    Stalled,
)
from tft.core.job.incident import Incident
from tft.core.job.integrity import Integrity
from tft.core.job.invariants import broken
from tft.core.job.origin import Origin
from tft.core.job.policy import Policy
from tft.core.job.recovery import Recovery
from tft.core.job.state import Job
from tft.core.job.transitions import REACTIONS, SETTLED, Reaction, State, kind_of
from tft.core.plan.topology import Replicas
from tft.errors import InternalError
from tft.protocol.messages import Order

S = State

REFUSED = 60.0
"""The time in seconds for which a `Refused` message is sent again and again. It tells a process
that its claim to a rank is not accepted. No process confirms that it has received this message. A
process that has not received it after this time has probably ended."""


class Machine:
    """
    The job machine: the state machine of one job of `world` ranks, from the start of the job to its
    end.
    """

    def __init__(self, world: int, policy: Policy, origin: Origin, *, at: float) -> None:
        """
        Create the job machine. `at` is the present time in seconds, by the clock of the controller.
        """
        self._job = Job(world, policy, origin, at=at)
        self._recovery = Recovery(self._job)
        self._dispatch = Dispatch(self._job, self._recovery)
        self._integrity = Integrity(self._job, self._recovery)
        self._deadlines = Deadlines(self._job, self._recovery, self._dispatch.ends)

    @property
    def state(self) -> State:
        """
        The state of the job as a whole.
        """
        return self._job.state

    @property
    def missed(self) -> Mapping[tuple[int | None, str], Sequence[int]]:
        """
        By rank and reason: the steps whose periodic checkpoint could not be written. The rank is
        None if no rank has reported the reason.
        """
        return self._job.checkpoints.missed

    @property
    def begins_unlike(self) -> Sequence[str]:
        """
        Sentences that say which ranks began to train with different copies of a shard. Empty if no
        ranks did, or if the copies were found equal later.
        """
        return tuple(self._job.training.start.unlike.values())

    @property
    def epoch(self) -> int:
        """
        The epoch (the number) of the controller that leads the job now.
        """
        return self._job.timing.epoch

    @property
    def members(self) -> frozenset[int]:
        """
        The ranks that take part in training. After the strategy `scale_in`, some ranks of the job
        do not take part.
        """
        return self._job.ranks.members

    @property
    def switch(self) -> frozenset[int]:
        """
        The ranks that an operator or a program has asked to move to other processes, and that have
        not been moved yet.
        """
        return self._job.succession.switch

    @property
    def nodes(self) -> Sequence[int]:
        """
        The nodes that have joined and are not lost.
        """
        return [node for node in self._job.nodes.ranks if node not in self._job.nodes.lost]

    @property
    def silent(self) -> Sequence[int]:
        """
        The nodes that count as lost because they were silent, and that may join the job again.
        """
        nodes = self._job.nodes
        return [] if self.state in SETTLED else sorted(nodes.silent - nodes.isolated)

    @property
    def kept_by(self) -> Mapping[int, int]:
        """
        By node: the other node that keeps a copy of the rank-local state (generators, data
        position) of the ranks on this node.
        """
        return self._job.nodes.kept_by()

    def replaces(self, node: int) -> bool:
        """
        Return whether an incident is open and other nodes have room for all ranks of `node`. The
        ranks could then continue there at once if `node` were lost.
        """
        nodes = self._job.nodes
        room = sum(nodes.room.get(other, 0) for other in self.nodes if other != node)
        ranks = sum(each.node == node for each in self._job.ranks.states.values())
        return self._job.incident.is_open and room >= ranks

    def node_of(self, rank: int) -> int | None:
        """
        Return the node on which the process that holds this rank runs. Return None if the rank has
        no node, or is not a rank of this job.
        """
        rank_state = self._job.ranks.states.get(rank)
        return None if rank_state is None else rank_state.node

    def incarnation(self, rank: int) -> int:
        """
        Return the incarnation of the process that holds this rank. Return -1 if no process was
        ordered for this rank yet.
        """
        return self._job.ranks.states[rank].incarnation

    @property
    def refused(self) -> Collection[str]:
        """
        The names on the bus of the processes whose claim to a rank was refused. The controller must
        not acknowledge their reports.
        """
        return self._job.processes.refused.keys()

    @property
    def incident(self) -> Incident:
        """
        The open incident or, if no incident is open, the last incident.
        """
        return self._job.incident

    @property
    def incidents(self) -> Sequence[Incident]:
        """
        The closed incidents of the job, the oldest first.
        """
        return self._job.history.incidents

    @property
    def outcome(self) -> JobOver | None:
        """
        The outcome of the job: how the job ends, and why. None: the outcome is not decided yet.
        """
        return self._job.end.outcome

    @property
    def last_step(self) -> int:
        """
        The highest step that any rank has completed.
        """
        return self._job.training.last_step

    @property
    def checkpointed(self) -> int:
        """
        The step of the newest complete checkpoint. Without one, the step from which the job began.
        """
        return self._job.checkpoints.newest

    @property
    def compared(self) -> int:
        """
        The newest step at whose end all copies of each shard are known to have been equal.
        """
        return self._job.training.equal.compared

    @property
    def certified(self) -> int | None:
        """
        The newest step at whose end all copies of each shard are known to have been equal. None: no
        shard has several holders, so there are no copies that could differ.
        """
        return self.compared if self._job.ranks.shared() else None

    @property
    def attempt(self) -> tuple[int, int] | None:
        """
        The incident and the round in which the ranks were last ordered to resume training. Ranks
        send this pair with the digests of their slices, so that old digests can be recognized.
        None: no rank has trained yet.
        """
        return self._job.training.attempt

    def replicas(self) -> Replicas:
        """
        Return which shards several members hold. Members are the ranks that take part in training.
        Also return the names of the shards of each member, and the ranks of its model replica.
        """
        ranks = self._job.ranks
        return Replicas(
            groups=ranks.shared(),
            names={s.rank: tuple(s.declared.shards) for s in ranks.member_states()},
            columns={s.rank: s.declared.column for s in ranks.member_states() if s.declared.column},
        )

    @property
    def checked(self) -> str:
        """
        The result of the last requested check of links and devices: `passed`, or a sentence that
        says what was found. Empty: there is no result yet.
        """
        return self._job.pausing.result

    # ---------------------------------------------------------------- handling of events

    def handle(self, event: Event) -> list[Command]:
        """
        Handle one event. Return the commands that the controller must carry out because of this
        event.
        """
        job = self._job
        job.said = []
        job.timing.now = event.at
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
                self._deadlines.expire()
            case Stalled():
                self._stalled(event)
            case SlicesAgreed():
                self._integrity.agreed(event)
            case SlicesDiffered():
                self._integrity.differed(event)
            case CorruptionTraced():
                self._integrity.traced(event)
            case Led():
                self._led(event)
            case _:
                assert_never(event)

    def _led(self, event: Led) -> None:
        """
        Handle the start of a new leader (the controller that decides). Restart every time limit,
        because no answer could arrive while there was no leader. Send again what the previous
        leader may not have sent. If events of the story are lost, end the job, with a last
        checkpoint if possible.
        """
        job = self._job
        job.timing.lead(event.epoch, event.at)
        for task in job.incident.tasks.values():
            task.deadline = event.at + task.limit
        if event.lost and job.state not in SETTLED:
            self._salvage(event.lost)
        if job.state is S.CHOOSING and not job.unsettled():
            # the question of the previous leader may not have reached the recovery plugins: ask
            # them again
            self._recovery.choice.ask()
        if job.state is S.ENDED and job.end.outcome is not None:
            ending = [replace(order, epoch=job.timing.epoch) for order in job.end.orders]
            # the job is over, but the previous leader may have ended before it sent the last orders
            # to the nodes and wrote the report. Do both again
            job.said = [*ending, job.end.outcome]

    def _salvage(self, lost: int) -> None:
        """
        End the job, because `lost` events of the damaged story (the recorded events of the job)
        could not be read. If possible, ask the ranks for their positions and let them save a last
        checkpoint.
        """
        ready = any(rank_state.ready for rank_state in self._job.ranks.member_states())
        if not ready or not self._recovery.attempts.salvage(lost):
            self._recovery.shutdown.exit(
                "failed", 4, f"{lost} events of the damaged story could not be read"
            )

    def _stalled(self, event: Stalled) -> None:
        job, attempts = self._job, self._recovery.attempts
        if event.out and not self._has_left(event):
            return
        again = job.state is S.RESUMING
        attempts.open()
        what = (
            "all ranks have left their training loops without a fault, and none has returned"
            if event.out
            else "no rank has moved"
        )
        allowed = "the limit is" if event.out else "the job's own step times allow"
        why = f"{what} for {event.silence:.1f} s; {allowed} {event.limit:.1f} s"
        job.tell("stalled", silence=event.silence, limit=event.limit)
        job.incident.suspicion = why
        if again:  # the ranks were ordered to train again and stand still: the attempt has failed
            attempts.again(why)
        else:
            attempts.freeze()

    def _has_left(self, event: Stalled) -> bool:
        """
        Return True if every rank had entered its training loop, and all have left it for longer
        than the limit in `event`. Return False if a rank has finished training, because then a
        deadline runs for the others.
        """
        training = self._job.training
        return (
            not training.finished
            and event.at - training.entered > event.limit
            and all(rank_state.training for rank_state in self._job.ranks.member_states())
        )

    # ---------------------------------------------------------------- unanswered orders, deadlines

    def outstanding(self) -> list[Order]:
        """
        Return every order that is not answered yet, addressed to the ranks whose answer is missing.
        The caller sends these orders again, because the bus may lose messages.
        """
        orders: list[Order] = [o for parts in self._job.nodes.orders.values() for o in parts]
        orders += [
            replace(recalling.order, ranks=tuple(sorted(recalling.waiting)))
            for recalling in self._job.nodes.recalls.values()
        ]
        for task in self._job.incident.tasks.values():
            for order in task.orders:
                to = tuple(rank for rank in order.to if rank in task.waiting)
                if to:
                    orders.append(replace(order, to=to))
        orders += [
            o
            for o, at in self._job.processes.refused.values()
            if self._job.timing.now < at + REFUSED
        ]
        return [
            replace(order, epoch=self._job.timing.epoch)
            for order in (*orders, *self._job.end.orders)
        ]

    def next_deadline(self) -> float | None:
        """
        Return the time at which the next time limit ends. At this time the machine must get the
        event `DeadlinePassed`. Return None if no time limit is running.
        """
        return self._deadlines.next()

    # ---------------------------------------------------------------- check of the invariants

    def check(self) -> None:
        """
        Check the conditions that must always be true for a job (`invariants.py`). Raises
        `InternalError` if one of these conditions is not true.
        """
        sentences = list(broken(self._job))
        if sentences:
            raise InternalError("; ".join(sentences))
