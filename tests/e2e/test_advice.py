"""
A scheduler's recovery plugin, installed in the controller of a real job with the fake adaptor.
"""

from pathlib import Path

import pytest

from tests.agent.stage import package
from tests.e2e.conftest import FAKE, FAKE_STEPS
from tests.e2e.jobs import Outcome, identical, run

SCHEDULER = """
from tft.clock import SystemClock
from tft.spi import Advice, hookimpl
from tft.protocol.messages import Noticed

reports = []

@hookimpl
def tft_on_leader(report):
    reports.append(report)

@hookimpl
def tft_on_event(event, facts):
    if event == "incident_closed" and facts["incident"] == 1:
        reports[-1](Noticed(rank=2, kind="memory", evidence="its card is hot", at=SystemClock().now()))

@hookimpl
def tft_advise(incident):
    if incident.number == 1:
        return Advice(veto=("retry",), why="cards that failed are taken away")
    if not waited:
        waited.append(incident.round)
        return Advice(wait=0.2, why="the cluster is asked")
    return Advice(strategy="take it slowly", base="retry", why="the cluster says so")

waited = []
"""


@pytest.fixture
def scheduler(tmp_path: Path) -> dict[str, str]:
    """Return the environment variables of a job that has the plugin."""
    (tmp_path / "packages").mkdir()
    package(tmp_path / "packages", "scheduler", SCHEDULER, "tft.plugins")
    return {"PYTHONPATH": str(tmp_path / "packages")}


@pytest.mark.soak
def test_a_scheduler_plugin_reports_faults_and_chooses_the_strategy(
    tmp_path: Path, scheduler: dict[str, str], fake_undisturbed: Outcome
) -> None:
    """When the scheduler plugin rules a retry out, then the process is replaced instead. When it
    reports a fault, all ranks stop for it. When it asks for time, it is asked again, and then the
    plugin's own variant of a strategy is carried out under the plugin's name for it. The losses are
    those of the undisturbed run."""
    outcome = run(
        tmp_path / "run", "--adaptor", "fake", "--backup-every", "1", script=FAKE,
        arguments=(str(FAKE_STEPS), "--seconds", "0.03", "--spread", "1,20"), environment=scheduler,
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    first, second = outcome.incidents
    assert (first["strategy"], first["processes_started"]) == ("recover", 1)
    assert first["tried"] == [
        {
            "strategy": "retry",
            "why_not": "a recovery plugin has ruled it out: cards that failed are taken away",
        }
    ]
    assert [(f["kind"], f["rank"], f["evidence"]) for f in second["faults"]] == [
        ("memory", 2, "its card is hot")
    ]
    assert (second["strategy"], second["pids_kept"]) == ("take it slowly", True)
    identical(outcome, fake_undisturbed)
