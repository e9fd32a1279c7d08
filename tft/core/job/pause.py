"""
Pauses a job. All ranks that train continue to the same step boundary and wait there, with their
process groups intact. If it was requested, they run a check of links and devices there. Then they
continue to train. A pause is not an incident. But a fault during the pause opens an incident, and
so does a fault that the check finds.
"""

from tft.core.job.attempts import Attempts
from tft.core.job.state import Job
from tft.core.job.transitions import State
from tft.protocol.messages import Check, Hold, PauseRequested, Release

S = State


class Pausing:
    """
    Controls the pauses of one job: lets all ranks wait at the same step boundary, runs a check
    there, and lets the ranks train on.
    """

    def __init__(self, job: Job, attempts: Attempts) -> None:
        self._job = job
        self._attempts = attempts

    def begin(self, request: PauseRequested) -> None:
        """
        Begin the pause that `request` asks for: order every rank that trains to report its
        position. Then all these ranks will train on and wait at the end of the step that the
        furthest rank has reached.
        """
        job = self._job
        job.pausing.request = request
        job.pausing.result = ""
        job.tell("pausing", why=request.why, check=request.check)
        self._come(request.why)

    def gather(self, why: str) -> None:
        """
        Make all ranks train on to the same step boundary and wait there, as for a pause. There the
        successors, which are processes that are ready to replace others, can take over. `why` is
        the reason for the log.
        """
        self._job.succession.gathering = True
        self._job.tell("gathering", why=why)
        self._come(why)

    @property
    def gathered(self) -> bool:
        """
        True when all ranks wait at the step boundary at which successors (processes that replace
        others) will take over.
        """
        job = self._job
        there = "hold" in job.incident.tasks and job.answered_all("hold")
        return job.succession.gathering and there and not job.processes.terminating()

    def _come(self, why: str) -> None:
        self._job.incident.round += 1
        self._job.move(S.PAUSING)
        self._attempts.ask(why)

    def advance(self) -> None:
        """
        Make the next move of a pause if its conditions are met: order the ranks to wait at one step
        boundary, begin the check of links and devices, or act on the result of the check. Do the
        same, without a check, if the ranks gather so that successors can take over.
        """
        job = self._job
        tasks = job.incident.tasks
        if job.succession.gathering and not job.succession.warm():
            return self.release()  # no successor is ready any more, so let all ranks train on
        if job.processes.terminating() or any(task.waiting for task in tasks.values()):
            return None
        if "check" in tasks:
            self._checked()
        elif "hold" not in tasks:
            boundary = max(s.position.step + s.position.window for s in job.ranks.member_states())
            job.issue(job.to_all(Hold, step=boundary))
        elif job.state is S.PAUSING and not job.succession.gathering:
            self._paused()
        return None

    def _paused(self) -> None:
        job = self._job
        job.move(S.PAUSED)
        check = "" if job.pausing.request is None else job.pausing.request.check
        job.tell(
            "paused", step=max(s.position.step for s in job.ranks.member_states()), check=check
        )
        if check:
            for rank_state in job.ranks.member_states():
                rank_state.check.verdict, rank_state.check.finding = "pass", ""
            job.issue(job.to_all(Check, name=check))
        else:
            job.timing.stay(job.policy.pause)

    def _checked(self) -> None:
        """
        Act on the result of the check of links and devices: let all ranks train on, give up the
        nodes with bad results, or end the job.
        """
        job = self._job
        job.pausing.request, job.incident.tasks = None, {}
        job.pausing.result = "; ".join(self._attempts.findings()) or "passed"
        job.tell("checked", what=job.pausing.result)
        if not self._attempts.judge():
            self.release()

    def give_up(self, why: str) -> None:
        """
        Give up a pause, or a gathering at which successors would take over, because not all ranks
        reach the step boundary. Log the reason `why`, and let all ranks train on.
        """
        self._job.tell("pause_given_up", why=why)
        for successor in self._job.succession.warm() if self._job.succession.gathering else ():
            # `invited` marks the successor as tried. So the ranks are not gathered for it a second
            # time, which would probably fail too
            successor.process.invited = True
        self.release()

    def release(self) -> None:
        """
        Let all ranks train on after a pause, or after a gathering at which successors would take
        over. The job counts as healthy again when every rank has trained a step.
        """
        job = self._job
        if job.succession.gathering:
            # the gathering is over. Keep `pausing.request`: a pause that was requested meanwhile
            # begins next
            job.succession.gathering = False
        else:
            job.pausing.request = None
            job.tell("released", members=len(job.ranks.members))
        job.training.trained = {
            rank_state.rank for rank_state in job.ranks.member_states() if rank_state.finished
        }
        job.incident.round += 1
        job.step_to(S.RESUMING, job.to_all(Release))
