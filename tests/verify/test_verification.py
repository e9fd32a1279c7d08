"""
What `tft verify` concludes from the jobs of a script.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.verify.test_differences import CALM
from tft.cli.verify import _Printer, _report
from tft.errors import UsageError
from tft.verify import verification
from tft.verify.digests import Digests
from tft.verify.jobs import Ended
from tft.verify.judgement import DIFFERS, IDENTICAL, NOT_TRIED, Finding
from tft.verify.schedule import Kill
from tft.verify.verification import Verification, Verifier

UNFIT = "chaos: the ranks [0] were not all inside a collective of step 4"


class Jobs(Verifier):
    """
    Jobs that are not run. A spec of the phase `collective` does not fit them, and ends its job.
    """

    def _run(self, name: str, specs: Sequence[str]) -> Ended:
        run_dir = self.directory / name
        records = run_dir / "chaos"
        (records / "missed").mkdir(parents=True)
        (run_dir / "output.txt").write_text("")
        code = 0
        for number, spec in enumerate(word for word in specs if word != "--chaos"):
            if "collective" in spec:
                missed = {"spec": spec, "why": UNFIT}
                (records / "missed" / "0.json").write_text(json.dumps(missed))
                code = 3
                break
            fired = {"spec": spec, "at": number}
            (records / f"{number}-1.json").write_text(json.dumps(fired))
        self._jobs += 1
        return Ended(run_dir=run_dir, code=code, seconds=1.0)


class Overtime(Jobs):
    """
    Jobs that are not run, of which those with killed ranks take all the time.
    """

    def _run(self, name: str, specs: Sequence[str]) -> Ended:
        ended = super()._run(name, specs)
        if not specs:
            return ended
        self._until = 0.0
        return replace(ended, code=None)


class LastRankEvaluates(Jobs):
    """
    Jobs that are not run, in which only rank 2 calls the model in an evaluation.
    """

    def _run(self, name: str, specs: Sequence[str]) -> Ended:
        fit = [spec for spec in specs if "evaluation" not in spec or "rank=2" in spec]
        return super()._run(name, fit)


def timed(run_dir: Path, ranks: int) -> Digests:
    """
    Return what a run has recorded if each row has a time, which differs from run to run.
    """
    rows = {
        rank: tuple({**row, "seconds": run_dir.name} for row in rows)
        for rank, rows in CALM.rows.items()
    }
    return replace(CALM, rows=rows)


def test_phase_that_does_not_fit_the_script_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When chaos cannot make the fault of a phase, and the job ends with that, then this phase is not
    tried, with the reason, and no other phase is blamed for it: the others are tried without it."""
    trained = SimpleNamespace(ends={0: 20, 1: 20}, last=20, functions=(), unrecorded=())
    monkeypatch.setattr(verification, "read_digests", lambda run_dir, ranks: trained)
    monkeypatch.setattr(verification, "first_difference", lambda *_, **__: None)
    told: list[Finding] = []
    verifier = Jobs(
        directory=tmp_path, options=(), command=("train.py",), ranks=2, steps=20, limit=100.0,
        told=told.append, began=lambda *_: None,
    )  # fmt: skip
    found = verifier.verify(("forward", "collective", "update"))
    assert found.identical
    assert {each.phase: each.result for each in told} == {
        "forward": IDENTICAL, "collective": NOT_TRIED, "update": IDENTICAL,
    }  # fmt: skip
    assert [each.why for each in told if each.phase == "collective"] == [UNFIT]


def test_values_that_were_not_compared_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When a value of `session.record` differs between two undisturbed runs, then it is not compared,
    and its key is in the report and printed."""
    monkeypatch.setattr(verification, "read_digests", timed)
    verifier = Jobs(
        directory=tmp_path, options=(), command=("train.py",), ranks=2, steps=20, limit=100.0,
        told=lambda _: None, began=lambda *_: None,
    )  # fmt: skip
    found = verifier.verify(("forward",))
    assert (found.identical, found.ignored, found.unrecorded) == (True, ("seconds",), ())
    assert _report(found)["ignored"] == ["seconds"]
    _Printer(quiet=False).ended(found)
    assert "not compared: seconds in the rows of session.record" in capsys.readouterr().out


def test_job_that_takes_all_the_time_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the job with a kill has not ended within the limit, then its phase differs, and the phases
    that are left are not tried, with the reason. No undisturbed job is begun to look for times."""
    monkeypatch.setattr(verification, "read_digests", timed)
    verifier = Overtime(
        directory=tmp_path, options=(), command=("train.py",), ranks=2, steps=20, limit=100.0,
        told=lambda _: None, began=lambda *_: None,
    )  # fmt: skip
    found = verifier.verify(("forward", "update"))
    forward, update = found.findings
    assert (forward.result, forward.killed) == (DIFFERS, True)
    assert forward.why.startswith("the job has not ended within the limit of 100 s")
    assert (update.result, update.kill) == (NOT_TRIED, None)
    assert update.why == "the limit of 100 s for all jobs together is over"
    assert not (tmp_path / "undisturbed-again").exists()
    _Printer(quiet=False).ended(found)
    said = capsys.readouterr().out
    assert said == "differs: the job for forward failed or did not end in time\n"


@pytest.mark.parametrize(("limit", "jobs"), [(100.0, 3), (1.5, 2)])
def test_evaluation_on_another_rank_than_0_costs_one_more_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float, jobs: int
) -> None:
    """When only the last of three ranks calls the model in an evaluation, then it is killed there in
    one more job. If the limit does not leave twice the time of a job, then there is no such job."""
    long = replace(
        CALM,
        ends=dict.fromkeys(range(3), 20),
        functions=dict.fromkeys((4, 8, 12, 16), ("evaluate",)),
    )
    monkeypatch.setattr(verification, "read_digests", lambda run_dir, ranks: long)
    verifier = LastRankEvaluates(
        directory=tmp_path, options=(), command=("train.py",), ranks=3, steps=20, limit=limit,
        told=lambda _: None, began=lambda *_: None,
    )  # fmt: skip
    forward, evaluation = verifier.verify(("forward", "evaluation")).findings
    assert forward.result == IDENTICAL
    assert len(list(tmp_path.iterdir())) == jobs
    if jobs == 3:
        assert (evaluation.result, evaluation.kill) == (
            IDENTICAL, Kill(phase="evaluation", rank=2, step=4),
        )  # fmt: skip
    else:
        assert (evaluation.result, "no time was left" in evaluation.why) == (NOT_TRIED, True)


def test_nothing_tried_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When no rank was killed in any phase, then nothing is called identical, and the verification is
    refused."""
    unfit = Finding(phase="collective", result=NOT_TRIED, why=UNFIT)
    assert not Verification(ranks=2, steps=3, findings=(unfit,)).identical
    long = replace(CALM, ends={0: 20, 1: 20})
    monkeypatch.setattr(verification, "read_digests", lambda run_dir, ranks: long)
    verifier = Jobs(
        directory=tmp_path, options=(), command=("train.py",), ranks=2, steps=20, limit=100.0,
        told=lambda _: None, began=lambda *_: None,
    )  # fmt: skip
    with pytest.raises(UsageError, match="nothing was verified"):
        verifier.verify(("collective",))


def test_losses_and_batches_that_nobody_records_are_not_called_identical(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """When no rank has recorded a batch, as with an adaptor that does not watch batches, then the
    result does not say that the batches are identical."""
    steps = {
        key: {part: "[]" if part[0] == "batches" else digest for part, digest in found.items()}
        for key, found in CALM.steps.items()
    }
    assert replace(CALM, steps=steps).unrecorded == ("batches",)
    findings = (Finding(phase="forward", result=IDENTICAL),)
    found = Verification(ranks=2, steps=3, findings=findings, unrecorded=("batches",))
    _Printer(quiet=False).ended(found)
    said = capsys.readouterr().out
    assert "identical: losses and the state of 2 ranks" in said
    assert "not compared: batches, of which nothing is known" in said
    assert _report(found)["unrecorded"] == ["batches"]
