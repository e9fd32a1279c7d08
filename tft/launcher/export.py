"""
Writes the last checkpoint of a job in the form of its framework, after the job has ended. The ranks
are started once more for this, in a run directory of their own.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tft.errors import TftError
from tft.launcher.exit_codes import COMPLETED, DUMPED
from tft.launcher.plan import Plan
from tft.launcher.run import say


# Any: the options have different types
def export_last(
    plan: Plan, code: int, options: Mapping[str, Any], run: Callable[[Mapping[str, Any]], int]
) -> None:
    """
    Write the last checkpoint of the job in the form of its framework, if the user wants this
    (`--export`) and the job has ended with a last checkpoint. Print a sentence about the result.

    `code` is the exit code of the job, and `options` are those of `tft run`. `run` runs a job with
    such options, and returns its exit code.
    """
    settings = plan.settings
    if settings.export is None or settings.export_only or code != DUMPED:
        return
    say(f"the last checkpoint is written in the form of the framework to {settings.export}")
    again = {
        **options,
        "job": None,
        "run_dir": settings.run_dir,
        "resume": True,
        "resume_if_any": False,
        "export_only": True,
        "report": None,
        "spare": 0,
        "warm_ranks": 0,
    }
    try:
        ended = run(again)
        why = "" if ended == COMPLETED else f"the ranks have ended with exit code {ended}"
    except TftError as error:
        why = str(error)
    if why:
        say(
            f"the checkpoint is not in {settings.export}: {why}. The checkpoint of tft is there: to "
            f"try again, start the same command with --run-dir {settings.run_dir} --resume "
            "--export-only"
        )
