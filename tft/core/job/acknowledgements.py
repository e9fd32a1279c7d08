"""
Handles the answers of ranks to the orders of the controller. In an answer, a rank says that it has
carried out the order, or why it could not.
"""

from typing import assert_never

from tft.core.job.facts import note_capture
from tft.core.job.incident import Fault
from tft.core.job.orders import ORDERS, Failed
from tft.core.job.rank_state import RankState
from tft.core.job.recovery import Recovery
from tft.core.job.state import Job
from tft.core.job.transitions import State
from tft.protocol.messages import Answered, OrderName

S = State


class Acknowledgements:
    """
    Handles the answers of ranks to the orders that they got from the controller of one job.
    """

    def __init__(self, job: Job, recovery: Recovery) -> None:
        self._job = job
        self._recovery = recovery
        self._attempts = recovery.attempts

    def answered(self, rank_state: RankState, message: Answered) -> None:
        """
        Handle the answer of a rank to an order. Ignore the answer if the job does not wait for this
        answer any more, for example because a new round has begun.
        """
        job = self._job
        if message.order == "resume" and message.failure is None:
            # `repaired` says that the process has entered the training loop. Record this even if
            # the answer itself is ignored below: a new round may have begun since the rank sent the
            # answer
            rank_state.repaired = True
        task = job.incident.tasks.get(message.order)
        key = (message.incident, message.round)
        if task is None or key != (job.incident.number, job.incident.round):
            return None
        if rank_state.rank not in task.waiting or not job.ranks.holds_rank(rank_state):
            return None
        rank_state.position = message.position
        holdings = rank_state.holdings
        holdings.held, holdings.backups = message.held, message.backups
        if message.order == "freeze" and rank_state.repaired:
            job.incident.exactness.marked(rank_state.rank, message.position)
        if job.checkpoints.resumed and not rank_state.holdings.held:
            rank_state.holdings.held = (
                # the job was started from a checkpoint, but the rank holds only the initial state
                # that its script has made. Training cannot continue from this state, so record that
                # the rank holds no state (None)
                None
            )
        compares = message.at - message.compared
        rule = ORDERS[message.order]
        job.phase(rule.phase, rank_state.rank, message.began, compares)
        if message.compared:
            job.phase("compare", rank_state.rank, compares, message.at)
        if rule.digests or message.order == "load":
            rank_state.holdings.digests = None if message.order == "load" else message.digests
        if message.order == "stop":
            rank_state.holdings.line = message.line
        rank_state.declared.inexact = message.inexact or rank_state.declared.inexact
        job.training.tails = job.training.tails or message.tails
        # the answer may carry rank-local state that this rank could not write into a checkpoint.
        # Keep this state, so that another rank can write it into the last checkpoint of the job
        rank_state.local_state.reported = {**rank_state.local_state.reported, **message.local_state}
        if message.failure is not None:
            return self._failed(rank_state, message, message.failure)
        task.waiting.discard(rank_state.rank)
        return self._carried_out(rank_state, message)

    def _carried_out(self, rank_state: RankState, message: Answered) -> None:
        match message.order:
            case "freeze":
                # if `suspicion` is set, no rank makes progress (a stall). A rank that does not
                # wait for other ranks is then suspected to be the cause
                if self._job.incident.suspicion and rank_state.training and not message.waiting:
                    rank_state.process.blame = "hang"
            case "stop":
                rank_state.training = False
            case "check":
                found = message.finding if message.verdict != "pass" else ""
                rank_state.check.verdict, rank_state.check.finding = message.verdict, found
            case "save":
                self._job.incident.last_checkpoint.files |= {
                    file.name: file for file in message.files
                }
            case "resume":
                rank_state.training = True
                self._job.training.entered = self._job.timing.now
            case "fetch" | "load":
                rank_state.holdings.repaired(
                    message.position.step, fetched=message.order == "fetch"
                )
                training = self._job.training
                training.start.repaired = training.start.repaired or not training.untrained
                if message.order == "load":  # a loaded checkpoint also brings rank-local state
                    note_capture(self._job, rank_state)
                self._left_out(rank_state, message)
            case "restore":
                rank_state.holdings.trusted = True
                rank_state.holdings.replaced()
            case "rollback":
                note_capture(self._job, rank_state)
                if message.lost:
                    why = f"rank {rank_state.rank}: {message.lost}"
                    reservation = message.position.step, why
                    self._job.incident.exactness.reservations.append(reservation)
            case _:
                pass

    def _left_out(self, rank_state: RankState, message: Answered) -> None:
        """
        Add a network fault for each source rank from which this rank could not fetch state. The
        fetch as a whole has succeeded, because other ranks have sent the same state.
        """
        for source, why in message.odd.items():
            evidence = f"rank {rank_state.rank} could not fetch from rank {source}: {why}"
            self._job.tell("source_left_out", rank=source, to=rank_state.rank, why=why)
            self._job.incident.faults.append(
                Fault(
                    kind="network", rank=source, step=message.position.step + 1, seen=message.at,
                    evidence=evidence, certain=True,
                )
            )  # fmt: skip

    def _unreadable(self, step: int) -> None:
        """
        Count a failed load of the checkpoint of `step`, and stop using the checkpoint after too
        many failures. One failure does not prove that the checkpoint is damaged, because a file
        system may be unreachable for a moment. The limit is `policy.attempts` failures, but at most
        two if the job can continue from an older checkpoint or from state in memory.
        """
        job = self._job
        job.checkpoints.unread[step] += 1
        older = any(earlier < step for earlier in job.checkpoints.known)
        loaded = any(
            rank_state.holdings.held is not None for rank_state in job.ranks.member_states()
        )
        often = min(2, job.policy.attempts) if older or loaded else job.policy.attempts
        if job.checkpoints.unread[step] >= often:
            job.checkpoints.known.pop(step, None)
            # no older checkpoint is left, so the job must continue from state in memory. This state
            # does not count while ranks load a checkpoint: let it count again
            if not older:
                job.search(over=True)

    def _replace(self, rank_state: RankState, why: str) -> None:
        """
        End the process of a rank that has lost its device context (for example after a CUDA error),
        so that another process replaces it. `why` is the reason for the log. The process cannot use
        its device any more, so it would also fail to carry out every later order.
        """
        self._attempts.fault(
            "process", rank_state.rank, rank_state.position.step + 1, self._job.timing.now, why
        )
        self._attempts.terminate(rank_state, why, "process")

    def _failed(self, rank_state: RankState, message: Answered, failure: str) -> None:
        """
        React to an order that a rank could not carry out. `failure` is the reason that the rank
        gives. The table `ORDERS` says what to do, with two exceptions. If the ranks are writing the
        last checkpoint of the job, plan that checkpoint again, without the part of this rank that
        has failed. Otherwise, if the rank has lost its device context, replace its process.
        """
        job, attempts, order = self._job, self._attempts, message.order
        job.tell("order_failed", rank=rank_state.rank, order=order, why=failure)
        if message.context_lost and ORDERS[order].returns and job.state is not S.DUMPING:
            return self._replace(rank_state, f"could not {order}: {failure}")
        self._note_failure(rank_state, order, failure)
        why = f"rank {rank_state.rank} could not {ORDERS[order].action or order}: {failure}"
        match Failed.PLAN_AGAIN if job.state is S.DUMPING else ORDERS[order].failed:
            case Failed.END_PROCESS:
                attempts.terminate(rank_state, f"could not {order}: {failure}", "process")
            case Failed.AGAIN if order == "regroup":
                # the new round may begin later. Do not repeat the order to this rank until then
                job.incident.tasks[order].waiting.discard(rank_state.rank)
                attempts.groups_failed(why)
            case Failed.AGAIN:
                attempts.again(why)
            case Failed.EXCUSED:
                job.incident.tasks[order].waiting.discard(rank_state.rank)
            case Failed.NO_PAUSE:
                self._recovery.pausing.give_up(why)
            case Failed.NETWORK:
                step = rank_state.position.step + 1
                attempts.fault("network", None, step, job.timing.now, why)
            case Failed.PLAN_AGAIN:
                self._recovery.shutdown.dump()
            case Failed.IGNORED:
                pass
            case reaction:
                assert_never(reaction)

    def _note_failure(self, rank_state: RankState, order: OrderName, why: str) -> None:
        """
        Record what the failure of an order shows about the rank or about a checkpoint. `why` is the
        reason that the rank has given.
        """
        match order:
            case "save":
                rank_state.failures.write = why
            case "commit":
                rank_state.failures.commit = why
            case "restore":
                # the rank could not go back to an earlier copy that it keeps. Do not use any of its
                # copies: `damaged` makes the rank fetch its state from other ranks
                rank_state.holdings.damaged = True
                if self._job.state is S.DUMPING:
                    rank_state.failures.restore = why
            case "load":
                self._unreadable(self._job.incident.progress.agreed)
            case "check":
                # a check of links and devices that could not be run shows no fault, so let the rank
                # pass the check
                rank_state.check.verdict, rank_state.check.finding = (
                    "pass",
                    f"the check could not be run: {why}",
                )
            case _:
                pass
