"""
Undisturbed jobs with which other jobs are compared, run once per test run.
"""

import pytest

from tests.e2e.jobs import ROOT, Outcome, run

FAKE = ROOT / "tests" / "e2e" / "fake_job.py"
FAKE_STEPS = 150
GPT_STEPS = 40


@pytest.fixture(scope="session")
def fake_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of the fast job without a fault.
    """
    where = tmp_path_factory.mktemp("fake") / "undisturbed"
    outcome = run(where, "--adaptor", "fake", script=FAKE, arguments=(str(FAKE_STEPS),))
    assert outcome.code == 0, outcome.output
    return outcome


@pytest.fixture(scope="session")
def gpt_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of the example job without a fault.
    """
    where = tmp_path_factory.mktemp("gpt") / "undisturbed"
    outcome = run(where, arguments=("--steps", str(GPT_STEPS)))
    assert outcome.code == 0, outcome.output
    return outcome
