"""
Ends a job: as completed, or with a last checkpoint that the remaining ranks write, or without
saving anything.
"""

from dataclasses import replace

from tft.core.job.commands import JobOver
from tft.core.job.comparison import note_habits, note_tails, uneven
from tft.core.job.facts import note_early
from tft.core.job.incident import LastCheckpoint
from tft.core.job.state import Job
from tft.core.job.transitions import State
from tft.core.plan.coverage import covered_step, sound
from tft.core.plan.plan import EXIT
from tft.core.plan.savers import SavePlan, plan_save, savers
from tft.core.plan.standing import Standing, Standings
from tft.errors import InternalError
from tft.protocol.messages import Commit, Complete, End, EndNode, Restore, Save

S = State

FINISHED = "every rank has finished"
"""The reason that the report gives for a completed job. Another sentence may be appended."""

UNSAVED = "what the script saves after session.run may be missing or damaged"


class Shutdown:
    """
    Ends one job, and has the last checkpoint written if one is needed.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    # ---------------------------------------------------------------- the last checkpoint

    def dump(self) -> None:
        """
        Plan the last checkpoint of the job and begin to write the checkpoint. If there is a plan
        already, make a new plan with the ranks that can still write. If no last checkpoint is
        possible, end the job as failed.
        """
        job, incident = self._job, self._job.incident
        failed = {
            s.rank: s.failures.write or s.failures.restore or s.failures.commit
            for s in job.ranks.states.values()
        }
        standings = self._standings()
        step = covered_step(job.ranks.topology().groups, standings, incident.spread.ceiling)
        incident.tasks = {}
        if not isinstance(step, str) and not self._committers():
            step = "no rank is left to commit the checkpoint"
        if isinstance(step, str):
            failures = [
                f"rank {rank} could not write: {why}" for rank, why in failed.items() if why
            ]
            why = "; ".join([step, *failures])
            incident.decision.tried.append(("dump", why))
            incident.decision.plan = EXIT
            return self.exit("failed", 4, f"no last checkpoint can be written: {why}")
        # if the checkpoint is planned again, each shard is written by one rank only, even if
        # `policy.save_copies` asks for all copies
        again = job.state is S.DUMPING
        incident.round += again
        job.move(S.DUMPING)
        incident.progress.step = step + 1
        incident.exactness.returns_to(step)
        note_tails(job, step, standings)
        note_habits(job, step)
        note_early(job, step)
        plan = plan_save(
            job.ranks.topology(),
            standings,
            {s.rank: s.local_state.counts(step) for s in job.ranks.states.values() if s.able},
            step,
            incident.spread.ceiling,
            shards=self._savers(standings, step),
            with_copies=job.policy.save_copies and not again,
        )
        incident.last_checkpoint = LastCheckpoint(
            plan=plan,
            incarnations={rank: job.ranks.states[rank].incarnation for rank in plan.writers},
        )
        # a rank writes the state with which it trains. If the checkpoint needs an earlier copy that
        # the rank keeps, the rank must restore that copy first
        if plan.restoring:
            job.issue(Restore(**job.key(), to=plan.restoring, step=step))
        return None

    def _standings(self) -> dict[int, Standing]:
        """
        Return what the planner of the last checkpoint must know about each rank. Leave out ranks
        that have failed to write their part of the checkpoint.
        """
        return {
            s.rank: s.standing() for s in self._job.ranks.states.values() if not s.failures.write
        }

    def _savers(self, standings: Standings, step: int) -> dict[int, tuple[str, ...]]:
        """
        Return which rank writes which shards. A rank keeps the shards that it writes already, by an
        earlier plan for the same step, unless it has got another process since then.
        """
        job, last = self._job, self._job.incident.last_checkpoint
        earlier = last.plan.shards if last.plan is not None and last.plan.step == step else {}
        writing = {
            shard: rank
            for rank, shards in earlier.items()
            if job.ranks.states[rank].incarnation == last.incarnations[rank]
            for shard in shards
        }
        return savers(
            job.ranks.topology(), standings, step, job.incident.spread.ceiling,
            spread=job.policy.spread_savers, writing=writing,
        )  # fmt: skip

    def replan(self) -> None:
        """
        Plan the last checkpoint again if the plan needs a process that is lost, or a copy that a
        fault has touched since.
        """
        if self._misses_somebody() or self._writes_wrong():
            self.dump()

    def _misses_somebody(self) -> bool:
        """
        Return True if a process that must write or commit the last checkpoint cannot do so any
        more. This is so even if another process holds its rank now. When all files are written,
        only the rank that commits the checkpoint is still needed. If another rank is lost then, the
        checkpoint is not planned again, because files that were written again would be mixed with
        the complete set.
        """
        job, asked = self._job, self._job.incident.last_checkpoint.incarnations
        commit = job.incident.tasks.get("commit")
        committers = set() if commit is None else {r for o in commit.orders for r in o.to}
        plan = job.incident.last_checkpoint.plan
        needed = committers or (set() if plan is None else plan.writers)
        return not all(
            state.able and state.incarnation == asked[state.rank]
            for state in (job.ranks.states[rank] for rank in needed)
        )

    def _writes_wrong(self) -> bool:
        """
        Return True if a fault has touched a copy that a rank writes to the last checkpoint. Return
        False if the checkpoint is being committed already.
        """
        job, plan = self._job, self._job.incident.last_checkpoint.plan
        if plan is None or "commit" in job.incident.tasks:
            return False
        standings, ceiling = self._standings(), job.incident.spread.ceiling
        able = {
            shard: {each.rank for each in sound(shard, ranks, standings, plan.step, ceiling)}
            for shard, ranks in job.ranks.topology().groups.items()
        }
        return any(
            rank not in able[shard] for rank, shards in plan.shards.items() for shard in shards
        )

    def _save(self, plan: SavePlan) -> None:
        """
        Order each writer in the plan of the last checkpoint to write its part.
        """
        job, step = self._job, plan.step
        orphans = {
            s.rank: s.local_state.reported[step]
            for s in job.ranks.states.values()
            if s.rank not in plan.with_local_state and step in s.local_state.reported
            if s.local_state.counts(step)
        }
        saves = [
            Save(
                **job.key(),
                to=(rank,),
                directory=job.checkpoints.path(step),
                step=step,
                shards=plan.shards.get(rank, ()),
                copies=plan.copies.get(rank, ()),
                writes_own=rank in plan.with_local_state,
                local_state=orphans if rank == plan.writers[0] else {},
            )
            for rank in plan.writers
        ]
        job.issue(*saves)

    def advance_dump(self) -> None:
        """
        Take the next step towards the last checkpoint, if its conditions are met: first all writers
        save their parts, then one rank commits (completes) the checkpoint, then the job ends.
        """
        job = self._job
        if job.nodes.recalls:
            # a node still has to report the rank-local state that it has kept for a lost node. This
            # state belongs into the checkpoint
            return
        if job.processes.terminating():
            # some processes are being ended. Wait for their ends, because these may change the plan
            # of the checkpoint
            return
        # plan the checkpoint again if a writer is lost. Only this call notices the loss of a writer
        # that does not take part in training
        self.replan()
        if job.state is not S.DUMPING or not job.answered_all("restore", "save"):
            return
        plan = job.incident.last_checkpoint.plan
        if "save" not in job.incident.tasks and plan is not None:
            self._save(plan)
        elif "commit" not in job.incident.tasks:
            self._commit()
        elif job.answered_all("commit"):
            self._dumped()

    def _commit(self) -> None:
        job = self._job
        step = job.incident.progress.agreed
        committer = min(self._committers())
        incarnation = job.ranks.states[committer].incarnation
        job.incident.last_checkpoint.incarnations[committer] = incarnation
        written = job.incident.last_checkpoint.files
        commit = Commit(
            **job.key(),
            to=(committer,),
            directory=job.checkpoints.path(step),
            step=step,
            files=tuple(written[name] for name in sorted(written)),
        )
        job.issue(commit)

    def _committers(self) -> list[int]:
        return [s.rank for s in self._job.ranks.states.values() if s.able and not s.failures.commit]

    def _dumped(self) -> None:
        job = self._job
        step = job.incident.progress.agreed
        job.training.last_step = step
        job.checkpoints.newest = max(job.checkpoints.newest, step)
        if job.end.stop is not None and job.end.stop.signal:
            return self.exit("cancelled", 128 + job.end.stop.signal, job.end.stop.why)
        why = job.incident.decision.forced or "the job cannot go on"
        return self.exit("dumped", 3, f"{why}; a last checkpoint of step {step} is written")

    # ---------------------------------------------------------------- the end of the ranks

    def complete(self, doubt: str = "") -> None:
        """
        End the job as completed, because every rank that takes part has finished training. `doubt`
        is a sentence about copies that were not compared at the end, or an empty text.
        """
        # periodic checkpoints that are incomplete now stay incomplete: no rank writes any more
        self._job.leave_unfinished(self._job.training.last_step + 1)
        ends = uneven({each.rank: each.position.step for each in self._job.ranks.member_states()})
        # leave out the sentence `ends` if `doubt` contains the same sentence
        said = [self._absent() or FINISHED, "" if ends and ends in doubt else ends, doubt]
        self.exit("completed", 0, "; ".join(filter(None, said)))

    def _absent(self) -> str:
        """
        Return a sentence that names the ranks that have left the job (strategy `scale_in`) and have
        not come back. Empty: all ranks took part in the last step.
        """
        ranks = self._job.ranks
        absent = sorted(ranks.states.keys() - ranks.members)
        if not absent:
            return ""
        return f"all other ranks have finished, but ranks {absent} had left and did not come back"

    def exit(self, result: str, code: int, why: str) -> None:
        """
        Decide how the job ends, and order the ranks to leave. `result` is `completed`, `dumped`,
        `failed` or `cancelled`; `code` is the exit code of `tft run`; `why` is the reason for the
        report. If a signal has asked for the end of the job, `failed` becomes `cancelled`.
        """
        job, incident = self._job, self._job.incident
        if result == "failed":
            job.training.last_step = max(job.training.last_step, incident.progress.furthest)
            result, code = self.failed(code)
        # if the incident is closed, no limit is needed: when the ranks returned to an earlier step,
        # they renamed the checkpoints of later steps, so that nobody uses these checkpoints
        sound = incident.spread.firm if incident.closed is None and result != "completed" else None
        if incident.closed is None:
            incident.closed = job.timing.now
            if incident.number:
                if job.state is not S.DUMPING:
                    incident.decision.plan = EXIT  # give up the strategy that was being carried out
                job.history.incidents.append(incident)
        job.move(S.EXITING)
        job.end.outcome = JobOver(result=result, code=code, why=why, sound=sound)
        job.tell("job_ends", result=result, code=code, why=why)
        incident.tasks = {}
        job.nodes.orders, job.nodes.recalls, job.nodes.overdue = {}, {}, {}
        finished = result == "completed"
        to = tuple(rank_state.rank for rank_state in job.ranks.present())
        if to and finished:
            job.issue(Complete(**job.key(), to=to))
        elif to:
            job.issue(End(**job.key(), to=to, code=code, why=why))
        if not finished:
            job.timing.stay(3 * job.policy.leave)
            job.end.orders = [EndNode(epoch=job.timing.epoch, grace=job.policy.leave, why=why)]
            job.said.extend(job.end.orders)

    def dismiss(self, rank: int) -> None:
        """
        Order the process that has just joined the job as `rank` to end. Do so only if the job is
        ending and is not completed; otherwise do nothing.
        """
        job = self._job
        outcome, task = job.end.outcome, job.incident.tasks.get("end")
        if job.state is S.EXITING and outcome is not None and job.end.orders:
            to = tuple(sorted({rank, *(task.waiting if task is not None else ())}))
            job.issue(End(**job.key(), to=to, code=outcome.code, why=outcome.why))

    def failed(self, code: int) -> tuple[str, int]:
        """
        Return the result and the exit code of a job that has failed with the exit code `code`. If a
        signal has asked for the end of the job, the job counts as cancelled.
        """
        stop = self._job.end.stop
        return ("cancelled", 128 + stop.signal) if stop and stop.signal else ("failed", code)

    def hurry(self) -> None:
        """
        Limit the time that the scripts of a completed job have to end, because the end of the job
        was requested. Without a request they have no limit, because a script may do long work after
        `Session.run`. If the job ends in another way, do nothing: then there is a limit already.
        """
        job = self._job
        if job.state is S.EXITING and not job.end.orders:
            job.timing.shorten(job.policy.wind_up)

    def time_is_up(self) -> None:
        """
        End the job, because the ranks have not left in time. A completed job has such a limit only
        if its end was requested. Then it does not count as completed, because what the scripts save
        after `Session.run` may be missing.
        """
        job, outcome, stop = self._job, self._job.end.outcome, self._job.end.stop
        if outcome is not None and outcome.result == "completed" and stop is not None:
            result, code = self.failed(4)
            late = sorted(r for r, i in job.processes.running if job.ranks.is_current(r, i))
            why = (
                f"all steps are done, but then {stop.why}, and ranks {late} had not ended "
                f"{job.timing.allowed:.0f} s later: {UNSAVED}"
            )
            job.end.outcome = replace(outcome, result=result, code=code, why=why)
        self.end()

    def end(self) -> None:
        """
        End the job, because all ranks have left or their time to leave is over: order the nodes to
        end all processes that still run, and return the outcome. Raises `InternalError` if the
        outcome was not decided before.
        """
        job = self._job
        job.incident.tasks = {}
        if job.end.outcome is None:
            raise InternalError("the ranks have left before the outcome was decided")
        job.move(S.ENDED)
        end = EndNode(epoch=job.timing.epoch, grace=job.policy.leave, why=job.end.outcome.why)
        job.end.orders = [end]
        job.said.extend([end, job.end.outcome])
