"""
The checkpoint in the form of the framework, which is written after a job has ended with a last
checkpoint.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.test_plan import options
from tft.errors import UsageError
from tft.launcher.exit_codes import COMPLETED, DUMPED, FAILED
from tft.launcher.export import export_last
from tft.launcher.plan import make_plan

Options = Mapping[str, Any]


def exported(tmp_path: Path, code: int, result: int | str, **chosen: Any) -> list[Options]:
    """
    Return the options with which the ranks are started once more, after a job has ended with `code`.
    The new job ends with the exit code `result`, or is refused with this sentence.
    """
    started = []

    def run(again: Options) -> int:
        started.append(again)
        make_plan(again)
        if isinstance(result, str):
            raise UsageError(result)
        return result

    given = options(run_dir=tmp_path / "run", export=tmp_path / "out", **chosen)
    export_last(make_plan(given), code, given, run)
    return started


def test_a_last_checkpoint_is_exported_in_a_run_directory_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When a job has ended with a last checkpoint, then the ranks resume from its checkpoints, only
    to export, and the report of the job is not touched."""
    (again,) = exported(tmp_path, DUMPED, COMPLETED, report=tmp_path / "report.json", spare=2)
    settings = make_plan(again).settings
    assert settings.checkpoints == tmp_path / "run" / "checkpoints"
    assert settings.run_dir == tmp_path / "run" / "export"
    assert (settings.resume, settings.export_only) == (True, True)
    assert (again["report"], again["spare"], again["job"]) == (None, 0, None)
    assert capsys.readouterr().err.count("tft:") == 1


@pytest.mark.parametrize("code", [COMPLETED, FAILED, 143])
def test_nothing_is_exported_after_another_end(tmp_path: Path, code: int) -> None:
    """When a job has completed, has failed without a checkpoint, or was ended by a signal, then no
    rank is started again."""
    assert exported(tmp_path, code, COMPLETED) == []


@pytest.mark.parametrize(
    ("result", "why"), [(FAILED, "exit code 4"), ("the checkpoint is damaged", "is damaged")]
)
def test_a_failed_export_says_how_to_try_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], result: int | str, why: str
) -> None:
    """When the export fails or is refused, then a sentence says why, and how to try again."""
    exported(tmp_path, DUMPED, result)
    said = capsys.readouterr().err
    assert why in said
    assert f"--run-dir {tmp_path}/run --resume --export-only" in said
