"""
Receives the reports of ranks, agents, operators and plugins, and passes each report to the module
that handles it. A report about a rank counts only if it comes from the process of that rank.

    arrivals.py          nodes, rendezvous stores and processes that arrive
    process_exits.py     nodes and processes that end
    faults.py            faults that a rank or an outside observer reports
    acknowledgements.py  answers to orders

This module itself handles the requests of operators, and the reports about the progress of
training.
"""

from typing import assert_never

from tft.core.job.acknowledgements import Acknowledgements
from tft.core.job.arrivals import Arrivals
from tft.core.job.faults import Faults
from tft.core.job.process_exits import ProcessExits
from tft.core.job.rank_process import ProcessStage
from tft.core.job.rank_state import RankState
from tft.core.job.recovery import Recovery
from tft.core.job.state import Job
from tft.core.job.transitions import Reaction, State
from tft.protocol.messages import (
    Advised,
    Answered,
    Checkpointed,
    CheckpointFailed,
    Exited,
    Faulted,
    Finished,
    Joined,
    NodeJoined,
    NodeLost,
    Noticed,
    PauseRequested,
    Position,
    Ready,
    Recalled,
    Report,
    ResumeRequested,
    Spawned,
    StopRequested,
    StoreOpened,
    SwitchRequested,
    Trained,
)

S = State
R = Reaction


class Dispatch:
    """
    Passes each report about one job to the object that handles reports of this kind.
    """

    def __init__(self, job: Job, recovery: Recovery) -> None:
        self._job = job
        self._recovery = recovery
        self.ends = ProcessExits(job, recovery)
        self._arrivals = Arrivals(job, recovery, self.ends)
        self._faults = Faults(job, recovery)
        self._acknowledgements = Acknowledgements(job, recovery)

    def take(self, message: Report, reaction: Reaction, sender: str) -> None:
        """
        Handle one report. `sender` is the name on the bus of the process that sent it. `reaction`
        is the entry of the table `REACTIONS` for this report in the present state of the job. Each
        rank has one accepted process: ignore reports about the rank from other processes. Only a
        `Faulted` report of an earlier process may still say that numbers are wrong.
        """
        match message:
            case NodeJoined():
                self._arrivals.node_joined(message, sender)
            case Spawned():
                self._arrivals.spawned(message)
            case Exited():
                self.ends.exited(message)
            case Recalled():
                self.ends.recalls.take(message)
            case StoreOpened():
                self._arrivals.store_opened(message)
            case NodeLost():
                self.ends.node_lost(message)
            case StopRequested():
                self._stop_requested(message, reaction)
            case PauseRequested():
                self._pause_requested(message, reaction)
            case ResumeRequested():
                self._resume_requested(reaction)
            case SwitchRequested():
                self._recovery.takeover.switch(message)
            case Noticed():
                self._faults.noticed(message)
            case Advised():
                self._recovery.choice.advised(message)
            case Joined():
                self._arrivals.joined(message, sender)
            case (
                Ready() | Faulted() | Answered() | Trained() | Finished() | Checkpointed()
                | CheckpointFailed()
            ):  # fmt: skip
                rank_state = self._job.find(message.rank, message.incarnation)
                if (
                    rank_state is not None
                    and rank_state.process.stage is not ProcessStage.GONE
                    and rank_state.process.sender == sender
                ):
                    self._from_rank(rank_state, message)
                elif isinstance(message, Faulted) and (
                    rank_state is None or rank_state.process.sender == sender
                ):
                    self._faults.overtaken(message)
            case _:
                assert_never(message)

    def _from_rank(
        self,
        rank_state: RankState,
        message: (
            Ready | Faulted | Answered | Trained | Finished | Checkpointed | CheckpointFailed
        ),
    ) -> None:
        match message:
            case Ready():
                self._arrivals.ready(rank_state, message)
            case Faulted():
                self._faults.faulted(rank_state, message)
            case Answered():
                self._acknowledgements.answered(rank_state, message)
            case Trained():
                # `repaired` says that the rank has entered the training loop. The answer to
                # `resume` says so too, but may have been lost, so the report of a completed step
                # also counts
                rank_state.repaired = True
                rank_state.position = Position(step=message.step, window=False)
                self._job.training.completed(message.step)
                if self._job.state is S.RESUMING:
                    self._job.phase(
                        "resume", rank_state.rank, self._job.issued("resume"), message.at
                    )
                    self._job.training.trained.add(rank_state.rank)
                    self._job.training.refusals.trained(
                        rank_state.rank, message.step, message.numbers
                    )
            case Finished():
                rank_state.finished = True
                self._job.training.finished.add(rank_state.rank)
                self._job.training.sliced = self._job.training.sliced or message.sliced
                rank_state.training = False
                rank_state.position = Position(step=message.step, window=False)
                self._job.training.completed(message.step)
                self._job.training.trained.add(rank_state.rank)
            case Checkpointed():
                self._job.checkpointed(message.step, message.directory)
                if message.compared:
                    self._job.training.found_equal(message.step)
            case CheckpointFailed():
                self._job.not_checkpointed(message.rank, message.step, message.why)
                if message.differ:
                    self._faults.differ(message)
            case _:
                assert_never(message)

    # ---------------------------------------------------------------- requests of operators

    def _stop_requested(self, message: StopRequested, reaction: Reaction) -> None:
        node = message.node
        if node in self._job.nodes.lost:
            return self._job.tell("node_left", node=node, ranks=[], why=message.why)
        if node is not None and self._recovery.takeover.is_left(node):
            return self._recovery.takeover.leave(
                node, f"node {node} was asked to leave the job: {message.why}"
            )
        if self._job.end.stop is not None:
            return None
        self._job.end.stop = message
        if reaction is not R.FORCE:
            # the job is ending already: its ranks write a last checkpoint, or leave
            return self._recovery.shutdown.hurry()
        if not any(rank_state.ready for rank_state in self._job.ranks.member_states()):
            code = 128 + message.signal if message.signal else 4
            return self._recovery.shutdown.exit(
                "cancelled" if message.signal else "failed", code, message.why
            )
        self._recovery.attempts.force(message.why)
        return self._recovery.replan()

    def _pause_requested(self, message: PauseRequested, reaction: Reaction) -> None:
        if reaction is R.PAUSE:
            self._recovery.pausing.begin(message)
        elif reaction is R.LATER and self._job.pausing.request is None:
            self._job.pausing.request = message

    def _resume_requested(self, reaction: Reaction) -> None:
        if not self._job.answered_all("check"):
            # a check of links and devices still runs on some ranks, so do not end the pause:
            # all-reduces of training and of the check could be mixed up
            return self._job.tell("check_not_over")
        self._job.pausing.request, self._job.pausing.result = None, ""
        if reaction is R.RELEASE and not self._job.succession.gathering:
            self._recovery.pausing.release()
