"""
Jobs that other jobs are compared with, run once.
"""

import pytest

from tests.e2e.jobs import ROOT, Outcome, run

FAKE = ROOT / "tests" / "e2e" / "fake_job.py"
FAKE_STEPS = 150
GPT_STEPS = 40


@pytest.fixture(scope="session")
def fake_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    The fast job, undisturbed.
    """
    where = tmp_path_factory.mktemp("fake") / "undisturbed"
    outcome = run(where, "--adaptor", "fake", script=FAKE, arguments=(str(FAKE_STEPS),))
    assert outcome.code == 0, outcome.output
    return outcome


@pytest.fixture(scope="session")
def gpt_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    The example, undisturbed.
    """
    where = tmp_path_factory.mktemp("gpt") / "undisturbed"
    outcome = run(where, arguments=("--steps", str(GPT_STEPS)))
    assert outcome.code == 0, outcome.output
    return outcome
