"""
The report of `tft report` as plain data, for programs: `tft report --json`.
"""

from dataclasses import asdict
from typing import Any

from tft.report.facts import Facts
from tft.report.goodput import Goodput
from tft.report.sentences import ending, next_steps
from tft.sentences import incident_sentence

SCHEMA = 1


def summary(facts: Facts) -> dict[str, Any]:  # Any: JSON, described in `docs/reference/report.md`
    """
    Return what is known of a job as plain data.
    """
    return {
        "schema": SCHEMA,
        "run_dir": str(facts.run_dir),
        "command": list(facts.command),
        "result": facts.result,
        "over": facts.over,
        "ending": ending(facts),
        "why": facts.why,
        "next": next_steps(facts),
        "exit_code": facts.exit_code,
        "steps": facts.steps,
        "checkpoint": facts.checkpoint,
        "goodput": None if facts.goodput is None else _goodput(facts.goodput),
        "runs": [
            {
                "run": run.progress.run,
                "began_unix": run.progress.unix,
                "world": run.progress.world,
                "from_step": run.progress.from_step,
                "last_step": run.last_step,
                "controllers": len(run.progress.leads),
                "ended": run.progress.ended,
                "goodput": _goodput(run.goodput),
                "spans": [asdict(span) for span in run.goodput.spans],
                "incidents": [incident["id"] for incident in run.incidents],
            }
            for run in facts.runs
        ],
        "incidents": [
            {**incident, "sentence": incident_sentence(incident)} for incident in facts.incidents
        ],
        "missed": facts.report.get("missed", []),
        "begins_unlike": facts.report.get("begins_unlike", []),
        "remarks": facts.report.get("remarks", []),
        "notes": list(facts.notes),
    }


def _goodput(goodput: Goodput) -> dict[str, object]:
    return {
        "share": goodput.share,
        "seconds": goodput.wall,
        "step_time": goodput.step_time,
        "parts": [asdict(part) for part in goodput.parts],
    }
