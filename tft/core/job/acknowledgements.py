"""
Takes in the answers of ranks to orders: the order was carried out, or why not.
"""

from typing import assert_never

from tft.core.job.incident import COMPARED, PHASES, Fault
from tft.core.job.rank_state import RankState
from tft.core.job.recovery import Recovery
from tft.core.job.state import Job
from tft.core.job.transitions import State
from tft.protocol.messages import Answered

S = State

GOING_ON = frozenset(
    {"load", "fetch", "restore", "regroup", "reload", "rebuild", "rollback", "resume"}
)
"""Orders by which ranks return to the training loop."""


class Acknowledgements:
    """
    Takes in the answers to the orders of one job.
    """

    def __init__(self, job: Job, recovery: Recovery) -> None:
        self._job = job
        self._recovery = recovery
        self._attempts = recovery.attempts

    def answered(self, rank_state: RankState, message: Answered) -> None:
        """
        Take in the answer of a rank to an order. An answer that no open order waits for is
        absorbed.
        """
        job = self._job
        if message.order == "resume" and message.failure is None:
            rank_state.repaired = True  # a round that has begun since does not change that
        task = job.incident.tasks.get(message.order)
        key = (message.incident, message.round)
        if task is None or key != (job.incident.number, job.incident.round):
            return None
        if rank_state.rank not in task.waiting or not job.holds_rank(rank_state):
            return None
        rank_state.position, rank_state.held, rank_state.backups = (
            message.position,
            message.held,
            message.backups,
        )
        if message.order in ("freeze", "stop") and rank_state.repaired:
            job.incident.marked(rank_state.rank, message.position)
        if job.resumed and not rank_state.held:
            rank_state.held = None  # the script's initial state is not that of the checkpoint
        compares = message.at - message.compared
        job.phase(
            PHASES.get(message.order, message.order), rank_state.rank, message.began, compares
        )
        if message.compared:
            job.phase("compare", rank_state.rank, compares, message.at)
        if message.order in COMPARED or message.order in ("stop", "load"):
            rank_state.digests = None if message.order == "load" else message.digests
        if message.order == "stop":
            rank_state.line = message.line
        rank_state.inexact = message.inexact or rank_state.inexact
        job.tails = job.tails or message.tails
        # the rank could not write this itself: another rank writes it, for the step that is saved
        # in the end
        rank_state.private = {**rank_state.private, **message.private}
        if message.failure is not None:
            return self._failed(rank_state, message, message.failure)
        task.waiting.discard(rank_state.rank)
        return self._carried_out(rank_state, message)

    def _carried_out(self, rank_state: RankState, message: Answered) -> None:
        match message.order:
            case "freeze":
                # during a stall, a rank that does not wait for other ranks is suspected
                if self._job.incident.suspicion and rank_state.training and not message.waiting:
                    rank_state.blame = "hang"
            case "stop":
                rank_state.training = False
            case "check":
                found = message.finding if message.verdict != "pass" else ""
                rank_state.verdict, rank_state.finding = message.verdict, found
            case "save":
                self._job.saved |= {file.name: file for file in message.files}
            case "resume":
                rank_state.training = True
            case "fetch" | "load":
                if rank_state.damaged:
                    rank_state.doubted = message.position.step
                rank_state.trusted, rank_state.damaged = True, False
                rank_state.holds_another(brought=message.order == "fetch")
                if message.order == "load":  # the rank-local state comes from the checkpoint, too
                    self._job.captures(rank_state)
                self._left_out(rank_state, message)
            case "restore":
                rank_state.trusted = True
                rank_state.holds_another()
            case "rollback":
                self._job.captures(rank_state)
            case _:
                pass

    def _left_out(self, rank_state: RankState, message: Answered) -> None:
        """
        Add a network fault for each source that a rank could not fetch from. The fetch is complete
        all the same: it came from the other sources.
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
        Count a failed load of the checkpoint of `step`, since a disk may be away for a moment. The
        checkpoint is dropped after `policy.attempts` failures. If there is another state to go on
        from, an older checkpoint or the state that other ranks hold, two failures are enough.
        """
        job = self._job
        job.unread[step] += 1
        older = any(earlier < step for earlier in job.checkpoints)
        loaded = any(rank_state.held is not None for rank_state in job.member_states())
        often = min(2, job.policy.attempts) if older or loaded else job.policy.attempts
        if job.unread[step] >= often:
            job.checkpoints.pop(step, None)
            if not older:  # then the state that other ranks have loaded has to do
                job.search(over=True)

    def _replace(self, rank_state: RankState, why: str) -> None:
        """
        End a process that lost its device context, so that another replaces it: every later order
        would fail too.
        """
        self._attempts.fault(
            "process", rank_state.rank, rank_state.position.step + 1, self._job.now, why
        )
        self._attempts.terminate(rank_state, why, "process")

    def _failed(self, rank_state: RankState, message: Answered, why: str) -> None:
        job, attempts, order = self._job, self._attempts, message.order
        job.tell("order_failed", rank=rank_state.rank, order=order, why=why)
        if message.context_lost and order in GOING_ON and job.state is not S.DUMPING:
            return self._replace(rank_state, f"could not {order}: {why}")
        match order:
            case "freeze" | "stop":
                attempts.terminate(rank_state, f"could not {order}: {why}", "process")
            case "save":
                self._recovery.ending.save_failed(rank_state, why)
            case "commit":
                self._recovery.ending.commit_failed(rank_state, why)
            case "restore" if job.state is S.DUMPING:
                self._recovery.ending.restore_failed(rank_state, why)
            case "restore":
                # its kept copies are not what they should be: other ranks have some
                rank_state.damaged = True
                attempts.again(f"rank {rank_state.rank} could not {order}: {why}")
            case "hold":  # this is no fault, but there is no pause
                self._recovery.pausing.give_up(f"rank {rank_state.rank} could not {order}: {why}")
            case "compare":  # the rank is then compared with no other
                job.incident.tasks[order].waiting.discard(rank_state.rank)
            case "release":  # a pause has no fault yet: this failure is the fault
                evidence = f"rank {rank_state.rank} could not {order}: {why}"
                attempts.fault("network", None, rank_state.position.step + 1, job.now, evidence)
            case "load":
                self._unreadable(job.agreed())
                attempts.again(f"rank {rank_state.rank} could not load the checkpoint: {why}")
            case "reload":
                attempts.again(
                    f"rank {rank_state.rank} could not load a checkpoint of its own: {why}"
                )
            case "fetch" | "regroup" | "rebuild" | "rollback" | "resume":
                attempts.again(f"rank {rank_state.rank} could not {order}: {why}")
            case "check":
                # a check that could not run is no evidence, and no reason to stay paused
                job.incident.tasks[order].waiting.discard(rank_state.rank)
                rank_state.verdict, rank_state.finding = "pass", f"it could not be run: {why}"
            case "complete" | "end":
                pass
            case _:
                assert_never(order)
