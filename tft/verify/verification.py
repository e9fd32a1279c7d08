"""
Runs a script without faults and with a rank killed in each phase of a step, and compares the
digests that the runs have recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tft.clock import SystemClock
from tft.errors import UsageError
from tft.verify.differences import Difference, first_difference, volatile_keys
from tft.verify.digests import Digests, read_digests
from tft.verify.jobs import OUTPUT, Ended, run_job
from tft.verify.judgement import DIFFERS, NOT_TRIED, Finding, judge, settle
from tft.verify.schedule import Kill, schedule

_SHOWN = 12
"""The number of lines at the end of a job's output that an error message shows."""
_FURTHER = 2.0
"""How many times as long as the last job the remaining time must be, so that a job is begun only to
kill other ranks. A job that does not end in time would count as a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """
    The result of `tft verify`.
    """

    ranks: int
    steps: int
    findings: tuple[Finding, ...]
    ignored: tuple[str, ...] = ()
    """The keys in the rows of `session.record` that were not compared, because their values differ
    between two undisturbed runs."""
    unrecorded: tuple[str, ...] = ()
    """Which of the two kinds `losses` and `batches` were not compared, because no rank has recorded
    them."""

    @property
    def tried(self) -> tuple[Finding, ...]:
        """
        Return the findings of the phases that were tried.
        """
        return tuple(each for each in self.findings if each.result != NOT_TRIED)

    @property
    def identical(self) -> bool:
        """
        Return True if at least one phase was tried, and the kill in each tried phase left the
        results bit-identical.
        """
        return bool(self.tried) and all(each.result != DIFFERS for each in self.tried)


@dataclass(kw_only=True)
class Verifier:
    """
    Runs the jobs of one verification.

    In `directory`, each job gets its own run directory. `options` are options for `tft run`, and
    `command` is the script with its arguments. All jobs together may take `limit` seconds. The
    function `began` is called when the undisturbed job has ended. The function `told` is called
    with each finding as soon as the finding is known.
    """

    directory: Path
    options: Sequence[str]
    command: Sequence[str]
    ranks: int
    steps: int
    limit: float
    told: Callable[[Finding], None]
    began: Callable[[Ended, Digests], None]
    _until: float = 0.0
    _jobs: int = 0
    _calm: Digests | None = None
    _again: Digests | None = None
    _volatile: frozenset[str] = frozenset()
    _alone: Finding | None = None
    """The finding for the phase `evaluation` if rank 0 does not call the model there."""
    _findings: list[Finding] = field(default_factory=list)

    def verify(self, phases: Sequence[str]) -> Verification:
        """
        Kill a rank in each phase, and compare each run with an undisturbed one.

        Raises `UsageError` if no comparison is possible: the undisturbed job fails, has an incident
        or takes too long, it trains too few steps, two undisturbed runs differ, or no phase can be
        tried.
        """
        self._until = SystemClock().now() + self.limit
        calm = self._calm = self._undisturbed("undisturbed")
        pending = list(phases)
        while pending:
            kills = self._schedule(pending)
            if not kills:
                for phase in pending:
                    self._found(Finding(phase=phase, result=NOT_TRIED, why=self._no_room(phase)))
                break
            tried = self._disturbed(kills)
            pending = [phase for phase in pending if phase not in tried]
        found = Verification(
            ranks=self.ranks, steps=calm.last, findings=tuple(self._findings),
            ignored=tuple(sorted(self._volatile)), unrecorded=calm.unrecorded,
        )  # fmt: skip
        if not found.tried:
            raise UsageError("no rank was killed in any phase, so nothing was verified")
        return found

    def _schedule(self, pending: Sequence[str]) -> Sequence[Kill]:
        """
        Return the kills of the next job. Return nothing if the time for all jobs is over, or if the
        undisturbed job was too short for a kill in these phases.
        """
        assert self._calm is not None
        if self._over:
            return ()
        return schedule(
            pending, ranks=self.ranks, last=self._calm.last,
            evaluated=sorted(self._calm.functions), others=self._alone is not None,
        )  # fmt: skip

    @property
    def _over(self) -> bool:
        return SystemClock().now() >= self._until

    def _undisturbed(self, name: str) -> Digests:
        ended = self._run(name, ())
        if ended.code is None:
            raise UsageError(
                f"the undisturbed job has not ended within {self.limit:.0f} s: give it fewer "
                f"--steps or a higher --limit; its output is {ended.run_dir / OUTPUT}"
            )
        if ended.code:
            raise UsageError(
                f"the undisturbed job ended with exit code {ended.code}, so nothing can be "
                f"compared. Its last lines ({ended.run_dir / OUTPUT}):\n{_last_lines(ended)}"
            )
        if ended.incidents:
            raise UsageError(
                f"the undisturbed job had {len(ended.incidents)} incidents of its own, so nothing "
                f"can be compared; see {ended.run_dir / OUTPUT}"
            )
        found = read_digests(ended.run_dir, self.ranks)
        if len(found.ends) < self.ranks or found.last < 2:
            raise UsageError(
                f"the undisturbed job has trained {found.last} steps on all ranks, and at least 2 "
                "are needed: give the script arguments with which it trains more steps, and put "
                "the optimizer step into `with session.update():`"
            )
        if name == "undisturbed":
            self.began(ended, found)
        return found

    def _disturbed(self, kills: Sequence[Kill]) -> list[str]:
        """
        Run one job in which ranks are killed as `kills` says. Return the phases for which the job
        gives a result.

        If a kill changes the training, all later steps of the job differ from the undisturbed job.
        So the job gives no result for later kills.
        """
        specs = [word for kill in kills for word in ("--chaos", kill.spec)]
        ended = self._run(f"disturbed-{self._jobs}", specs)
        missed = ended.missed()
        if missed:
            # the job has failed because of these kills, so its result says nothing about other
            # kills
            unfit = [kill for kill in kills if kill.spec in missed]
            for kill in unfit:
                why = missed[kill.spec]
                self._found(Finding(phase=kill.phase, result=NOT_TRIED, kill=kill, why=why))
            return [kill.phase for kill in unfit]
        difference = self._compare(ended)
        findings = judge(kills, fired=ended.fired(), code=ended.code, difference=difference)
        if difference is not None and not findings:
            raise UsageError(
                "the job in which ranks are killed differs from the undisturbed job before any "
                f"rank was killed: {difference.sentence()}; see {ended.run_dir}"
            )
        time = self._until - SystemClock().now() >= _FURTHER * ended.seconds
        untried = self.ranks - 1 - sum(kill.phase == "evaluation" for kill in kills)
        reported = []
        for finding in findings:
            settled = settle(finding, self._alone, untried=untried, time=time)
            if settled is None:
                self._alone = finding
                continue
            self._found(self._completed(settled, ended))
            reported.append(settled.phase)
        return reported

    def _compare(self, ended: Ended) -> Difference | None:
        """
        Return the first difference between a job in which ranks were killed and the undisturbed
        job, or None.

        If there is a difference, make a second undisturbed run. Values of `session.record` that
        differ between the two undisturbed runs are then ignored. If the time is over, this run
        cannot be made, and None is returned. Raises `UsageError` if anything else differs between
        the two undisturbed runs.
        """
        assert self._calm is not None
        calm, whole = self._calm, ended.code == 0
        other = read_digests(ended.run_dir, self.ranks)
        difference = first_difference(calm, other, whole=whole)
        if difference is None or (self._again is None and ended.code is None):
            return None
        if self._again is None:
            self._again = self._undisturbed("undisturbed-again")
        volatile = self._volatile = volatile_keys(calm, self._again)
        unlike = first_difference(calm, self._again, volatile=volatile)
        if unlike is not None:
            raise UsageError(
                "two undisturbed runs of the script differ, so nothing can be said about disturbed "
                f"ones: {unlike.sentence()}. Seed every random generator, and take no numbers from "
                "clocks or from the order of threads. If the script keeps files, such as "
                "checkpoints, let each job write its own: below the directory that the environment "
                "variable TFT_RUN_DIR names"
            )
        return first_difference(calm, other, volatile=volatile, whole=whole)

    def _completed(self, finding: Finding, ended: Ended) -> Finding:
        """
        Return a finding with what is known from its job: the run directory, what the job reports
        about the kill, and how the job has failed.
        """
        if finding.result == NOT_TRIED or finding.kill is None:
            return finding
        why = self._failure(ended) if finding.result == DIFFERS else ""
        return replace(
            finding, why=why, inexact=_inexact(ended, finding.kill), run_dir=ended.run_dir
        )

    def _failure(self, ended: Ended) -> str:
        """
        Return a text that says how a job has failed, or an empty text if it has ended well.
        """
        if ended.code == 0:
            return ""
        if ended.code is None:
            how = f"the job has not ended within the limit of {self.limit:.0f} s"
        else:
            how = f"the job ended with exit code {ended.code}"
        return f"{how}:\n{_last_lines(ended)}"

    def _found(self, finding: Finding) -> None:
        self._findings.append(finding)
        self.told(finding)

    def _no_room(self, phase: str) -> str:
        assert self._calm is not None
        if phase == "evaluation" and not self._calm.functions:
            return (
                "no function of session.evaluate or session.after_step was called in "
                f"{self._calm.last} steps: give more --steps if one is called later"
            )
        if self._over:
            return f"the limit of {self.limit:.0f} s for all jobs together is over"
        return (
            f"the undisturbed job has trained {self._calm.last} steps, which are too few for a "
            "kill in this phase"
        )

    def _run(self, name: str, specs: Sequence[str]) -> Ended:
        self._jobs += 1
        settings = [
            "--nproc-per-node", str(self.ranks), "--record-digests", "--last-step", str(self.steps),
            "--max-rank-faults", "1000",
        ]  # fmt: skip
        options = [*self.options, *settings, *specs]
        return run_job(self.directory / name, options, self.command, until=self._until)


def _inexact(ended: Ended, kill: Kill) -> tuple[str, ...]:
    """
    Return the sentences in the job's report that say what may not be bit-identical after the
    incident that this kill caused.
    """
    return tuple(
        dict.fromkeys(
            str(sentence)
            for incident in ended.incidents
            if any(
                fault["rank"] == kill.rank and abs(fault["step"] - kill.step) <= 1
                for fault in incident["faults"]
            )
            for sentence in incident.get("inexact") or ()
        )
    )


def _last_lines(ended: Ended) -> str:
    return "\n".join(f"    {line}" for line in ended.words[-_SHOWN:])
